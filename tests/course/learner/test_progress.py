"""Progress keeps what a learner does, in order, once, and through whatever happens to the process and the file."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

import labkit
from labkit.course.exercises.catalogue import problem
from labkit.course.judge.judge import judge
from labkit.course.judge.report import Report
from labkit.course.judge.verdicts import BROKEN, HOLDS, OPEN, Verdict
from labkit.course.learner import progress, store
from labkit.course.learner.progress import Progress, not_written
from tests.cases import cases

NAMES = ("values", "wire", "memory", "order", "liveness")
FIRST = datetime(2026, 3, 1, 12, tzinfo=UTC)


def report(key="03.2", broken="", cause="", won=None, seconds=1.5) -> Report:
    states = [OPEN if broken in NAMES[: place + 1] and name != broken else HOLDS for place, name in enumerate(NAMES)]
    said = [Verdict(name, BROKEN if name == broken else state, "a law", cause=cause if name == broken else "")
            for name, state in zip(NAMES, states, strict=True)]  # fmt: skip
    if broken == "rules":
        said = [Verdict("rules", BROKEN, "a law", seen="it imports os"), *said]
    star = None if won is None else {"words": "bytes", "unit": "B", "cost": 8, "target": 9, "won": won}
    return Report(key, "A ring", "ring", tuple(said), seconds, star=star)


def exercise(key: str) -> SimpleNamespace:
    return SimpleNamespace(key=key, title="A ring", lab=key[:2], minutes=20, difficulty=3, importance=5)


def ticking(step=timedelta(minutes=1)):
    times = iter(FIRST + k * step for k in range(10_000))
    return lambda: next(times)


@pytest.fixture
def kept(tmp_path) -> Progress:
    return Progress(tmp_path / "progress.sqlite3", ticking())


def test_an_attempt_comes_back_as_it_was(kept):
    """Would catch a field that is lost on the way, and a time of the learner's own zone."""
    kept.add(report(broken="wire", cause="the whole is sent"), "def ring():\n    return 'ä→\\n'\n")
    kept.add(report(won=True, seconds=0.25), "good")
    bad, good = Progress(kept.path).attempts("03.2")
    assert (bad.key, bad.passed, bad.starred, bad.verdict, bad.cause) == (
        "03.2",
        False,
        False,
        "wire",
        "the whole is sent",
    )
    assert bad.source == "def ring():\n    return 'ä→\\n'\n"
    assert (bad.at, good.at) == (FIRST, FIRST + timedelta(minutes=1))
    assert bad.at.utcoffset() == timedelta(0)
    assert (good.passed, good.starred, good.verdict, good.seconds, good.labkit) == (
        True,
        True,
        "",
        0.25,
        labkit.__version__,
    )
    assert Progress(kept.path).attempts("3.2") == Progress(kept.path).attempts() == [bad, good]


def test_the_time_is_that_of_the_world(tmp_path):
    """Would catch a clock without a zone."""
    here = Progress(tmp_path / "p").clock()
    assert here.tzinfo is UTC


def test_rows_say_how_far_a_learner_is(kept):
    """Would catch a star of another exercise, a failure after a success that undoes it, and rows in another order."""
    kept.add(report(broken="values", cause="not summed"), "a")
    kept.hint("03.2", 1)
    kept.hint("03.2", 2)
    kept.hint("03.2", 2)
    kept.add(report(won=False), "b")
    kept.add(report(broken="order"), "c")
    kept.add(report("07.2", won=True), "d")
    nine, three, seven = kept.rows([exercise("09.1"), exercise("03.2"), exercise("07.2")])
    assert (nine.key, nine.tries, nine.passed, nine.hints, nine.first_passed, nine.cause) == (
        "09.1",
        0,
        False,
        0,
        None,
        "",
    )
    assert (three.tries, three.passed, three.starred) == (3, True, False)
    assert (three.hints, three.openings, three.seen) == (2, 3, False)
    assert three.first_passed == FIRST + timedelta(minutes=4)
    assert three.cause == "order broken"
    assert (seven.tries, seven.passed, seven.starred, seven.hints, seven.minutes, seven.lab) == (
        1,
        True,
        True,
        0,
        20,
        "07",
    )
    assert kept.summary == "4 attempts at 2 exercises, 2 passed, 1 starred, 2 hints, 0 solutions"


def test_rows_of_the_real_exercises_are_one_for_each_in_order(kept):
    """Would catch a field of Problem that has another name."""
    real = [problem("07.2"), problem("03.2")]
    assert [(row.key, row.title, row.minutes) for row in kept.rows(real)] == [(p.key, p.title, p.minutes) for p in real]


def test_hints_count_levels_and_openings(kept):
    """Would catch a third hint that counts as one, and a hint of another exercise."""
    assert kept.hints("03.2") == 0
    assert kept.hint("3.2", 1) == 1
    assert kept.hint("03.2", 3) == 3
    assert kept.hint("03.2", 1) == 3
    assert kept.hints("03.2") == 3
    assert kept.openings("03.2") == {1: 2, 3: 1}
    assert kept.hints("03.20") == 0
    for level in (0, 4, "1", None, 1.5):
        with pytest.raises(ValueError, match="the hints of an exercise are 1, 2 and 3, got"):
            kept.hint("03.2", level)
    with pytest.raises(ValueError, match=r"as in '03.2', got 'ring'"):
        kept.hint("ring", 1)


def test_the_solution_is_for_who_has_tried(kept):
    """Would catch a solution that is read in place of the exercise, and a stub that counts as an attempt."""
    with pytest.raises(ValueError, match="exercise 03.2 has not been tried: try it once first"):
        kept.solution("3.2")
    given_out = problem("03.2")
    stub = judge(given_out, given_out.stub)
    assert not_written(stub)
    assert kept.add(stub, given_out.stub) is None
    with pytest.raises(ValueError, match="try it once first"):
        kept.solution("03.2")
    assert kept.add(report(broken="rules"), "import os").verdict == "rules"
    kept.solution("03.2")
    assert kept.rows([exercise("03.2")])[0].seen
    with pytest.raises(ValueError, match="try it once first"):
        kept.solution("07.2")


def test_a_solution_that_is_opened_after_passing_is_not_held_against_anybody(kept):
    """Would catch who compares with the solution, as one should, and is told to have peeped."""
    kept.add(report(broken="wire"), "a")
    kept.add(report(), "b")
    kept.solution("03.2")
    kept.add(report(), "c")
    assert not kept.rows([exercise("03.2")])[0].seen
    kept.add(report("07.2", broken="wire"), "a")
    kept.solution("07.2")
    kept.add(report("07.2"), "solution")
    assert kept.rows([exercise("07.2")])[0].seen


def test_what_was_broken_is_there_for_cards(kept):
    """Would catch a deck of what went well."""
    kept.add(report(broken="wire", cause="the whole is sent"), "a")
    kept.add(report(), "b")
    kept.add(report("07.2", broken="memory"), "c")
    assert kept.failed_causes() == (
        ("03.2", "wire", "the whole is sent", FIRST),
        ("07.2", "memory", "", FIRST + timedelta(minutes=2)),
    )


def test_a_clock_that_jumps_back_changes_no_order(tmp_path):
    """Would catch an order by time: a learner would pass before the first attempt."""
    kept = Progress(tmp_path / "p.sqlite3", ticking(-timedelta(days=400)))
    kept.add(report(broken="wire", cause="first"), "a")
    kept.solution("03.2")
    kept.add(report(), "b")
    kept.add(report(broken="wire", cause="last"), "c")
    (row,) = kept.rows([exercise("03.2")])
    assert [each.source for each in kept.attempts()] == ["a", "b", "c"]
    assert (row.seen, row.cause, row.first_passed) == (True, "last", FIRST - timedelta(days=800))


def test_a_program_with_half_a_character_is_kept(kept):
    """Would catch a check that ends in an error of the file, since a cell can hold what UTF-8 cannot."""
    kept.add(report(broken="wire", cause="\udc80"), "x = '\ud800' + '\x00'")
    assert [each.source for each in kept.attempts()] == ["x = '?' + '\x00'"]


DEEDS = st.lists(
    st.tuples(st.sampled_from(["pass", "fail", "star", "1", "2", "3", "look"]), st.booleans()), max_size=25
)


@settings(max_examples=25)
@given(DEEDS)
def test_rows_are_what_counting_by_hand_says(tmp_path_factory, deeds):
    """Would catch a rule that holds in the examples above only."""
    kept = Progress(tmp_path_factory.mktemp("p") / "p.sqlite3")
    tries, passed, starred, hints, openings, seen = 0, False, False, set(), 0, False
    for what, here in deeds:
        key = "03.2" if here else "03.3"
        if what in "123":
            kept.hint(key, int(what))
            hints, openings = (hints | {what}, openings + 1) if here else (hints, openings)
        elif what == "look":
            if kept.attempts(key):
                kept.solution(key)
                seen = seen or (here and not passed)
        else:
            kept.add(report(key, "wire" if what == "fail" else "", won=what == "star"), "x")
            tries, passed, starred = (
                tries + here,
                passed or (here and what != "fail"),
                starred or (here and what == "star"),
            )
    (row,) = kept.rows([exercise("03.2")])
    assert (row.tries, row.passed, row.starred, row.hints, row.openings, row.seen) == (
        tries, passed, starred, len(hints), openings, seen)  # fmt: skip


# To another machine and back


def filled(path, count=3, key="03.2") -> Progress:
    kept = Progress(path, ticking())
    for number in range(count):
        kept.add(report(key, broken="wire", cause=f"cause {number}"), f"{path.name} {number}")
    kept.hint(key, 2)
    kept.solution(key)
    return kept


def test_two_machines_are_brought_together_and_nothing_is_there_twice(tmp_path):
    """Would catch an import that doubles the attempts, and one that takes what is here for what comes."""
    here, there = filled(tmp_path / "here"), filled(tmp_path / "there")
    sent = json.loads(json.dumps(there.export()))
    assert here.load(sent) == 5
    assert here.load(sent) == 0
    there.add(report(), "and one more")
    assert here.load(there.export()) == 1
    assert there.load(here.export()) == 5
    assert [each.source for each in here.attempts()] == [
        "here 0", "here 1", "here 2", "there 0", "there 1", "there 2", "and one more"]  # fmt: skip
    assert sorted(each.uid for each in here.events()) == sorted(each.uid for each in there.events())
    assert Progress(tmp_path / "new").load(here.export()) == 11
    assert Progress(tmp_path / "new").events() == here.events()


def _without(field):
    return lambda plain: plain["events"][1].pop(field)


def _with(field, value, event=1):
    return lambda plain: plain["events"][event].update({field: value})


@cases(
    ("spoil", "field"),
    [
        (lambda plain: plain.pop("format"), "format"),
        (lambda plain: plain.update(format="other"), "format"),
        (lambda plain: plain.pop("events"), "events"),
        (lambda plain: plain.update(events={"a": 1}), "events"),
        (lambda plain: plain.update(version="1"), "version"),
        (lambda plain: plain.update(version=2), "version: this was exported by a later labkit"),
        (lambda plain: plain.update(more=1), "more"),
        (lambda plain: plain["events"].append("x"), "events.5"),
        (_with("kind", "exam"), "events.1"),
        (_without("kind"), "events.1"),
        (_without("uid"), "events.1.attempt.uid"),
        (_with("uid", ""), "events.1.attempt.uid"),
        (_with("key", "ring"), "events.1.attempt.key"),
        (_without("at"), "events.1.attempt.at"),
        (_with("at", "yesterday"), "events.1.attempt.at"),
        (_with("at", "2026-03-01T12:00:00"), "events.1.attempt.at"),
        (_with("passed", "yes"), "events.1.attempt.passed"),
        (_with("seconds", float("nan")), "events.1.attempt.seconds"),
        (_with("seconds", float("inf")), "events.1.attempt.seconds"),
        (_with("seconds", -1), "events.1.attempt.seconds"),
        (_without("source"), "events.1.attempt.source"),
        (_with("source", {1, 2}), "the export is no plain data"),
        (_with("level", 4, 3), "events.3.hint.level"),
        (_with("unknown", 4, 4), "events.4.solution.unknown"),
    ],
)
def test_an_export_that_is_none_is_refused_by_the_name_of_its_field_and_nothing_of_it_is_kept(spoil, field, tmp_path):
    """Would catch half an import, and 'KeyError: 3'."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    plain = filled(folder / "there").export()
    spoil(plain)
    here = Progress(folder / "here")
    with pytest.raises(ValueError) as caught:
        here.load(plain)
    assert str(caught.value).startswith(field)
    assert "\n" not in str(caught.value)
    assert here.events() == []


@pytest.mark.parametrize("nothing", [None, [], "text", 3])
def test_what_is_no_export_at_all_is_refused(nothing, tmp_path):
    """Would catch an AttributeError of a list."""
    with pytest.raises(ValueError, match="the export: "):
        Progress(tmp_path / "here").load(nothing)


# What happens to processes and files

ADDS = """
import sys
from types import SimpleNamespace
from labkit.course.learner import store
from labkit.course.learner.progress import Progress
store.WAIT_S = 60.0  # however slow the disk is
kept = Progress(sys.argv[1])
report = SimpleNamespace(key="03.2", broken=None, passed=True, starred=False, seconds=1.5)
for number in range(int(sys.argv[2])):
    kept.add(report, f"{sys.argv[3]} {number} " + "x" * 20_000)
    print(number, flush=True)
"""


def adds(path, count, name) -> subprocess.Popen:
    args = [sys.executable, "-c", ADDS, str(path), str(count), name]
    return subprocess.Popen(args, stdout=subprocess.PIPE, text=True)


def test_what_was_kept_outlives_the_kernel_that_is_killed_while_it_writes(tmp_path):
    """Would catch attempts that are held back for a better moment, and a file that a half write spoils."""
    path, before = tmp_path / "p.sqlite3", 0
    for round_ in range(3):
        child = adds(path, 10_000, f"round {round_}")
        told = [child.stdout.readline() for _ in range(7 + 10 * round_)]
        child.send_signal(signal.SIGKILL)
        told += child.stdout.read().splitlines()  # not communicate(), which passes over what readline has read ahead
        child.wait(timeout=300)
        kept = Progress(path)
        mine = [each for each in kept.attempts() if each.source.startswith(f"round {round_} ")]
        assert kept.note == ""
        assert len(told) <= len(mine) <= len(told) + 1
        assert len(kept.attempts()) == before + len(mine)
        before += len(mine)


def test_two_notebooks_at_once_lose_nothing(tmp_path):
    """Would catch 'database is locked'."""
    path = tmp_path / "p.sqlite3"
    children = [adds(path, 20, name) for name in ("one", "two")]
    for each in children:
        each.communicate(timeout=300)
        assert each.returncode == 0
    kept = Progress(path)
    for name in ("one", "two"):
        mine = [each.source.split()[1] for each in kept.attempts() if each.source.startswith(name)]
        assert mine == [str(number) for number in range(20)]


def test_a_file_that_is_locked_for_a_while_ends_no_check(tmp_path, monkeypatch):
    """Would catch a report that a learner never sees since a backup holds the file, and a lost attempt."""
    monkeypatch.setattr(store, "WAIT_S", 0.1)
    kept = Progress(tmp_path / "p.sqlite3", ticking())
    held = sqlite3.connect(kept.path, isolation_level=None)
    held.execute("BEGIN IMMEDIATE")
    kept.add(report(broken="wire"), "a")
    kept.hint("03.2", 1)
    assert "database is locked: 2 events kept until that is mended" in kept.note
    assert "locked" in repr(kept)
    assert kept.hints("03.2") == 1
    kept.solution("03.2")
    held.execute("COMMIT")
    held.close()
    kept.add(report(), "b")
    assert kept.note == ""
    assert [each.kind for each in Progress(kept.path).events()] == ["attempt", "hint", "solution", "attempt"]
    assert [each.kind for each in kept.events()] == ["attempt", "hint", "solution", "attempt"]


def test_a_damaged_file_is_put_aside_and_what_comes_is_kept(tmp_path):
    """Would catch a learner who cannot go on, and one who is not told."""
    kept = filled(tmp_path / "p.sqlite3", 30)
    kept.path.write_bytes(b"no database at all " * 99)
    kept.add(report("07.2"), "new")
    assert [each.source for each in kept.attempts()] == ["new"]
    assert "the old progress is kept as p.sqlite3.damaged-" in kept.note
    assert "damaged" in repr(kept)


def test_a_file_of_a_later_labkit_is_left_alone(kept):
    """Would catch an old labkit that puts a good file aside."""
    kept.add(report(), "a")
    with sqlite3.connect(kept.path) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(ValueError, match="later labkit"):
        Progress(kept.path)
    kept.add(report(), "b")  # a notebook that has it open ends no check for it
    assert kept.hint("03.2", 2) == 2
    assert "update labkit: 2 events kept until that is mended" in kept.note
    with sqlite3.connect(kept.path) as database:
        assert database.execute("SELECT count(*) FROM events").fetchone() == (1,)


def test_a_folder_that_cannot_be_written_makes_progress_of_this_notebook(tmp_path):
    """Would catch an exercise that cannot be checked on a server with read-only homes."""
    (tmp_path / "file").write_text("no folder")
    kept = Progress(tmp_path / "file" / "p.sqlite3")
    kept.add(report(), "a")
    assert kept.rows([exercise("03.2")])[0].passed
    assert "the progress is kept until this notebook ends" in kept.note


def test_an_event_that_nobody_understands_is_passed_over(kept):
    """Would catch one odd row that hides all others."""
    kept.add(report(), "a")
    with sqlite3.connect(kept.path) as database:
        database.execute("INSERT INTO events (uid, said) VALUES ('x', '{\"kind\": 3}')")
    kept.add(report(), "b")
    assert [each.source for each in kept.attempts()] == ["a", "b"]


def test_the_file_is_in_the_data_folder_of_the_user(monkeypatch, tmp_path):
    """Would catch a file in the folder of the notebook, which is another one tomorrow."""
    monkeypatch.setattr(store.platformdirs, "user_data_dir", lambda *_, **__: str(tmp_path / "data"))
    assert Progress().path == tmp_path / "data" / progress.NAME
    assert os.path.exists(tmp_path / "data" / progress.NAME)
