"""The notebooks of the exercises: made, up to date, and nobody's work lost."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from labkit.course.exercises import build as making
from labkit.course.exercises.catalogue import problems
from labkit.course.numbers import number_of

ROOT = Path(__file__).resolve().parents[3]
TITLES = [path.stem for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))]
WITH_EXERCISES = [title for title in TITLES if problems(number_of(title))]


@cache
def built(title: str, solved: bool) -> Any:
    """A notebook as it is made now; every test reads it, and none changes it."""
    return making.notebook(title, problems(number_of(title)), solved)


def test_there_are_sixty_and_more_over_all_labs_but_the_interviews() -> None:
    """A lab without exercises."""
    assert len(problems()) >= 60
    alone = {
        "01b": "its exercises stand with those of lab 01",
        "05b": "its exercises stand with those of lab 05",
        "06b": "its exercises stand with those of lab 06",
        "10b": "its exercises stand with those of lab 10",
        "14b": "its exercises stand with those of lab 14",
        "17": "the interviews",
    }
    assert [number_of(title) for title in TITLES if title not in WITH_EXERCISES] == list(alone)
    assert len([each for each in problems() if each.writes_test]) >= 3
    assert len([each for each in problems() if each.star is not None]) >= 3


@pytest.mark.parametrize("folder", ["exercises", "solutions"])
@pytest.mark.parametrize("title", WITH_EXERCISES)
def test_a_notebook_is_what_is_built(folder: str, title: str) -> None:
    """A notebook that was edited by hand, or a problem that has changed since: run `labkit build`; a stub with a broken
    line in it. (The cells of solutions run in test_problems.py, a stub is red in tests/browser/test_journey.py.)"""
    made = built(title, folder == "solutions")
    path = ROOT / folder / f"{title}.ipynb"
    assert path.read_text(encoding="utf-8") == making.text_of(made), f"{path} is not up to date: run labkit build"
    assert (ROOT / folder / "README.md").read_text(encoding="utf-8") == making.contents(TITLES, folder == "solutions")
    nbformat.validate(nbformat.read(path, as_version=4))
    for cell in made.cells:
        if cell.cell_type == "code":
            compile(TransformerManager().transform_cell(cell.source), cell.id, "exec")


@pytest.mark.parametrize("title", WITH_EXERCISES)
def test_no_solution_stands_in_an_exercise(title: str) -> None:
    """The answer, one cell below the question."""
    text = "\n".join(cell.source for cell in built(title, False).cells)
    for it in problems(number_of(title)):
        stub = it.stub.splitlines()
        body = [line.strip() for line in it.solution.splitlines() if line not in stub]
        telling = [line for line in body if len(line) > 25]
        assert not [line for line in telling if line in text], it.key


@pytest.mark.parametrize("title", WITH_EXERCISES)
def test_the_lab_leads_to_its_exercises(title: str) -> None:
    """A lab that ends with a promise."""
    source = (ROOT / "notebooks" / f"{title}.ipynb").read_text(encoding="utf-8")
    assert f"../exercises/{title}.ipynb" in source
    assert "come with a later version" not in source


def test_a_notebook_with_somebodys_work_in_it_is_kept(tmp_path: Path) -> None:
    """An evening's work, overwritten by `labkit build`."""
    made = making.build(tmp_path, ["03_collectives"])
    path = made[0].path
    assert not any(each.kept for each in made)
    notebook = nbformat.read(path, as_version=4)
    attempt = next(cell for cell in notebook.cells if cell.metadata.get("labkit"))
    attempt.source = attempt.source.replace("...", "return x")
    nbformat.write(notebook, path)
    again = making.build(tmp_path, ["03_collectives"])
    assert [each.path for each in again if each.kept] == [path]
    assert "return x" in path.read_text(encoding="utf-8")
    making.build(tmp_path, ["03_collectives"], force=True)
    assert "return x" not in path.read_text(encoding="utf-8")


def test_one_that_was_only_run_is_made_anew_and_a_torn_one_is_kept(tmp_path: Path) -> None:
    """Outputs that keep a notebook from being brought up to date; a file that is no notebook, lost."""
    path = making.build(tmp_path, ["03_collectives"])[0].path
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="ran")]
    nbformat.write(notebook, path)
    assert not making.build(tmp_path, ["03_collectives"])[0].kept
    path.write_text("not a notebook")
    assert making.build(tmp_path, ["03_collectives"])[0].kept
