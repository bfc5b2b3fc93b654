"""A course for nbgrader: a folder that `nbgrader generate_assignment`, `autograde` and `export` work on.

    nbgrader_config.py              grading by the judge instead of execution, and the seed of the hidden cases
    source/lab_03/03_title.ipynb    the instructor's version, with the reference in a solution region

nbgrader makes the students' version (the stub), collects, scores, exports and writes feedback as usual. Only one of its
steps is replaced: where it would execute a student's notebook, JudgeCells (judge_cells.py) judges the attempts.
"""

from __future__ import annotations

import ast
import importlib
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from types import ModuleType
from typing import Any

from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit.course.classroom.private_files import open_to_others, write_private
from labkit.course.classroom.seed import check_seed, new_seed
from labkit.course.classroom.submission import points_of
from labkit.course.exercises.build import KERNEL, Written, digest, write
from labkit.course.exercises.catalogue import problem, problems
from labkit.course.exercises.exercise_card import Card
from labkit.course.exercises.problem import Problem
from labkit.course.exercises.stub import body_lines, functions
from labkit.course.numbers import full, natural, subject
from labkit.view.units import plural

SETUP = "from labkit import check, exercise, hint"
STUB = "..."
CONFIG = Template(Path(__file__).with_name("nbgrader_config.template").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Course:
    """The result of `build`: the folder, its files, the assignments as (name, exercises, points), and what the
    instructor ought to know besides."""

    folder: Path
    written: tuple[Written, ...]
    assignments: tuple[tuple[str, int, int], ...]
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [f"{name}: {plural(n, 'exercise')}, {plural(points, 'point')}" for name, n, points in self.assignments]
        kept = [f"kept as it was: {file.path}" for file in self.written if file.kept]
        first = self.assignments[0][0]
        return "\n".join([*rows, *kept, *self.remarks, f"next: cd {self.folder}; nbgrader generate_assignment {first}"])


def build(
    folder: Path,
    labs: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    seed: int | None = None,
    force: bool = False,
) -> Course:
    """Write a course into a folder. One that is not there is created, for its owner alone: nbgrader's grade book and
    feedback lie in it, and the seed.

    labs    titles ("03_collectives") or numbers ("03"); those without exercises are left out. None: all
    keys    only these exercises ("03.2"); None: all of the labs
    seed    of the hidden cases; drawn at random if not given. An existing course keeps its own
    force   also overwrite notebooks that were changed by hand, and nbgrader_config.py

    ValueError without nbgrader, without exercises, for a seed that is no whole number from 0 on, and for a folder that
    is a file."""
    validator = needed("nbgrader.nbgraderformat").MetadataValidator()
    check_seed(seed)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder for the course")
    known = tuple(dict.fromkeys(entry.lab for entry in problems()))
    titles = known if labs is None else sorted(labs, key=natural)
    wanted = {problem(key).key for key in keys} if keys is not None else {entry.key for entry in problems()}
    exercises_by_lab = {title: [entry for entry in problems(number(title)) if entry.key in wanted] for title in titles}
    exercises_by_lab = {title: exercises for title, exercises in exercises_by_lab.items() if exercises}
    if not exercises_by_lab:
        asked = ", ".join(titles) or "no lab at all"
        raise ValueError(f"no exercises for {asked}; there are some for {', '.join(known)}")
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    written, assignments = [_config(folder, seed, force)], []
    for title, exercises in exercises_by_lab.items():
        instructor_notebook = notebook(title, exercises)
        validator.validate_nb(instructor_notebook)
        name = f"lab_{number(title)}"
        stem = title if "_" in title else f"{number(title)}_exercises"
        written.append(write(folder / "source" / name / f"{stem}.ipynb", instructor_notebook, force))
        assignments.append((name, len(exercises), sum(map(points_of, exercises))))
    return Course(folder, tuple(written), tuple(assignments), tuple(_remarks(folder)))


def number(title: str) -> str:
    """The number of a lab, "03", from its title ("03_collectives") or from "3". ValueError for anything else."""
    match = re.fullmatch(r"(\d\d[a-z]?)(_[\w-]+)?", full(title))
    if match is None:
        raise ValueError(f"a lab is given by its number or title, 03 or 03_collectives, got {title!r}")
    return match[1]


def needed(module: str) -> ModuleType:
    """A module of nbgrader. ValueError, with how to install it, if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"a course for nbgrader needs nbgrader ({error}): pip install 'labkit[class]'. "
            "Without it, `labkit grade` judges a folder of notebooks"
        ) from None


def notebook(title: str, some: Iterable[Problem]) -> Any:
    """The instructor's notebook with a lab's exercises."""
    exercises = list(some)
    cells = [_markdown("title", _opening(title, exercises)), new_code_cell(SETUP, id="setup")]
    for exercise in exercises:
        cells += _cells(exercise)
    result = new_notebook(cells=cells, metadata={"kernelspec": dict(KERNEL), "language_info": {"name": "python"}})
    result.metadata["labkit"] = {"digest": digest(result)}
    return result


def solved(solution: str) -> str:
    """A reference with the body of each function in a solution region, from which nbgrader makes the stub."""
    lines, tree = solution.rstrip().splitlines(), ast.parse(solution)
    for node in reversed([function for part in tree.body for function in functions(part)]):
        count = body_lines(node)
        first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
        start, end, pad = first.lineno - 1, node.end_lineno or 0, " " * first.col_offset
        about = f"{pad}# about {count} lines" if count > 1 else f"{pad}# one line"
        region = [about, f"{pad}### BEGIN SOLUTION", *lines[start:end], f"{pad}### END SOLUTION"]
        lines[start:end] = region
    return "\n".join(lines)


def key_of(grade_id: str) -> str:
    """The exercise of a check cell: "03.2" for "check_03_2"; "" for any other cell."""
    match = re.fullmatch(r"check_(\d\d[a-z]?)_(\d+)", grade_id)
    return f"{match[1]}.{match[2]}" if match else ""


def _cells(exercise: Problem) -> list[Any]:
    name = exercise.key.replace(".", "_")
    facts = "\n".join(f"| {heading} | {words.replace('|', chr(92) + '|')} |" for heading, words in Card(exercise).facts)
    story = f"## {exercise.key} · {exercise.title}\n\n{exercise.story.strip()}\n\n| | |\n|---|---|\n{facts}"
    worth = points_of(exercise)
    points = f'{plural(worth, "point")} if all five verdicts hold. Stuck? `hint("{exercise.key}")` in a new cell.'
    return [
        _markdown(f"story_{name}", f"{story}\n\n{points}"),
        _code(f"attempt_{name}", solved(exercise.solution), solution=True),
        _code(f"check_{name}", f"check({exercise.name})", grade=True, locked=True, points=worth),
    ]


def _opening(title: str, exercises: Sequence[Problem]) -> str:
    name = f": {subject(title)}" if subject(title) else ""
    worth = sum(map(points_of, exercises))
    return (
        f"# Exercises {number(title)}{name}\n\n{plural(len(exercises), 'exercise')}, {plural(worth, 'point')}, about "
        f"{sum(entry.minutes for entry in exercises)} minutes. Write what each stub asks for; run its cell, then the "
        "check below it, as often as you like. Whoever grades reads what you wrote and judges it as the check does, "
        "in processes of its own, on random inputs of its own: nothing else in this notebook counts."
    )


def _markdown(name: str, source: str) -> Any:
    return new_markdown_cell(source, id=name.replace("_", "-"))


def _code(name: str, source: str, **what: Any) -> Any:
    about = {"grade": False, "grade_id": name, "locked": False, "schema_version": schema(), "solution": False,
             "task": False, **what}  # fmt: skip
    return new_code_cell(source, id=name.replace("_", "-"), metadata={"nbgrader": about})


def schema() -> int:
    """The version of nbgrader's metadata schema."""
    return int(needed("nbgrader.nbgraderformat").SCHEMA_VERSION)


def _remarks(folder: Path) -> Iterator[str]:
    if open_to_others(folder, stat.S_IXGRP):
        yield f"others may enter {folder}, where the seed and all grades are: chmod 700 {folder}"


def _config(folder: Path, seed: int | None, force: bool) -> Written:
    path = folder / "nbgrader_config.py"
    if path.exists() and not force:
        return Written(path, True)
    course = re.sub(r"[^\w-]+", "_", folder.resolve().name) or "labkit"
    drawn = new_seed() if seed is None else seed
    write_private(path, CONFIG.substitute(course=course, stub=STUB, seed=drawn))
    return Written(path, False)
