"""`labkit build`: the notebooks of the exercises and of their solutions, made from the problems.

    exercises/NN_title.ipynb    for each exercise: story, card, stub, check, folded hints; never a solution
    solutions/NN_title.ipynb    the same, with the reference in place of the stub

They are never edited here by hand: a test holds them to what is built. A notebook in which somebody has worked is known
by its digest, and kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit.course.exercises.catalogue import problems
from labkit.course.exercises.exercise_card import dots
from labkit.course.exercises.problem import Problem
from labkit.course.numbers import number_of, subject
from labkit.course.reading.verbs import markdown

KERNEL = (("display_name", "Python 3"), ("language", "python"), ("name", "python3"))
SETUP = """\
from labkit import HintPanel, ProgressPanel
from labkit import check, exercise, hint, progress, solution"""

SOLVED = "from labkit import check, exercise"


class Written(NamedTuple):
    """A file that was written, or, if `kept`, one left as it was because somebody has worked in it."""

    path: Path
    kept: bool


def build(root: Path, titles: Sequence[str], force: bool = False) -> list[Written]:
    """Write exercises/ and solutions/ under `root`, for labs of these titles ("03_collectives").

    A notebook that somebody has worked in is kept, unless `force` is true."""
    files = []
    for title in titles:
        exercises = problems(number_of(title))
        if not exercises:
            continue
        for folder, solved in (("exercises", False), ("solutions", True)):
            files.append(write(root / folder / f"{title}.ipynb", notebook(title, exercises, solved), force))
    pages = (("exercises", False), ("solutions", True))
    for folder, solved in pages:
        path = root / folder / "README.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(contents(titles, solved), encoding="utf-8")
        files.append(Written(path, False))
    return files


def notebook(title: str, some: Iterable[Problem], solved: bool) -> Any:
    """The notebook of a lab's exercises; with their solutions in place of the stubs if `solved`."""
    lab = number_of(title)
    exercises = list(some)
    minutes = sum(exercise.minutes for exercise in exercises)
    cells = [
        _markdown(f"{lab}-title", _opening(title, len(exercises), minutes, solved)),
        _code(f"{lab}-setup", SOLVED if solved else SETUP),
    ]
    for exercise in exercises:
        cells += _cells(exercise, solved)
    if not solved:
        cells.append(_code(f"{lab}-progress", f'ProgressPanel(progress, lab="{lab}")'))
    built = new_notebook(cells=cells, metadata={"kernelspec": dict(KERNEL), "language_info": {"name": "python"}})
    built.metadata["labkit"] = {"digest": digest(built)}
    return built


def digest(made: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a notebook's cells: their types and sources."""
    text = json.dumps([[cell.cell_type, cell.source] for cell in made.cells])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(path: Path, made: Any, force: bool = False) -> Written:
    """Write a notebook, unless there is one in which somebody has worked."""
    if path.is_file() and not force and worked_in(path):
        return Written(path, True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(made), encoding="utf-8")
    return Written(path, False)


def text_of(made: Any) -> str:
    """The text of a notebook's file; the same for the same notebook."""
    return str(nbformat.writes(made, version=4)) + "\n"


def worked_in(path: Path) -> bool:
    """True if cells of the notebook at `path` are not as they were built, or if it cannot be read."""
    try:
        current = nbformat.read(path, as_version=4)
    except Exception:  # a file that is no notebook was not built here, so it is somebody's work
        return True
    return current.metadata.get("labkit", {}).get("digest") != digest(current)


def contents(titles: Sequence[str], solved: bool) -> str:
    """The README of a folder: a table of all exercises."""
    name = "Solutions" if solved else "Exercises"
    opening = (
        "The [exercises](../exercises/README.md) with a reference in place of each stub. Look here after an attempt: "
        'in the notebook, `solution("03.2")` gives the same.'
        if solved
        else "Write a few lines, press shift-enter on the check: five verdicts in about a second, on real processes. "
        "`labkit check 03.2` does the same in a terminal. [For instructors](CLASSROOM.md)."
    )
    rows = []
    for title in titles:
        for exercise in problems(number_of(title)):
            facts = (
                f"{dots(exercise.difficulty)} | {dots(exercise.importance)} | {exercise.n_lines} | {exercise.minutes}"
            )
            star = " ★" if exercise.star is not None else ""
            rows.append(f"| [{exercise.key}]({title}.ipynb) | {exercise.title}{star} | `{exercise.name}` | {facts} |")
    head = "| | exercise | you write | difficulty | importance | lines | minutes |\n|---|---|---|---|---|---:|---:|"
    origin = (
        "Made by `labkit build` from labkit/course/exercises/problems/: not to be edited here. ★: a star can be earned."
    )
    return f"# {name}\n\n{opening}\n\n{origin}\n\n{head}\n" + "\n".join(rows) + "\n"


def _opening(title: str, count: int, minutes: int, solved: bool) -> str:
    name = subject(title)
    lab = f"[lab {number_of(title)}](../notebooks/{title}.ipynb)"
    if solved:
        exercises = f"[exercise](../exercises/{title}.ipynb)"
        return f"# Solutions {number_of(title)}: {name}\n\nOne way of writing each {exercises} of {lab}."
    return (
        f"# Exercises {number_of(title)}: {name}\n\n{count} exercises, about {minutes} minutes, to go with {lab}. "
        "Write what "
        "the stub asks for, run the cell, run the check below it. A check runs what you wrote in processes of its own, "
        "on random inputs, and says what holds: **values**, **wire**, **memory**, **order**, **liveness**. "
        "Hints are folded and counted; the solution unfolds after an attempt.\n\n"
        "<details><summary>The messages and collectives of a group, on one sheet</summary>\n\n"
        f"{markdown()}\n\n</details>"
    )


def _cells(exercise: Problem, solved: bool) -> list[Any]:
    name = exercise.key.replace(".", "-")
    cells = [
        _markdown(f"{name}-story", f"## {exercise.key} · {exercise.title}\n\n{exercise.story.strip()}"),
        _code(f"{name}-card", f'exercise("{exercise.key}")'),
        _code(f"{name}-attempt", (exercise.solution if solved else exercise.stub).rstrip(), key=exercise.key),
        _code(f"{name}-check", f"check({exercise.name})"),
    ]
    return cells if solved else [*cells, _code(f"{name}-hints", f'HintPanel("{exercise.key}", hint, solution)')]


def _markdown(name: str, source: str) -> Any:
    return new_markdown_cell(source, id=name)


def _code(name: str, source: str, key: str = "") -> Any:
    metadata: dict[str, Any] = {"tags": ["nbval-ignore-output"]}
    if key:
        metadata["labkit"] = {"exercise": key}
    return new_code_cell(source, id=name, metadata=metadata)
