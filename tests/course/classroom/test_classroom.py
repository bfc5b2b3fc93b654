"""A course for nbgrader, as an instructor and five students use it: built, released, handed in, graded, told."""

from __future__ import annotations

import ast
import csv
import html
import json
import os
import re
import stat
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import psutil
import pytest
from traitlets.config import PyFileConfigLoader

from labkit.course.classroom import nbgrader_course as course
from labkit.course.classroom.submission import points_of
from labkit.course.exercises.catalogue import folders, problem
from tests.course.classroom.submissions import PATCHES, answers, filled, hand_in, notebook
from tests.course.judge.test_first_check import OPTIMIZERS

if find_spec("nbgrader") is None:
    pytest.skip("nbgrader is optional: pip install 'labkit[class]'", allow_module_level=True)

SEED = 424242
FILE = "03_collectives.ipynb"
RAISES = "def ring_reduce_scatter(x, group):\n    raise ValueError('<script>x()</script>')\n"
CLASS = ("ana", "ben", "cleo", "dan", "eve")
WIRED = problem("03.2").mutants[3]
"""What dan hands in here: an endless loop costs seconds, and test_grade.py has one."""


def released(folder: Path) -> Any:
    """The students' version."""
    return nbformat.read(folder / "release" / "lab_03" / FILE, as_version=4)


def tampered(there: Any) -> Any:
    """A notebook whose check cell is worth 100 points, is no check, and has metadata of another age."""
    made = filled(there, {"03.2": "def ring_reduce_scatter(x, group):\n    return x\n"}, check="pass")
    for cell in made.cells:
        if "nbgrader" in cell.metadata:
            about = cell.metadata.nbgrader
            about |= {
                "points": 100,
                "grade": about.grade_id.startswith("attempt"),
                "schema_version": 1,
                "locked": False,
            }
    made.cells[0].metadata["nbgrader"] = "a word"
    return made


def without(there: Any, *names: str) -> Any:
    """A notebook in which these cells have been deleted, and the answer stands in a cell of the student's own."""
    made = nbformat.from_dict(there)
    made.cells = [cell for cell in made.cells if cell.metadata.get("nbgrader", {}).get("grade_id") not in names]
    made.cells.append(notebook(problem("03.2").solution).cells[0])
    if made.nbformat_minor < 5:
        del made.cells[-1]["id"]
    return made


def others(there: Any) -> dict[str, tuple[Any, str]]:
    """What else happens: {student: (notebook or text, name of the file)}."""
    right = problem("03.2").solution
    old = filled(there, {"03.2": right})
    old.nbformat_minor = 2
    for cell in old.cells:
        cell.pop("id", None)
    return {
        "fay": ('{"cells": [', FILE),
        "gus": (filled(there, {"03.2": right}), "my exercises.ipynb"),
        "hal": (without(there, "attempt_03_2", "check_03_2"), FILE),
        "ida": (tampered(there), FILE),
        "jon": (filled(there, {"03.2": right.replace("ring_reduce", "rings_reduce")}), FILE),
        "kim": (filled(there, {"03.2": answers()["ben"] + "\n\n" + right}), FILE),
        "leo": (filled(there, {"03.2": RAISES}), FILE),
        "mia": (without(old, "check_03_2"), FILE),
        "nia": (filled(there, {"03.2": "def ring_reduce_scatter(x, group:\n    return x"}), FILE),
        "oz": (notebook("-" * 90_000 + "1", "ring_reduce_scatter = (" + "lambda:" * 900 + "1)"), FILE),
    }  # fmt: skip


def nbgrader(folder: Path, *words: str) -> SimpleNamespace:
    """Run a command of nbgrader's; which processes it started."""
    seen: dict[int, psutil.Process] = {}
    with (folder / "log.txt").open("w+") as log:
        process = subprocess.Popen([sys.executable, "-m", "nbgrader", *words], cwd=folder, stdout=log, stderr=log)
        while process.poll() is None:
            try:
                seen |= {each.pid: each for each in psutil.Process(process.pid).children(recursive=True)}
            except psutil.NoSuchProcess:
                break
            time.sleep(0.05)
        return SimpleNamespace(rc=process.wait(), log=Path(log.name).read_text(), seen=list(seen.values()))


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A whole course: five students whose files are collected, and ten with whom something is the matter."""
    folder, exchange = tmp_path_factory.mktemp("course"), tmp_path_factory.mktemp("exchange")
    exchange.chmod(0o777)
    built = course.build(folder, ["03_collectives"], ["03.2"], seed=SEED)
    with (folder / "nbgrader_config.py").open("a") as file:
        file.write(f"\nc.Exchange.root = {str(exchange)!r}\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # nbgrader calls alembic by its name
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path)
        from nbgrader.apps import NbGraderAPI  # here, since it takes most of a second
        from nbgrader.plugins import CsvExportPlugin

        api = NbGraderAPI(config=configured(folder))
        steps = {"generate": api.generate_assignment("lab_03")}
        inbound = exchange / folder.name / "inbound"
        for student, text in (answers() | {"dan": WIRED.source(problem("03.2").solution)}).items():
            check = "pass" if student == "cleo" else None
            place = inbound / f"{student}+lab_03+2026-01-02 03:04:05 UTC"
            hand_in(place, filled(released(folder), {"03.2": text}, check), FILE)
            (place / "timestamp.txt").write_text("2026-01-02 03:04:05 UTC")
        steps["collect"] = api.collect("lab_03")
        for student, (made, name) in others(released(folder)).items():
            hand_in(folder / "submitted" / student / "lab_03", made, name)
        autograde = nbgrader(folder, "autograde", "lab_03")
        steps["feedback"] = api.generate_feedback("lab_03")
        with api.gradebook as gradebook:
            CsvExportPlugin(to=str(folder / "grades.csv")).export(gradebook)
    with (folder / "grades.csv").open() as file:
        scores = {row["student_id"]: (float(row["score"]), float(row["max_score"])) for row in csv.DictReader(file)}
    return SimpleNamespace(folder=folder, built=built, steps=steps, autograde=autograde, scores=scores)


def configured(folder: Path) -> Any:
    """The configuration of a course, as nbgrader reads it."""
    config = PyFileConfigLoader("nbgrader_config.py", path=str(folder)).load_config()
    config.CourseDirectory.root = str(folder)
    return config


def feedback(graded: SimpleNamespace, student: str) -> str:
    """What a student reads, as plain text."""
    text = (graded.folder / "feedback" / student / "lab_03" / FILE.replace("ipynb", "html")).read_text(encoding="utf-8")
    body = text[text.index("<body") :]
    return html.unescape(re.sub(r"<[^>]+>", "", body))


def outputs(graded: SimpleNamespace, student: str) -> list[Any]:
    """What stands below the check cell."""
    made = nbformat.read(graded.folder / "autograded" / student / "lab_03" / FILE, as_version=4)
    return [cell.outputs for cell in made.cells if cell.metadata.get("nbgrader", {}).get("grade_id") == "check_03_2"][0]


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(1800)
def test_every_step_of_nbgrader_runs(graded: SimpleNamespace) -> None:
    """A name in the configuration that nbgrader does not know; one student's file that stops the class."""
    assert graded.autograde.rc == 0, graded.autograde.log[-3000:]
    assert {name: step["success"] for name, step in graded.steps.items()} == dict.fromkeys(graded.steps, True), graded


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(1800)
def test_only_who_is_right_gets_points(graded: SimpleNamespace) -> None:
    """Points for a patched check, for labkit's own function, for stored numbers; none for a notebook with oddities."""
    worth = points_of(problem("03.2"))
    right = {"ana", "gus", "hal", "kim", "mia"}
    assert graded.scores == {
        name: (worth if name in right else 0.0, worth) for name in (*CLASS, *others(released(graded.folder)))
    }


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(1800)
def test_the_feedback_names_what_is_wrong_and_why(graded: SimpleNamespace) -> None:
    """A zero without a word; a cause that is not the mistake."""
    cause = problem("03.2").mutants[0].cause
    for student, words in {
        "ana": "all five verdicts hold",
        "ben": cause,
        "cleo": "labkit.comm.ring is not to be had in this exercise",
        "dan": WIRED.cause,
        "eve": "ring_reduce_scatter is not written yet",
        "fay": "cannot be read as a notebook",
        "gus": "Handed in as my exercises.ipynb",
        "hal": "all five verdicts hold",
        "ida": "broken",
        "jon": "there is no definition of ring_reduce_scatter",
        "kim": "ring_reduce_scatter is defined 2 times: the last one counts",
        "leo": "<script>x()</script>",
        "nia": "ring_reduce_scatter is not Python yet",
    }.items():
        assert words in feedback(graded, student), student
    told = feedback(graded, "ben")
    assert re.search(r"expected:.* at \[", told)
    assert re.search(r"where: .*2 ranks, float32, rows 3, width 5", told)


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(1800)
def test_what_a_student_says_is_text_in_the_feedback(graded: SimpleNamespace) -> None:
    """A script in an error message that runs when the feedback is opened."""
    page = (graded.folder / "feedback" / "leo" / "lab_03" / FILE.replace("ipynb", "html")).read_text(encoding="utf-8")
    assert "<script>x()" not in page


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(1800)
def test_a_verdict_is_an_output_that_nbgrader_scores(graded: SimpleNamespace) -> None:
    """A verdict on standard error, or as a value: nbgrader takes the one for zero and the other for a share."""
    assert [(each.output_type, each.get("name")) for each in outputs(graded, "ana")] == [("stream", "stdout")]
    assert [(each.output_type, each.get("ename")) for each in outputs(graded, "ben")] == [("error", "Broken")]


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(1800)
def test_no_notebook_is_executed(graded: SimpleNamespace) -> None:
    """Code of a student's that runs outside the judge: cleo's writes a file as soon as it runs."""
    assert "ran_in_the_notebook" in (graded.folder / "submitted" / "cleo" / "lab_03" / FILE).read_text()
    assert list(graded.folder.rglob("ran_in_the_notebook*")) == []
    assert not Path("ran_in_the_notebook.txt").exists()


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(1800)
def test_nothing_is_left_running(graded: SimpleNamespace) -> None:
    """A rank, a judge or a prefork server that outlives the command."""
    assert len(graded.autograde.seen) >= 2
    _, left = psutil.wait_procs(graded.autograde.seen, timeout=120)
    assert [each for each in left if each.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(1800)
def test_the_released_notebook_holds_no_answer_and_no_seed(graded: SimpleNamespace) -> None:
    """A reference, a mutant, a hint or a seed that travels to the students."""
    there, it = released(graded.folder), problem("03.2")
    text = json.dumps(there) + "".join(
        path.read_text() for path in (graded.folder / "release").rglob("*") if path.is_file()
    )
    for line in it.solution.splitlines()[-4:]:
        assert line.strip() not in text
    for words in ("SOLUTION", str(SEED), "seed", "labkit.course", *it.hints, *(each.cause for each in it.mutants)):
        assert words not in text, words
    for student in CLASS:
        assert str(SEED) not in feedback(graded, student)


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(1800)
def test_the_released_cell_is_the_stub(graded: SimpleNamespace) -> None:
    """A region that takes too much or too little with it."""
    cell = next(cell for cell in released(graded.folder).cells if cell.metadata.get("nbgrader", {}).get("solution"))
    assert ast.dump(ast.parse(cell.source)) == ast.dump(ast.parse(problem("03.2").stub))
    assert f"# about {problem('03.2').n_lines} lines" in cell.source
    check = next(cell for cell in released(graded.folder).cells if cell.metadata.get("nbgrader", {}).get("grade"))
    assert check.source == "check(ring_reduce_scatter)"
    assert (check.metadata.nbgrader.locked, check.metadata.nbgrader.schema_version, check.metadata.editable) == (
        True,
        3,
        False,
    )


@pytest.mark.parametrize("key", [key for key, _ in folders()])
def test_regions_of_a_solution_leave_the_stub(key: str) -> None:
    """A region that is no Python, changes what the reference does, or leaves a line of it to the students."""
    from nbgrader.preprocessors import ClearSolutions

    it, cells = problem(key), ClearSolutions(code_stub={"python": course.STUB})
    cell = notebook(course.solved(it.solution)).cells[0]
    assert ast.dump(ast.parse(cell.source)) == ast.dump(ast.parse(it.solution))
    assert cells._replace_solution_region(cell, "python")
    assert ast.dump(ast.parse(cell.source)) == ast.dump(ast.parse(it.stub))
    assert "SOLUTION" not in cell.source


@pytest.mark.slow
@pytest.mark.parametrize("key", ["03.2", "07.2"])
def test_the_instructors_version_passes_and_the_released_one_does_not(key: str) -> None:
    """A course whose own solution gets no points, or a class cell that is not found."""
    from labkit.course.classroom.judge_cells import JudgeCells

    for text, kind in ((problem(key).solution, "stream"), (problem(key).stub, "error")):
        made = course.notebook(key[:2], [problem(key)])
        made.cells[3].source = text if kind == "error" else made.cells[3].source
        after, _ = JudgeCells(seed=7).preprocess(made, {})
        assert [each.output_type for each in after.cells[4].outputs] == [kind]


@pytest.mark.slow
def test_a_course_of_all_labs_is_built_and_an_assignment_is_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lab whose number is no number, or that has no exercises, and so no course for anybody."""
    from labkit.cli.exercises import build

    build(nbgrader=tmp_path)
    labs = list(dict.fromkeys(f"lab_{problem(key).lab}" for key, _ in folders()))
    made = {path.name: [file.stem for file in path.iterdir()] for path in (tmp_path / "source").iterdir()}
    assert sorted(made) == labs
    assert made["lab_05"] == ["05_precision"]
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    from nbgrader.apps import NbGraderAPI

    assert NbGraderAPI(config=configured(tmp_path)).generate_assignment("lab_05")["success"]
    assert (tmp_path / "release" / "lab_05" / "05_precision.ipynb").is_file()


JUDGED = """
import sys
from labkit.course.classroom import nbgrader_course
from labkit.course.classroom.judge_cells import JudgeCells
from labkit.course.exercises.catalogue import problem
made = nbgrader_course.notebook(sys.argv[1][:2], [problem(sys.argv[1])])
print(JudgeCells(seed=7).preprocess(made, {})[0].cells[4].outputs[0].output_type)
"""


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.parametrize("key", OPTIMIZERS)
def test_what_needs_an_optimizer_gets_its_points_also_as_the_first_of_a_process(key: str) -> None:
    """A judge that fails over an import behind its wall, and no points for a right solution."""
    done = subprocess.run([sys.executable, "-c", JUDGED, key], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["stream"], done.stderr


def test_a_course_keeps_what_an_instructor_has_changed(tmp_path: Path) -> None:
    """A second build that throws away an edited notebook, or draws other cases in the middle of the term."""
    first = course.build(tmp_path, ["03"], ["03.2"])
    config = (tmp_path / "nbgrader_config.py").read_text()
    path = tmp_path / "source" / "lab_03" / "03_exercises.ipynb"
    path.write_text(path.read_text().replace("# Exercises 03", "# Our exercises"))
    again = course.build(tmp_path, ["03"], ["03.2"])
    assert [each.kept for each in first.written] == [False, False]
    assert [each.kept for each in again.written] == [True, True]
    assert (tmp_path / "nbgrader_config.py").read_text() == config
    assert "# Our exercises" in path.read_text()
    assert "kept" in str(again)
    course.build(tmp_path, ["03"], ["03.2"], force=True)
    assert "# Our exercises" not in path.read_text()
    assert (tmp_path / "nbgrader_config.py").read_text() != config


def test_a_course_with_its_seed_and_grade_book_is_its_owners_alone(tmp_path: Path) -> None:
    """A seed, a grade book or feedback that every user of the machine can read."""
    (tmp_path / "old").mkdir(mode=0o755)
    for name, remark in (("new", False), ("old", True)):
        built = course.build(tmp_path / name, ["03"], ["03.2"])
        assert ("others may enter" in str(built)) == remark
        assert stat.S_IMODE((tmp_path / name / "nbgrader_config.py").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


@pytest.mark.slow
def test_both_ways_to_grade_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submission that passes by `labkit grade` and fails in nbgrader, for other cases, or another reading of it."""
    from labkit.course.classroom import grade as module
    from labkit.course.classroom.judge_cells import JudgeCells

    monkeypatch.setattr(module, "works", lambda: False)
    texts = answers() | {
        "dan": WIRED.source(problem("03.2").solution),
        "jon": problem("03.2").solution.replace("ring_reduce", "rings_reduce"),
        "kim": answers()["ben"] + "\n\n" + problem("03.2").solution,
        "leo": RAISES,
        "nia": "def ring_reduce_scatter(x, group:\n    return x",
    }
    by_nbgrader = {}
    for student, text in texts.items():
        made = filled(course.notebook("03_collectives", [problem("03.2")]), {"03.2": text})
        hand_in(tmp_path / "in" / student, made, FILE)
        by_nbgrader[student] = JudgeCells(seed=SEED).preprocess(made, {})[0].cells[4].outputs[0]
    rows = module.grade(tmp_path / "in", seed=SEED, keys=["03.2"], progress=False).rows
    assert {row.student for row in rows if row.passed} == {"ana", "kim"}
    for row in rows:
        output = by_nbgrader[row.student]
        words = output.text.splitlines() if row.passed else output.traceback
        lines = list(row.report)
        assert timeless(words[: len(lines)]) == timeless(lines)
        assert row.passed or output.evalue == f"{row.verdict}: {row.cause}"


def timeless(lines: list[str]) -> list[str]:
    """Lines of a report without the seconds that judging took."""
    return [re.sub(r"\d+\.\d s", "", line) for line in lines]


def test_a_course_of_nothing_or_nowhere_is_refused_in_words(tmp_path: Path) -> None:
    """A traceback, or an empty folder that looks like a course."""
    (tmp_path / "file").write_text("")
    for words, options in {
        "no exercises for 98, 99": {"labs": ["98", "99"]},
        "no lab at all": {"labs": []},
        "got 'three'": {"labs": ["three"]},
        "there is no exercise '03.99'": {"keys": ["03.99"]},
        "got -1": {"seed": -1},
    }.items():
        with pytest.raises(ValueError, match=words):
            course.build(tmp_path / "new", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is a file"):
        course.build(tmp_path / "file", ["03"])
    assert not (tmp_path / "new").exists()


def test_without_nbgrader_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ImportError of somebody else's module."""
    monkeypatch.setitem(sys.modules, "nbgrader.nbgraderformat", None)
    with pytest.raises(ValueError, match=r"pip install 'labkit\[class\]'"):
        course.build(tmp_path, ["03"])


def test_nbgrader_judges_nothing_where_the_kernel_does_not_confine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of programs that run as the teacher, by the other of the two ways to grade."""
    from labkit.course.classroom import judge_cells

    monkeypatch.setattr(judge_cells, "prefork_server", lambda: SimpleNamespace(walls=lambda: ["a gap"]))
    monkeypatch.setattr(judge_cells, "missing", lambda walls: f"there is {walls[0]}")
    empty = nbformat.v4.new_notebook()
    with pytest.raises(ValueError, match=r"there is a gap.* c.JudgeCells.unconfined"):
        judge_cells.JudgeCells().preprocess(empty, {})
    assert judge_cells.JudgeCells(unconfined=True).preprocess(empty, {})[0] is empty


def test_a_link_among_submissions_is_not_followed(tmp_path: Path) -> None:
    """A folder that is a link to another student's earns that student's points; one to a file tells what is in it."""
    from labkit.course.classroom.judge_cells import TornToo, adopt

    own = hand_in(tmp_path / "submitted" / "ana" / "lab_03", notebook("here = 1"), "other.ipynb")
    (tmp_path / "submitted" / "ben").symlink_to(tmp_path / "submitted" / "ana")
    (tmp_path / "submitted" / "ana" / "lab_03" / FILE).symlink_to(own)
    seen = []
    for path in (own, own.with_name(FILE), tmp_path / "submitted" / "ben" / "lab_03" / own.name):
        with path.open(encoding="utf-8") as file:
            seen.append(TornToo().from_file(file)[0])
    assert "here = 1" in seen[0]
    assert all("symbolic link" in text and "here" not in text for text in seen[1:])
    names = [str(tmp_path / "submitted" / "ben" / "lab_03" / own.name)]
    adopt("lab_03", "ben", names)
    assert len(names) == 1


def test_a_notebook_whose_name_is_no_text_is_adopted_and_not_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name in Latin-1 that nbgrader's database refuses, and no points for the student."""
    from labkit.course.classroom.judge_cells import adopt

    monkeypatch.chdir(tmp_path)
    hand_in(Path("source", "lab_03"), notebook("here = 1"), FILE)
    own = hand_in(Path("submitted", "ben", "lab_03"), notebook("here = 2"), os.fsdecode(b"M\xfcller.ipynb"))
    names = [str(own)]
    adopt("lab_03", "ben", names)
    assert names == [f"submitted/ben/lab_03/{FILE}"]
    assert r"Handed in as `M\xfcller.ipynb`, graded as" in Path(names[0]).read_text().replace("\\\\", "\\")
    assert own.exists()


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere no wall confines an attempt, and a teacher's machine must not judge any"
)
def test_a_cell_that_labkit_cannot_judge_gets_no_points() -> None:
    """A test of the instructor's own that nothing runs, and that nbgrader takes for passed since it shows no error."""
    from labkit.course.classroom.judge_cells import JudgeCells

    made = notebook("assert False", problem("03.2").solution)
    made.cells[0].metadata["nbgrader"] = {"grade": True, "grade_id": "mine", "points": 2, "solution": False}
    after, _ = JudgeCells().preprocess(made, {})
    assert after.cells[0].outputs[0].ename == "NotJudged"
    assert after.cells[1].outputs == []


def test_a_judge_that_fails_gives_no_points_and_no_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full points, or a verdict, where nothing was judged."""
    from labkit.course.classroom import submission

    def fails(*_: Any) -> Any:
        raise RuntimeError("the judge itself failed on 03.2:\nsome traceback")

    outcome = submission.judged(problem("03.2"), [problem("03.2").solution], 1, fails)
    assert (outcome.passed, outcome.verdict) == (False, "judge")
    assert "no verdict on the attempt" in outcome.cause
    assert PATCHES not in outcome.report
