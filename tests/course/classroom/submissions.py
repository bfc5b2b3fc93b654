"""What students hand in, for the tests of the classroom: right, wrong, dishonest, endless, empty, and torn files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

from labkit.course.exercises.catalogue import problem

LATE = "def ring_reduce_scatter(x, group):\n    while group.rank == 0:\n        pass\n    return x\n"
"""One rank that computes for ever is enough: it has the time of a processor until it is ended."""
LIBRARY = """
from labkit.comm.ring import reduce_scatter

def ring_reduce_scatter(x: Tensor, group: Group) -> Tensor:
    return reduce_scatter(x, group)
"""
STORED = """
import torch

KNOWN = {0: torch.ones(3, 5), 1: torch.zeros(3, 5)}

def ring_reduce_scatter(x, group):
    return KNOWN.get(group.rank, torch.zeros(x.shape[0] // group.size, x.shape[1]))
"""
PATCHES = """
import labkit, labkit.course.exercises.check, labkit.course.judge.judge, labkit.course.judge.verdicts
from labkit.course.judge.report import Report
Report.passed = property(lambda self: True)
labkit.course.judge.judge.judge = labkit.course.judge.judge.unfit = lambda *args, **kwargs: None
labkit.course.judge.verdicts.HOLDS = labkit.course.judge.verdicts.BROKEN
check = labkit.check = labkit.course.exercises.check.check = lambda *args: "all five verdicts hold"
open("ran_in_the_notebook.txt", "w").write("this must never be there")
"""


def answers(key: str = "03.2") -> dict[str, str]:
    """The text of the attempt of each of five students."""
    it = problem(key)
    wrong = it.mutants[0] if key == "03.2" else it.mutants[3]
    return {
        "ana": it.solution,
        "ben": wrong.source(it.solution),
        "cleo": PATCHES + LIBRARY,
        "dan": LATE,
        "eve": it.stub,
    }


def allowed(count: int) -> float:
    """Seconds that so many attempts may take: a time-out each, and more on a machine with much else to do."""
    return count * problem("03.2").timeout_s * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def filled(released: Any, texts: dict[str, str], check: str | None = None) -> Any:
    """A released notebook with attempts in it, by key; `check` in place of each check cell."""
    made = nbformat.from_dict(released)
    for cell in made.cells:
        name = cell.metadata.get("nbgrader", {}).get("grade_id", "")
        for key, text in texts.items():
            if name == f"attempt_{key.replace('.', '_')}":
                cell.source = text
        if name.startswith("check_") and check is not None:
            cell.source = check
    return made


def notebook(*sources: str) -> Any:
    """A notebook of these cells."""
    return new_notebook(cells=[new_code_cell(source) for source in sources])


def hand_in(folder: Path, made: Any, name: str = "03_exercises.ipynb") -> Path:
    """Put a notebook, or a text, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(made if isinstance(made, str) else nbformat.writes(made, version=4), encoding="utf-8")
    return path
