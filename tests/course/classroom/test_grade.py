"""A folder of notebooks, judged without nbgrader: who gets points, what is said, and what is left alone."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import psutil
import pytest
from rich.console import Console

from labkit.course.classroom import grade as module
from labkit.course.classroom.bubble import works
from labkit.course.classroom.grade import PreforkServers, grade, submissions
from labkit.course.classroom.submission import points_of, read
from labkit.course.classroom.table import ExerciseResult, Table
from labkit.course.exercises.catalogue import problem
from labkit.course.judge.prefork import prefork_server
from labkit.launch.zygote import zygote
from tests.course.classroom.submissions import allowed, answers, hand_in, notebook
from tests.course.judge.test_first_check import OPTIMIZERS

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere no wall confines an attempt, and none is graded"
)
KEYS = ("03.2", "07.2")
SEED = 90210


def children() -> set[int]:
    """Ids of all processes below this one."""
    return {each.pid for each in psutil.Process().children(recursive=True)}


def left(running: set[int]) -> set[int]:
    """Processes that were not there, and do not end; but for the zygote and check's server with its nursery, which end
    with us."""
    server = psutil.Process(prefork_server().pid)
    ours = {zygote().process.pid, server.pid, *(child.pid for child in server.children())}
    until = time.monotonic() + 60
    while (more := children() - running - ours) and time.monotonic() < until:
        time.sleep(0.05)  # a judge that has just answered is still on its way out
    return more


def state(folder: Path) -> dict[str, tuple[int, float]]:
    """Size and time of every file."""
    found = {str(path): path.stat() for path in folder.rglob("*") if path.exists()}
    return {name: (each.st_size, each.st_mtime) for name, each in found.items()}


@pytest.fixture(scope="module", autouse=True)
def _no_bubble() -> Iterator[None]:
    """Without bubblewrap, which imports torch for each table; `test_a_judge_in_a_bubble_...` has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "works", lambda: False)
        yield


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Five students with two exercises each, in the three layouts, and files that are none."""
    folder = tmp_path_factory.mktemp("handed_in")
    places = {"ana": ("ana", "a.ipynb"), "ben": ("ben/lab_03", "b.ipynb"), "cleo": ("cleo", "c.ipynb"),
              "dan": ("", "dan.ipynb"), "eve": ("eve/x/y", "e.ipynb")}  # fmt: skip
    second = answers("07.2") | {"cleo": problem("07.2").stub, "dan": problem("07.2").solution}
    for student, text in answers("03.2").items():
        if student == "dan":  # his loop is endless, and takes seconds: see test_an_endless_loop_costs_its_own_time
            text = problem("03.2").mutants[3].source(problem("03.2").solution)
        place, name = places[student]
        hand_in(folder / place, notebook("from labkit import check", text, "check(1)", second[student]), name)
    torn = folder / "fay"
    hand_in(torn, '{"cells": [', "torn.ipynb")
    hand_in(torn, "", "empty.ipynb")
    hand_in(torn, '{"cells": 3, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}', "three.ipynb")
    hand_in(torn, json.dumps([1]), "list.ipynb")
    (torn / "bytes.ipynb").write_bytes(bytes(range(256)))
    (torn / "link.ipynb").symlink_to(folder / "ana" / "a.ipynb")
    os.mkfifo(torn / "pipe.ipynb")
    (folder / "gus").mkdir()
    spaced = problem("03.2").solution.replace("\n\n", "\n\n\n").replace("=", " = ")
    hand_in(folder / "hal", notebook(answers()["ben"], spaced), "h.ipynb")
    before, running = state(folder), children()
    to = tmp_path_factory.mktemp("out") / "grades.csv"
    table = grade(folder, to, keys=KEYS, seed=SEED, progress=False)
    return SimpleNamespace(folder=folder, table=table, to=to, before=before, left=left(running))


def row(graded: SimpleNamespace, student: str, key: str = "03.2") -> ExerciseResult:
    """What came of an exercise."""
    return next(each for each in graded.table.rows if (each.student, each.exercise) == (student, key))


@pytest.mark.slow
def test_only_who_is_right_gets_points(graded: SimpleNamespace) -> None:
    """Points for a patched check, labkit's own function, a stub; none for the right answer in an odd place."""
    worth = {key: points_of(problem(key)) for key in KEYS}
    passed = {(each.student, each.exercise) for each in graded.table.rows if each.passed}
    assert passed == {("ana", "03.2"), ("ana", "07.2"), ("dan", "07.2"), ("hal", "03.2")}
    points = {each.student: each.points for each in graded.table.sums}
    assert points == {"ana": sum(worth.values()), "ben": 0, "cleo": 0, "dan": worth["07.2"], "eve": 0, "fay": 0,
                      "gus": 0, "hal": worth["03.2"]}  # fmt: skip
    assert {each.of for each in graded.table.sums} == {sum(worth.values())}


def test_a_row_says_what_is_wrong_and_why(graded: SimpleNamespace) -> None:
    """A zero without a reason, or with that of somebody else."""
    told = {student: row(graded, student) for student in answers()}
    assert {name: each.verdict for name, each in told.items()} == {
        "ana": "", "ben": "values", "cleo": "rules", "dan": "wire", "eve": "rules"}  # fmt: skip
    assert told["ben"].cause == problem("03.2").mutants[0].cause
    assert row(graded, "ben", "07.2").cause == problem("07.2").mutants[3].cause
    assert "labkit.comm.ring is not to be had" in told["cleo"].cause
    assert told["dan"].cause == problem("03.2").mutants[3].cause
    assert "not written yet" in told["eve"].cause
    assert row(graded, "hal", "07.2").cause == "there is no definition of ShardedOptimizer"
    assert any("2 ranks, float32" in line for line in told["ben"].report)


def test_a_file_that_is_no_notebook_gets_a_row(graded: SimpleNamespace) -> None:
    """A crash for the whole class, a read that never ends, somebody else's notebook by a link, a student left out."""
    torn = {Path(each.file).name: each for each in graded.table.rows if each.student == "fay" and each.file}
    assert set(torn) == {f"{name}.ipynb" for name in ("torn", "empty", "three", "list", "bytes", "link", "pipe")}
    assert {each.verdict for each in torn.values()} == {"file"}
    assert "is a symbolic link" in torn["link.ipynb"].cause
    assert "no plain file" in torn["pipe.ipynb"].cause
    assert "cannot be read as a notebook" in torn["torn.ipynb"].cause
    assert str(graded.folder) not in torn["torn.ipynb"].cause
    assert [each.cause for each in graded.table.rows if each.student == "gus"][
        0
    ] == "there is no notebook in the folder"


def test_notes_tell_what_a_teacher_may_want_to_know(graded: SimpleNamespace) -> None:
    """Two identical submissions that nobody sees, or that cost points; stubs that count as copies of each other."""
    assert "the same text as hal, white space apart" in row(graded, "ana").note
    assert "the same text as ana, white space apart" in row(graded, "hal").note
    assert "the same text as labkit's reference" in row(graded, "ana").note
    assert "defined 2 times: the last one counts" in row(graded, "hal").note
    assert row(graded, "eve").note == row(graded, "ben").note == row(graded, "eve", "07.2").note == ""
    assert row(graded, "ana").passed
    assert row(graded, "hal").passed


@pytest.mark.rest
@pytest.mark.slow
def test_an_endless_loop_costs_its_own_time(tmp_path: Path) -> None:
    """A time-out for each case, or one that the next student pays, too."""
    for student in ("ana", "dan", "eve"):
        hand_in(tmp_path / student, notebook(answers()[student]))
    began = time.perf_counter()
    rows = {each.student: each for each in grade(tmp_path, keys=["03.2"], progress=False).rows}
    assert time.perf_counter() - began < allowed(len(rows))
    assert {name: each.verdict for name, each in rows.items()} == {"ana": "", "dan": "liveness", "eve": "rules"}
    assert rows["dan"].cause.startswith("it never ends")
    assert "1 of 4 cases" in rows["dan"].report[0]


def test_nothing_is_left_running_and_nothing_is_written_beside_the_notebooks(graded: SimpleNamespace) -> None:
    """A server for each command that stays; a file of a notebook's that was run after all."""
    assert graded.left == set()
    assert state(graded.folder) == graded.before
    assert not Path("ran_in_the_notebook.txt").exists()


def test_the_files_say_the_same_as_the_table(graded: SimpleNamespace) -> None:
    """A column that another program looks for in vain; a JSON that is another story."""
    with graded.to.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:8] == ["student", "exercise", "passed", "verdict", "cause", "seconds", "star", "points"]
    assert [(each["student"], each["exercise"], each["passed"] == "yes") for each in rows] == [
        (each.student, each.exercise, each.passed) for each in graded.table.rows
    ]
    with graded.to.with_name("grades_students.csv").open() as file:
        assert {each["student"]: int(each["points"]) for each in csv.DictReader(file)} == {
            each.student: each.points for each in graded.table.sums
        }
    plain = json.loads(graded.to.with_suffix(".json").read_text())
    assert plain["seed"] == SEED
    assert plain["rows"] == json.loads(json.dumps(graded.table.as_dict()["rows"]))
    assert str(SEED) not in json.dumps(plain["rows"])


def test_a_table_can_be_read_in_a_terminal_and_in_a_notebook(graded: SimpleNamespace) -> None:
    """Words of a student's that are taken for markup."""
    console = Console(width=200, record=True, file=open(os.devnull, "w"))
    console.print(Table((ExerciseResult("[red]x", "03.2", False, "values", "[/b]<b>", 1.0, False, 0, 3),), 1, 1.0))
    shown = console.export_text()
    assert "[red]x" in shown
    assert "[/b]<b>" in shown
    assert "0 of 1 passed, 0 of 3 points" in shown
    assert (
        "&lt;b&gt;"
        in Table((ExerciseResult("x", "03.2", False, "values", "<b>", 1.0, False, 0, 3),), 1, 1.0)._repr_html_()
    )


def test_a_spreadsheet_runs_nothing_that_a_student_wrote(tmp_path: Path) -> None:
    """A cause that begins with = and is a formula to whoever opens the grades."""
    Table((ExerciseResult("=cmd()", "03.2", False, "values", "@SUM(1)", 1.0, False, 0, 3),), 1, 1.0).write(
        tmp_path / "g.csv"
    )
    with (tmp_path / "g.csv").open() as file:
        assert [each["student"] + each["cause"] for each in csv.DictReader(file)] == ["'=cmd()'@SUM(1)"]


@pytest.mark.slow
def test_all_students_get_the_same_cases(tmp_path: Path) -> None:
    """A class in which one has drawn easier numbers than the other; a second run that says something else."""
    text = "def ring_reduce_scatter(x, group):\n    return x.chunk(group.size)[group.rank] * 2\n"
    for student in ("ana", "ben"):
        hand_in(tmp_path / student, notebook(f"# {student}\n{text}"))
    first, second = (
        [each.report[2:4] for each in grade(tmp_path, keys=["03.2"], seed=seed, progress=False).rows] for seed in (1, 2)
    )
    assert first[0] == first[1]
    assert "expected" in first[0][0]
    assert first[0] != second[0]


def test_what_counts_of_several_files_is_told(tmp_path: Path) -> None:
    """A stub in a second notebook that takes the points of the answer in the first."""
    hand_in(tmp_path / "ana", notebook(problem("03.2").solution), "a.ipynb")
    hand_in(tmp_path / "ana", notebook(answers()["ben"]), "b.ipynb")
    hand_in(tmp_path / "ana", notebook(problem("03.2").stub), "c.ipynb")
    hand_in(tmp_path / "ben", notebook(problem("03.2").solution, "def ring_reduce_scatter(x, group:"), "a.ipynb")
    table = grade(tmp_path, keys=["03.2"], progress=False)
    assert [(each.student, each.passed, Path(each.file).name) for each in table.rows] == [
        ("ana", False, "b.ipynb"), ("ben", True, "a.ipynb")]  # fmt: skip
    assert "a.ipynb, ana" in table.rows[0].note
    assert "the last one counts" in table.rows[0].note


def test_only_what_is_there_is_judged_if_nobody_says_what_was_asked(tmp_path: Path, monkeypatch: Any) -> None:
    """A row for each of a hundred exercises that were not asked for."""
    monkeypatch.setattr(module, "problems", lambda: tuple(problem(key) for key in KEYS))
    hand_in(tmp_path / "ana", notebook(problem("03.2").stub))
    assert [each.exercise for each in grade(tmp_path, progress=False).rows] == ["03.2"]


@pytest.mark.slow
def test_what_is_handed_in_may_be_hostile_to_a_reader(tmp_path: Path) -> None:
    """Code that is nested so deeply, or so long, that reading it ends the reader."""
    deep = "x = " + "-" * 50_000 + "1"
    hand_in(tmp_path / "ana", notebook(deep, problem("03.2").solution))
    hand_in(tmp_path / "ben", notebook("ring_reduce_scatter = " + "f(" * 150 + ")" * 150))
    hand_in(tmp_path / "cleo", notebook("#" * 400_000, problem("03.2").solution))
    hand_in(tmp_path / "dan", notebook("def ring_reduce_scatter(x, group):\n    return x" + ".a" * 20_000))
    hand_in(tmp_path / "fay", notebook("def ring_reduce_scatter(x, group):\n" + "    x = x + 1\n" * 3000))
    hand_in(tmp_path / "eve", notebook(*(f"def f{i}(): return f{i + 1}()" for i in range(3000)),
                                       "def ring_reduce_scatter(x, group):\n    return f0()"))  # fmt: skip
    rows = {each.student: each for each in grade(tmp_path, keys=["03.2"], progress=False).rows if each.exercise}
    assert rows["ana"].passed
    assert not any(rows[name].passed for name in ("ben", "cleo", "dan", "eve", "fay"))
    assert "20000 at most" in rows["fay"].cause
    with pytest.raises(ValueError, match="400.* characters of code"):
        read(tmp_path / "cleo" / "03_exercises.ipynb")


@pytest.mark.rest
@pytest.mark.slow
def test_a_judge_that_is_ended_meanwhile_is_replaced() -> None:
    """One server that dies and takes the grades of all who come after."""
    servers = PreforkServers(1)
    try:
        one = psutil.Process(servers.all[0].pid)
        one.kill()
        psutil.wait_procs([one])
        from labkit.course.judge.attempt import attempt_in

        report = servers.judge("03.2", attempt_in([problem("03.2").solution], "ring_reduce_scatter"), 1)
        assert report.passed
    finally:
        servers.close()
    assert not any(each.alive() for each in servers.all)


@pytest.mark.rest
@pytest.mark.slow
def test_two_at_once_say_the_same_as_one_after_the_other(tmp_path: Path) -> None:
    """Rows that change places, or attempts that are judged for somebody else."""
    for student, text in answers().items():
        if student not in ("dan", "cleo"):
            hand_in(tmp_path / student, notebook(text))
    one, two = (grade(tmp_path, keys=["03.2"], seed=5, jobs=jobs, progress=False).rows for jobs in (1, 2))
    assert [(each.student, each.verdict, each.cause) for each in one] == [
        (each.student, each.verdict, each.cause) for each in two
    ]


def test_an_interruption_keeps_what_was_judged(tmp_path: Path, monkeypatch: Any) -> None:
    """An hour of grading that is lost with ctrl-C; a verdict on who was being judged."""
    for student in ("ana", "ben", "cleo"):
        hand_in(tmp_path / "in" / student, notebook(problem("03.2").solution))
    real = module.judged

    def pressed(*args: Any) -> Any:
        outcome = real(*args)
        if pressed.count:  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        pressed.count += 1  # type: ignore[attr-defined]
        return outcome

    pressed.count = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "judged", pressed)
    running = children()
    with pytest.raises(KeyboardInterrupt):
        grade(tmp_path / "in", tmp_path / "grades.csv", keys=["03.2"], progress=False)
    assert [each["student"] for each in csv.DictReader((tmp_path / "grades.csv").open())] == ["ana"]
    assert left(running) == set()


def test_a_link_earns_nothing_whatever_it_is_of(tmp_path: Path) -> None:
    """A student's folder that is a link to another's, or that has one inside: somebody else's marks, or any file."""
    ana = hand_in(tmp_path / "in" / "ana", notebook(problem("03.2").solution)).parent
    (tmp_path / "in" / "ben").symlink_to(ana)
    (tmp_path / "in" / "cleo").mkdir()
    (tmp_path / "in" / "cleo" / "lab_03").symlink_to(ana)
    (tmp_path / "in" / "dan").symlink_to(tmp_path / "nowhere")
    (tmp_path / "in" / "eve.ipynb").symlink_to(next(ana.iterdir()))
    table = grade(tmp_path / "in", keys=["03.2"], progress=False)
    assert [row.student for row in table.rows if row.passed] == ["ana"]
    told = {row.student: row.cause for row in table.rows if row.verdict == "file" and not row.exercise}
    assert set(told) == {"ben", "cleo", "dan", "eve"}
    assert all("is a symbolic link, and these are not followed" in words for words in told.values())


def test_what_is_no_notebook_of_ones_own_is_refused_to_one_and_the_others_are_graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to everything for which no place is left to write the table to; a notebook's name on a link to another's
    folder, or on a folder; a loop, a pipe and a closed folder that end the command or pass without a word."""
    folder = tmp_path / "in"
    ana = hand_in(folder / "ana", notebook(problem("03.2").stub)).parent
    hand_in(folder / "ben.ipynb", notebook(problem("03.2").stub))
    hand_in(folder / "closed", notebook("x = 1"))
    for student, target in {"root": "/", "loop": "loop", "up": "..", "dan.ipynb": ana, "dev": "/dev/zero"}.items():
        (folder / student).symlink_to(target)
    os.mkfifo(folder / "pipe.ipynb")
    (folder / "empty").mkdir()
    (ana / "around").symlink_to(ana)
    real = os.scandir

    def scandir(path: Any) -> Any:  # a folder's rights mean nothing to root, who may be running this
        if path == folder / "closed" or path == str(folder / "closed"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    table = grade(folder, tmp_path / "grades.csv", keys=["03.2"], progress=False)
    assert {row.student for row in table.rows if row.verdict == "rules"} == {"ana", "ben.ipynb"}
    told = {row.student: row.cause for row in table.rows if row.verdict == "file" and not row.exercise}
    links = {"ana", "root", "loop", "up", "dan", "dev"}
    assert set(told) == {*links, "closed", "pipe", "empty"}
    assert all("is a symbolic link, and these are not followed" in told[name] for name in links)
    assert "a folder that cannot be opened" in told["closed"]
    assert "no plain file" in told["pipe"]
    with (tmp_path / "grades.csv").open() as file:
        assert [row["student"] for row in csv.DictReader(file)] == [row.student for row in table.rows]


NAMES = {
    b"M\xfcller": "M\\xfcller",
    b"M\\xfcller": "M\\\\xfcller",
    "Mü 👩\u200d💻".encode(): "Mü 👩\u200d💻",
    b"two\nlines\r": "two\\nlines\\r",
    b"\x1b[31mred": "\\x1b[31mred",
    b'a,b;"c"': 'a,b;"c"',
    b"-rf": "-rf",
    b" =cmd ": " =cmd ",
    b"=cmd()": "=cmd()",
    b"n" * 249: "n" * 249,
}
"""Names of files, and of the students that they stand for."""


def test_any_name_of_a_file_is_a_row_and_no_two_are_one(tmp_path: Path) -> None:
    """A name that is no UTF-8 and cuts off the table of a class; one that breaks a line of it, obeys a terminal, is a
    formula, or is taken for another's."""
    folder = tmp_path / "in"
    folder.mkdir()
    text = nbformat.writes(notebook(problem("03.2").stub), version=4)
    for name in NAMES:
        Path(os.fsdecode(os.path.join(os.fsencode(folder), name + b".ipynb"))).write_text(text)
    inner = Path(os.fsdecode(os.path.join(os.fsencode(folder), b"inner\xff")))
    hand_in(inner, "{", os.fsdecode(b"torn\xfe.ipynb"))
    table = grade(folder, tmp_path / "grades.csv", keys=["03.2"], progress=False)
    rows = [row for row in table.rows if row.exercise]
    assert sorted(row.student for row in rows) == sorted([*NAMES.values(), "inner\\xff"])
    assert {row.verdict for row in rows if row.student != "inner\\xff"} == {"rules"}
    torn = next(row for row in table.rows if not row.exercise)
    assert torn.file == "inner\\xff/torn\\xfe.ipynb"
    assert "torn\\xfe.ipynb cannot be read as a notebook" in torn.cause
    with (tmp_path / "grades.csv").open(encoding="utf-8", newline="") as file:
        cells = [row["student"] for row in csv.DictReader(file)]
    assert [cell.removeprefix("'") for cell in cells] == [row.student for row in table.rows]
    assert {cell for cell in cells if cell[0] == "'"} == {"'-rf", "'=cmd()"}
    with (tmp_path / "grades_students.csv").open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(NAMES) + 1
    plain = json.loads((tmp_path / "grades.json").read_text(encoding="utf-8"))
    assert [row["student"] for row in plain["rows"]] == [row.student for row in table.rows]
    console = Console(width=400, record=True, file=open(os.devnull, "w", encoding="utf-8"))
    console.print(table)
    assert "M\\xfcller" in console.export_text()


def test_half_a_letter_in_a_students_words_does_not_end_the_table(tmp_path: Path) -> None:
    """A word that no file can hold, and grades that end where it stands."""
    words = "\ud800 and on"
    row = ExerciseResult("ana", "03.2", False, "values", words, 1.0, False, 0, 3, words, words, (words,))
    Table((row, row), 1, 1.0).write(tmp_path / "g.csv")
    assert json.loads((tmp_path / "g.json").read_text(encoding="utf-8"))["rows"][1]["cause"] == words
    with (tmp_path / "g.csv").open(encoding="utf-8") as file:
        assert [each["cause"] for each in csv.DictReader(file)] == ["\\ud800 and on"] * 2


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.parametrize("key", OPTIMIZERS)
def test_what_needs_an_optimizer_gets_its_points_also_as_the_first_of_a_process(key: str, tmp_path: Path) -> None:
    """A judge that fails over an import behind its wall, and no points for a right solution."""
    hand_in(tmp_path / "in" / "ana", notebook(problem(key).solution))
    command = ["grade", str(tmp_path / "in"), "--to", str(tmp_path / "grades.csv"), "--exercise", key]
    done = subprocess.run([sys.executable, "-m", "labkit", *command], capture_output=True, text=True, check=False)
    with (tmp_path / "grades.csv").open() as file:
        assert [(row["passed"], row["verdict"]) for row in csv.DictReader(file)] == [("yes", "")], done.stderr


def test_strangers_programs_are_not_judged_where_the_kernel_does_not_confine_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class of programs that run as the teacher, on a machine where nobody has said so."""
    hand_in(tmp_path / "ana", notebook(problem("03.2").solution))
    monkeypatch.setattr(module, "missing", lambda walls: "On this machine nothing holds" if walls else "")
    with pytest.raises(ValueError, match="nothing holds.* --unconfined"):
        grade(tmp_path, tmp_path / "grades.csv", keys=["03.2"], progress=False)
    assert [row.passed for row in grade(tmp_path, keys=["03.2"], progress=False, unconfined=True).rows] == [True]


@pytest.mark.rest
@pytest.mark.slow
@pytest.mark.skipif(not works(), reason="bubblewrap is not installed, or may make no namespaces here")
def test_a_judge_in_a_bubble_says_the_same_and_ends_with_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bubble that is shut so tightly that nobody passes, or that outlives the command."""
    monkeypatch.setattr(module, "works", lambda: True)
    hand_in(tmp_path / "ana", notebook(problem("03.2").solution))
    hand_in(tmp_path / "ben", notebook(answers()["ben"]))
    running = children()
    for jobs in (1, 2):
        rows = grade(tmp_path, keys=["03.2"], progress=False, jobs=jobs).rows
        assert [(row.student, row.passed, row.verdict) for row in rows] == [("ana", True, ""), ("ben", False, "values")]
    assert left(running) == set()


def test_bad_input_is_answered_in_words(tmp_path: Path) -> None:
    """A traceback, a class of zeros where nothing was found, an hour of judging before the CSV cannot be kept."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "zipped").mkdir()
    (tmp_path / "zipped" / "all.zip").write_text("")
    hand_in(tmp_path / "in" / "ana", notebook("x = 1"))
    hand_in(tmp_path / "course", "", "nbgrader_config.py")
    (tmp_path / "file").write_text("")
    (tmp_path / "taken.json").mkdir()
    here = tmp_path / "in"
    for words, where, options in (
        ("is no folder", tmp_path / "file", {}),
        ("is no folder", tmp_path / "nowhere", {}),
        ("no notebooks in", tmp_path / "empty", {}),
        ("unpack all.zip first", tmp_path / "zipped", {}),
        ("is a course for nbgrader: grade .*submitted", tmp_path / "course", {}),
        ("is no .csv", here, {"to": tmp_path / "grades.xls"}),
        ("cannot be written", here, {"to": tmp_path / "nowhere" / "grades.csv"}),
        ("is in a student's folder", here, {"to": here / "ana" / "grades.csv"}),
        ("is there already, and no file", here, {"to": tmp_path / "taken.csv"}),
        ("there is no exercise '99.9'", here, {"keys": ["99.9"]}),
        ("a seed is .* got -3", here, {"seed": -3}),
        ("jobs is .* got 0", here, {"jobs": 0}),
    ):
        with pytest.raises(ValueError, match=words):
            grade(where, progress=False, **options)  # type: ignore[arg-type]
    assert list(submissions(here)) == ["ana"]
