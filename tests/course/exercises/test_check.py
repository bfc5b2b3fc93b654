"""`check` as a learner meets it: in a notebook, in a terminal, with the stop button, and with a kernel that dies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import labkit
from labkit.cli import exercises
from labkit.course.exercises import check as front
from labkit.course.exercises.catalogue import by_name, problem
from labkit.course.judge.attempt import Attempt
from labkit.course.judge.prefork import prefork_server
from labkit.course.learner.progress import Progress
from labkit.course.server.labs import SHIPPED
from tests.typed import typed
from tests.waiting import LONG_S, once, stop_button, until

pytestmark = pytest.mark.slow  # processes of torch's size, some of which must hang first

WRONG = "def ring_reduce_scatter(x, group):\n    return x\n"
ENDLESS = "def ring_reduce_scatter(x, group):\n    while True:\n        pass\n"


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder that is not the developer's."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True, scope="module")
def no_bench_is_left() -> object:
    """The module's server ends with it."""
    yield
    prefork_server().close()


def right() -> Attempt:
    """The reference, as somebody would have written it."""
    it = problem("03.2")
    return Attempt(it.name, it.solution)


def test_a_check_is_judged_kept_and_quick_once_the_bench_is_warm() -> None:
    """A check that is forgotten."""
    report = front.judged(problem("03.2"), right())
    assert report.passed, str(report)
    (kept,) = Progress().attempts("03.2")
    assert kept.passed


def test_the_solution_unlocks_after_an_attempt_and_hints_come_in_order() -> None:
    """A solution for nothing; a skeleton before the idea."""
    with pytest.raises(ValueError, match="03.2"):
        labkit.solution("03.2")
    with pytest.raises(ValueError, match="comes after"):
        labkit.hint("03.2", 2)
    assert "Hint 1 of 3" in repr(labkit.hint("03.2"))
    assert "Hint 2 of 3" in repr(labkit.hint("03.2"))
    assert "Hint 3 of 3" in repr(labkit.hint("03.2"))
    assert Progress().hints("03.2") == 3
    with pytest.raises(ValueError, match="1, 2 and 3"):
        labkit.hint("03.2", 4)
    front.judged(problem("03.2"), Attempt("ring_reduce_scatter", "def ring_reduce_scatter(x, group):\n    return x\n"))
    assert "def ring_reduce_scatter" in labkit.solution("3.2").code


def test_a_card_says_what_is_demanded() -> None:
    """An exercise whose law is known only to the judge."""
    card = labkit.exercise("03.2")
    assert "each rank sends (n-1)/n S bytes" in repr(card)
    assert "●●●○○" in card._repr_html_()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: labkit.check("03.2"), "not its name"),
        (lambda: labkit.check(7), "got int 7"),
        (lambda: labkit.exercise("99.9"), "there is no exercise '99.9'"),
        (lambda: labkit.exercise("03.99"), "03.1, 03.2"),
        (lambda: by_name("ring_reduce_scater"), "ring_reduce_scatter"),
        (lambda: front.judged(problem("03.2"), Attempt("other", "def other(): pass")), "rename it"),
    ],
)
def test_bad_input_gets_a_sentence(call: object, words: str) -> None:
    """A traceback."""
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]


def test_a_patched_library_in_the_notebook_is_told_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that runs on what the notebook has made of the library."""

    def mine(self: object, *_: object) -> int:
        return 0

    mine.__module__ = "__main__"
    monkeypatch.setattr(labkit.Ledger, "sent_bytes", mine)
    assert list(front.tampered()) == ["labkit.comm.ledger.Ledger.sent_bytes"]
    assert front.judged(problem("03.2"), right()).passed


def test_a_check_can_be_stopped_and_the_next_one_works() -> None:
    """A stop button that leaves ranks behind, or breaks what comes after."""
    stopped = prefork_server()
    family: list[psutil.Process] = [psutil.Process(stopped.pid)]

    def ranks_compute() -> bool:
        family[1:] = family[0].children(recursive=True)
        return len(family) >= 6  # itself, the nursery, a judge, two ranks and their parent

    with pytest.raises(KeyboardInterrupt), once(ranks_compute, stop_button):
        while True:
            stopped.judge("03.2", Attempt("ring_reduce_scatter", ENDLESS))
    assert not stopped.alive()
    assert not psutil.wait_procs(family, LONG_S)[1]
    assert prefork_server().judge("03.2", right()).passed


@pytest.mark.rest
def test_nothing_outlives_a_kernel_that_is_killed(tmp_path: Path) -> None:
    """Ranks that compute for ever after the notebook is gone."""
    script = tmp_path / "kernel.py"
    script.write_text(
        "from labkit.course.judge.attempt import Attempt\nfrom labkit.course.judge.prefork import prefork_server\n"
        "b = prefork_server()\nprint(b.pid, flush=True)\n"
        f"b.judge('03.2', Attempt('ring_reduce_scatter', {ENDLESS!r}))\n"
    )
    kernel = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout is not None
    judge = psutil.Process(int(kernel.stdout.readline()))
    assert until(lambda: len(judge.children(recursive=True)) >= 5)
    family = [judge, *judge.children(recursive=True)]
    kernel.kill()
    kernel.wait()
    assert not psutil.wait_procs(family, LONG_S)[1]


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the server judges, and no process is between it and the ranks"
)
def test_a_judge_that_dies_is_told_and_not_waited_for() -> None:
    """Two minutes of silence."""
    one = prefork_server()
    children = psutil.Process(one.pid).children
    assert until(lambda: len(children()) == 1)  # the last judge has reported, and may still be there
    (nursery,) = children()

    def judges() -> list[psutil.Process]:
        return [child for child in children() if child != nursery]

    with (
        pytest.raises(RuntimeError, match="the judge ended with -9"),
        once(judges, lambda: [judge.kill() for judge in judges()]),
    ):
        one.judge("03.2", Attempt("ring_reduce_scatter", ENDLESS))
    assert one.judge("03.2", right()).passed


def test_a_judge_that_dies_after_its_report_is_not_taken_for_the_next_one() -> None:
    """Every later attempt is told what was said of the one before it."""
    one = prefork_server()
    asked = one._ask

    def twice(request: dict[str, object]) -> dict[str, object]:
        one.connection.send_bytes(json.dumps(request).encode())
        return asked(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one, "_ask", twice)
        assert one.judge("03.2", right()).passed  # this attempt has two answers, and one of them is not read
    assert not one.judge("03.2", Attempt("ring_reduce_scatter", WRONG)).passed


def test_two_known_mistakes_at_once_are_both_named() -> None:
    """A learner with two bugs who is told nothing, because no single known mistake gives the same numbers."""
    it = problem("03.2")
    early, in_place = (next(m for m in it.mutants if words in m.cause) for words in ("their owner", "in place"))
    attempt = Attempt(it.name, in_place.source(early.source(it.solution)))
    broken = prefork_server().judge("03.2", attempt).broken
    assert broken is not None
    assert broken.cause.startswith("two mistakes at once")
    assert early.cause in broken.cause
    assert in_place.cause in broken.cause


def test_the_terminal_says_the_same_and_its_exit_code_too(tmp_path: Path) -> None:
    """A CI that is green for a broken attempt."""
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(problem("03.2").solution)
    bad.write_text(WRONG)
    reports, xml = tmp_path / "r.json", tmp_path / "r.xml"
    fine = typed("check", "3.2", "--in", good)
    assert fine.returncode == 0, fine.stdout + fine.stderr
    assert "all five verdicts hold" in fine.stdout
    broken = typed("check", "3.2", "--in", bad, "--json", reports, "--junit", xml)
    assert broken.returncode == 1
    assert "values are broken" in broken.stdout
    assert json.loads(reports.read_text())
    assert "<failure" in xml.read_text()
    missing = typed("check", "3.2", "--in", tmp_path / "no.py")
    assert missing.returncode == 1
    assert len(missing.stderr.strip().splitlines()) == 1


def test_the_terminal_judges_the_notebook_in_which_somebody_has_worked_last(tmp_path: Path, monkeypatch) -> None:
    """The stub of the checkout, judged while the learner's own copy lies in my/."""
    name = "03_collectives.ipynb"
    shipped = (SHIPPED / "exercises" / name).read_text()
    here, mine = tmp_path / "exercises" / name, tmp_path / "own" / "exercises" / name
    for path in (here, mine):
        path.parent.mkdir(parents=True)
        path.write_text(shipped)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(exercises, "SHIPPED", tmp_path)
    assert exercises._notebook("03", tmp_path / "own") == Path("exercises") / name
    mine.write_text(shipped.replace("...  # about 9 lines", "return x", 1))
    assert exercises._notebook("03", tmp_path / "own") == mine
    assert f"{mine}, as it was saved at" in exercises._saved(mine)
    with pytest.raises(ValueError, match="no exercises of lab 19"):
        exercises._notebook("19", tmp_path / "own")
