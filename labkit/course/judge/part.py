"""The part of an exercise that a rank is given: the text of what plays an attempt, and of what that uses.

exercise.py:  reference, inputs, answer, laws, cases ──stay with the judge
              play, and the functions and classes that it names ──> Part ──> nursery ──> ranks
"""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path

from labkit.course.exercises.problem import Problem
from labkit.course.judge.attempt import Attempt, attempt_in
from labkit.course.judge.sandboxed_rank import Part


def part_of(problem: Problem) -> Part:
    """The part of a problem that a rank is given. ValueError if `play` is no function at the top of a file."""
    play = _text_of(inspect.getfile(problem.play), problem.play.__name__)
    return Part(problem.name, f"{play.before}\n{play.source}", play.name, problem.imports, problem.changes)


@cache
def _text_of(file: str, name: str) -> Attempt:
    return attempt_in([Path(file).read_text(encoding="utf-8")], name)
