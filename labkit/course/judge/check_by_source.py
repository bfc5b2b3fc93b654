"""The judge for programs: a text in, a Report out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.course.judge.prefork import prefork_server

if TYPE_CHECKING:
    from labkit.course.judge.report import Report


def judge_source(exercise: str, source: str, seed: int | None = None) -> Report:
    """The report on a text of Python that solves an exercise: `judge_source("03.2", path.read_text())`.

    exercise   its key, "03.2"
    source     defines the function (or class) that the exercise asks for, with whatever it uses; it is read here, and
               run by the judge in processes of its own. Of the rest of the text nothing is run.
    seed       of the inputs that are drawn; None draws them anew, as a check does. The same seed gives the same inputs.

    The report has `.passed`, `.starred`, `.broken` (the first broken verdict: `.name`, `.expected`, `.seen`, `.cause`,
    `.rank`, `.line`; None if all hold), `.seconds`, `.verdicts`, `.as_dict()`, and prints as text and HTML. Nothing is
    written to anybody's progress. A text that does not define what is asked for, or is no Python, gets a report with
    the verdict "rules". ValueError for a key that no exercise has; RuntimeError if the judge itself fails."""
    server = prefork_server()  # it imports torch for the judge, while this process does so for itself
    from labkit.course.exercises.catalogue import problem
    from labkit.course.judge.attempt import Attempt, attempt_in

    it = problem(exercise)
    try:
        attempt = attempt_in([source], it.name)
    except ValueError:
        attempt = Attempt(it.name, source)
    return server.judge(it.key, attempt, seed)
