"""The parts that the course's nbgrader_config.py gives to nbgrader. A submission is read and never executed.

TornToo        reads a submission; a file that is no notebook becomes an empty one that says so
adopt          takes a notebook that was handed in under another name for the one that is missing
RestoreCells   restores check cells as they were released, whatever was done to them or to their metadata
JudgeCells     replaces nbgrader's Execute: each check cell gets the verdict on the attempt as its output

nbgrader gives full points to a check cell without an error in its output, and none to one with an error.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.exporters import NotebookExporter
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from nbgrader.api import Gradebook
from nbgrader.preprocessors import NbGraderPreprocessor
from nbgrader.utils import is_grade, is_solution
from traitlets import Bool, Integer

from labkit.course.classroom.file_names import shown
from labkit.course.classroom.nbgrader_course import key_of, schema
from labkit.course.classroom.seed import new_seed
from labkit.course.classroom.submission import MOST_BYTES, Outcome, defined, judged, modest, plain, read
from labkit.course.exercises.catalogue import problem
from labkit.course.judge.prefork import prefork_server
from labkit.course.judge.wall_trials import missing

Step = tuple[NotebookNode, Mapping[str, Any]]


class TornToo(NotebookExporter):
    """Reads notebooks, and replaces files that are none by a notebook that says so."""

    def from_file(self, file_stream: Any, resources: Any = None, **kw: Any) -> Any:
        """The notebook, or one that says what is wrong with the file."""
        try:
            if _linked(Path(file_stream.name)):
                raise ValueError("it is a symbolic link, or in a folder that is one, and these are not followed")
            if Path(file_stream.name).stat().st_size > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
            notebook = nbformat.read(file_stream, as_version=4)
            if not all(isinstance(cell.source, str) and isinstance(cell.metadata, dict) for cell in notebook.cells):
                raise ValueError("its cells are none")
            modest([cell.source for cell in notebook.cells if cell.cell_type == "code"], "it")
        except Exception as error:  # a file that is no notebook can fail in many ways
            why = plain(f"{type(error).__name__}: {error}", 120).replace("`", "'")
            message = "**The file that was handed in cannot be read as a notebook.** Nothing in it could be judged."
            notebook = new_notebook(cells=[new_markdown_cell(f"{message}\n\n`{why}`")])
        return self.from_notebook_node(notebook, resources=resources, **kw)


def adopt(assignment: str, student: str, notebooks: list[str]) -> None:
    """Before a submission is graded: find, for each missing notebook, the one of another name that fits best.

    `notebooks` are the paths of what was handed in; the adopted ones are added to them, and those whose names are no
    text are taken out: nbgrader would look for these in its database, which takes text only, and give up on the
    student. The file is copied within submitted/, with a line on top that says so; the original stays."""
    handed_in = [path for notebook in notebooks if not _linked(path := Path(notebook))]
    notebooks[:] = [notebook for notebook in notebooks if _is_text(Path(notebook).name)]
    if not handed_in:
        return
    folder = handed_in[0].parent
    wanted = sorted(Path("source", folder.name).glob("*.ipynb"))  # nbgrader's working directory is the course's folder
    others = [path for path in handed_in if path.name not in {released.name for released in wanted}]
    for absent in wanted:
        if absent.name in {path.name for path in handed_in} or not others:
            continue
        names = set(defined(_code(absent)))
        best = max(others, key=lambda path: (len(names & set(defined(_code(path)))), path.name))
        others.remove(best)
        target = folder / absent.name
        try:
            copy = nbformat.read(best, as_version=4)
            line = f"Handed in as `{plain(shown(best.name), 100)}`, graded as `{absent.name}`."
            copy.cells.insert(0, _fitting(copy, new_markdown_cell(line)))
            nbformat.write(copy, target)
        except Exception:  # TornToo will say what is wrong with it
            shutil.copyfile(best, target)
        notebooks.append(str(target))


def _is_text(name: str) -> bool:
    """False for a name with bytes that are no UTF-8."""
    return not any("\udc80" <= letter <= "\udcff" for letter in name)


def _linked(path: Path) -> bool:
    """True if a file, the folder of its assignment or that of its student is a link: out of the submission, perhaps."""
    return any(place.is_symlink() for place in (path, *list(path.parents)[:2]))


class RestoreCells(NbGraderPreprocessor):
    """Restores the cells that nbgrader knows, and takes the metadata of nbgrader from all others."""

    def preprocess(self, nb: NotebookNode, resources: Mapping[str, Any]) -> Step:
        """Return the notebook with all check cells, each once, unchanged, and worth the released points."""
        about = resources["nbgrader"]
        with Gradebook(about["db_url"]) as gradebook:
            known = _Known(gradebook.find_notebook(about["notebook"], about["assignment"]))
        seen: set[str] = set()
        for place in reversed(range(len(nb.cells))):  # of two cells the last one counts, as in a kernel
            cell = nb.cells[place]
            metadata = cell.metadata.pop("nbgrader", None)
            name = metadata.get("grade_id") if isinstance(metadata, dict) else None
            if isinstance(name, str) and name in known.cells and name not in seen:
                seen.add(name)
                nb.cells[place] = known.restored(nb, name, cell)
        for name in known.grades - seen:
            nb.cells.insert(_after(nb, name.replace("check_", "attempt_")), known.restored(nb, name, None))
        return nb, resources


class _Known:
    """The cells of a notebook, as nbgrader's database has them."""

    def __init__(self, notebook: Any) -> None:
        self.cells = {
            cell.name: (cell.cell_type, cell.source, cell.locked, cell.checksum) for cell in notebook.source_cells
        }
        self.grades = {cell.name for cell in notebook.grade_cells}
        self.solutions = {cell.name for cell in notebook.solution_cells}
        self.tasks = {cell.name for cell in notebook.task_cells}
        self.worth = {cell.name: cell.max_score for cell in (*notebook.grade_cells, *notebook.task_cells)}

    def restored(self, nb: NotebookNode, name: str, cell: NotebookNode | None) -> NotebookNode:
        """The cell of a name as it was released; a student's own text stays unless the cell is locked."""
        kind, source, locked, checksum = self.cells[name]
        if cell is None or locked or cell.cell_type != kind:
            new_cell = new_code_cell if kind == "code" else new_markdown_cell
            cell = _fitting(nb, new_cell(source if locked or cell is None else cell.source))
        metadata = {"grade": name in self.grades, "solution": name in self.solutions, "task": name in self.tasks,
                "grade_id": name, "locked": locked, "checksum": checksum, "schema_version": schema()}  # fmt: skip
        cell.metadata["nbgrader"] = NotebookNode(
            metadata | ({"points": self.worth[name]} if name in self.worth else {})
        )
        return cell


class JudgeCells(NbGraderPreprocessor):
    """Puts verdicts into check cells. The students' code runs in the judge's processes only."""

    seed = Integer(None, allow_none=True, min=0, help="of the hidden cases; drawn once if it is not set").tag(
        config=True
    )
    unconfined = Bool(False, help="judge also where the kernel does not confine students' programs").tag(config=True)

    def preprocess(self, nb: NotebookNode, resources: Mapping[str, Any]) -> Step:
        """Return the notebook with a verdict below each check cell. ValueError where the kernel lacks a wall."""
        if not self.unconfined and (gap := missing(prefork_server().walls())):
            raise ValueError(f"{gap}. To judge all the same: c.JudgeCells.unconfined = True")
        checks = [cell for cell in nb.cells if cell.cell_type == "code" and is_grade(cell) and not is_solution(cell)]
        blocks = [cell.source for cell in nb.cells if cell.cell_type == "code" and cell not in checks]
        for cell in nb.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        for cell in checks:
            about = cell.metadata.nbgrader
            cell.outputs = [self._judged(str(about.grade_id), float(about.points), blocks)]
        return nb, resources

    def _judged(self, grade_id: str, points: float, blocks: list[str]) -> NotebookNode:
        key = key_of(grade_id)
        if not key:
            message = f"{grade_id} is no check of labkit's, and nothing is executed here: grade this cell by hand"
            self.log.warning(message)
            return new_output("error", ename="NotJudged", evalue=message, traceback=[message])
        exercise = problem(key)
        outcome = judged(exercise, blocks, _drawn() if self.seed is None else self.seed)
        if outcome.verdict == "judge":
            self.log.error("\n".join(outcome.report))
        summary = "passed" if outcome.passed else f"{outcome.verdict} broken"
        self.log.info("%s %s in %.1f s", key, summary, outcome.seconds)
        return output(outcome, points)


def output(outcome: Outcome, points: float) -> NotebookNode:
    """The output of a check cell: nbgrader gives no points for an error, and all of them for anything else."""
    worth = f"{points:g} of {points:g} points" if outcome.passed else f"0 of {points:g} points"
    lines = [*outcome.report, *outcome.notes, worth]
    if outcome.passed:
        return new_output("stream", name="stdout", text="\n".join(lines) + "\n")
    message = f"{outcome.verdict}: {outcome.cause}"
    return new_output("error", ename="Broken", evalue=message, traceback=lines)


@cache
def _drawn() -> int:
    return new_seed()


def _after(nb: NotebookNode, name: str) -> int:
    """The place after a cell; the end if there is no such cell."""
    names = [cell.metadata.get("nbgrader", {}).get("grade_id", "") for cell in nb.cells]
    return names.index(name) + 1 if name in names else len(names)


def _fitting(nb: NotebookNode, cell: NotebookNode) -> NotebookNode:
    if (nb.nbformat, nb.nbformat_minor) < (4, 5):
        cell.pop("id", None)  # that version of the format has no ids
    return cell


def _code(path: Path) -> list[str]:
    try:
        return read(path)
    except ValueError:
        return []
