"""Exercises in which the learner writes a test, and the judge shows it right and wrong objects to tell apart.

    def shown(case): return {"a ring": (True, messages, n), "a star": (False, others, n), ...}
    PROBLEM = Problem(..., **told_apart(shown))

The test is given a copy of one object at a time, in random order and without its name.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.course.judge.case import Case

Shown = Callable[[Case], Mapping[str, tuple[Any, ...]]]


def told_apart(shown: Shown) -> dict[str, Any]:
    """The fields of such a Problem.

    `shown(case)` is a dict: the name of an object -> (True if the test must accept it, its arguments)."""

    def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
        """The objects that are shown, without the truth about them."""
        objects = [(name, args) for name, (_, *args) in shown(case).items()]
        random.Random(case.seed + 1).shuffle(objects)
        return [(objects,)]

    def play(attempt: Any, group: Any, objects: list[tuple[str, list[Any]]]) -> dict[str, bool | None]:
        """The test's reply to each object by name; None where it returns nothing."""
        replies = {name: attempt(*copy.deepcopy(args)) for name, args in objects}
        return {name: None if reply is None else bool(reply) for name, reply in replies.items()}

    def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """True for each object that the test must accept, False for each other one."""
        return [{name: truth for name, (truth, *_) in shown(case).items()}]

    return {"inputs": inputs, "play": play, "answer": answer, "writes_test": True}
