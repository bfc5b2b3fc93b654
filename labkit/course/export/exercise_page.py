"""The exercises of a lab on one page, made from the problems themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from labkit.course.exercises.catalogue import problems
from labkit.course.exercises.exercise_card import Card
from labkit.course.exercises.hint_panel import NAMES, words_as_html
from labkit.course.exercises.problem import Problem


@dataclass(frozen=True)
class ExercisePage:
    """The exercises of a lab: its number, its title and the name of its page, which is theirs as well."""

    number: str
    title: str
    name: str
    list: Sequence[Problem]

    @property
    def file(self) -> str:
        """Its place on the site."""
        return f"exercises/{self.name}"

    @property
    def minutes(self) -> int:
        """The minutes that all exercises of the page take together."""
        return sum(exercise.minutes for exercise in self.list)

    def facts(self, exercise: Problem) -> tuple[tuple[str, str], ...]:
        """(name, words) of what a learner should know before beginning one."""
        return Card(exercise).facts

    def hints(self, exercise: Problem) -> Sequence[tuple[str, Markup]]:
        """(name, HTML) of each of the three hints of one."""
        return [(name, Markup(words_as_html(words))) for name, words in zip(NAMES, exercise.hints, strict=True)]


def exercise_page(number: str, title: str, name: str) -> ExercisePage | None:
    """The page of a lab's exercises; None if it has none, or is no lab ("")."""
    some = problems(number) if number else ()
    return ExercisePage(number, title, name, some) if some else None
