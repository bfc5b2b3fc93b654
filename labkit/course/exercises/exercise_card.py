"""What an exercise looks like in a notebook and a terminal: its card, a hint, a solution."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from labkit.course.exercises.exercise_files import VERDICTS
from labkit.course.exercises.problem import Problem
from labkit.course.judge.verdicts import words_of


@dataclass(frozen=True)
class Card:
    """An exercise on one page: objectives, difficulty, importance, minutes and laws. `attempts` counts the learner's
    attempts so far."""

    problem: Problem
    attempts: int = 0

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """(name, words) of what a learner should know before beginning."""
        exercise = self.problem
        about = f"about {exercise.n_lines} line{'s' * (exercise.n_lines > 1)}, {exercise.minutes} minutes"
        rows = [
            ("difficulty", dots(exercise.difficulty)), ("importance", dots(exercise.importance)), ("length", about),
            ("you learn", "; ".join(exercise.objectives)),
            *((name, words_of(exercise, name)) for name in VERDICTS),
        ]  # fmt: skip
        if exercise.imports:
            rows.append(("from labkit", ", ".join(exercise.imports)))
        if exercise.star is not None:
            rows.append(("★", f"for less than the reference: {exercise.star.words}"))
        if self.attempts:
            rows.append(("attempts", str(self.attempts)))
        return tuple(rows)

    def __repr__(self) -> str:
        rows = [f"{self.problem.key} {self.problem.title}", *(f"  {name:11s}{words}" for name, words in self.facts)]
        return "\n".join(rows)

    def _repr_html_(self) -> str:
        cell = 'style="text-align:left;vertical-align:top;padding:.1em .8em"'
        rows = "".join(f"<tr><td {cell}>{name}</td><td {cell}>{escape(words)}</td></tr>" for name, words in self.facts)
        return f"<div><b>{self.problem.key} {escape(self.problem.title)}</b><table>{rows}</table></div>"


@dataclass(frozen=True)
class Hint:
    """One of an exercise's three hints: the idea, the shapes, the skeleton. `level` is 1, 2 or 3."""

    level: int
    words: str

    def __repr__(self) -> str:
        rest = "" if self.level == 3 else f" ({3 - self.level} more)"
        return f"Hint {self.level} of 3{rest}: {self.words}"


@dataclass(frozen=True)
class Solution:
    """The reference, as text."""

    key: str
    code: str

    def __repr__(self) -> str:
        return f"# a solution of {self.key}\n{self.code}"


def dots(count: int) -> str:
    """A rating from 0 to 5 as dots: 3 is `●●●○○`."""
    return "●" * count + "○" * (5 - count)
