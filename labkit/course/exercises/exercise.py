"""All that the program of an exercise needs of the judge, in one import, and `exercise`, which makes its Problem.

    from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends

    def double(x, group): ...               the reference
    def cases(): ...                        found by these names: cases, inputs, answer, play
    def inputs(case): ...
    def answer(case, inputs): ...

    PROBLEM = exercise(__name__, double, laws=(sends(...),))

What a rank runs, `play` and all that it names, imports from where things are, and not from here: a rank must not hold
the judge's parts (nursery.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from labkit.course.exercises.exercise_files import beside
from labkit.course.exercises.problem import (
    Answers,
    Complaint,
    Inputs,
    Law,
    Problem,
    Star,
    call_alone,
    call_each,
)
from labkit.course.judge.case import Case
from labkit.course.judge.laws import (
    by_axis,
    hidden,
    highest_peak,
    holds,
    most_calls,
    most_sent_bytes,
    order,
    peak,
    send_first,
    sends,
    silent,
    stands_still,
)

__all__ = (
    "Answers", "Case", "Complaint", "Inputs", "Law", "Problem", "Star", "by_axis", "call_alone", "call_each",
    "exercise", "hidden", "highest_peak", "holds", "most_calls", "most_sent_bytes", "order", "peak", "send_first",
    "sends", "silent", "stands_still",
)  # fmt: skip
FOUND = ("cases", "inputs", "answer", "play")
"""The functions that are found in an exercise's program by their names."""


def exercise(module: str, reference: Any, **fields: Any) -> Problem:
    """The Problem of a module, named by its `__name__`: the reference, what lies beside the program in its folder, the
    functions of the module that are called `cases`, `inputs`, `answer` and `play`, and other `fields` of a Problem."""
    program = sys.modules[module]
    if "star" in fields:
        best = Path(str(program.__file__)).with_name("star.txt").read_text(encoding="utf-8")
        fields["star"] = fields["star"]._replace(best=best)
    functions = {name: vars(program)[name] for name in FOUND if name in vars(program)}
    return Problem(**{**beside(str(program.__file__)), "reference": reference, **functions, **fields})
