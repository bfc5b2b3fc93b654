"""Exercises in which the learner writes the test: objects, right and wrong, that it is to tell apart.

    def shown(case): return {"a ring": (True, messages, n), "a star": (False, others, n), ...}
    PROBLEM = Problem(..., **told_apart(shown))

The test sees each object by itself, a copy, in an order that tells nothing, and never the names.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.course.judge.case import Case

Shown = Callable[[Case], Mapping[str, tuple[Any, ...]]]


def told_apart(shown: Shown) -> dict[str, Any]:
    """What such a problem is made of. `shown(case)`: name -> (whether the test is to accept it, its arguments)."""

    def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
        """What is shown, without the truth."""
        objects = [(name, args) for name, (_, *args) in shown(case).items()]
        random.Random(case.seed + 1).shuffle(objects)
        return [(objects,)]

    def play(attempt: Any, group: Any, objects: list[tuple[str, list[Any]]]) -> dict[str, bool | None]:
        """What the test says of each; nothing, where it says nothing."""
        said = {name: attempt(*copy.deepcopy(args)) for name, args in objects}
        return {name: None if each is None else bool(each) for name, each in said.items()}

    def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """The truth."""
        return [{name: truth for name, (truth, *_) in shown(case).items()}]

    return {"inputs": inputs, "play": play, "answer": answer, "writes_test": True}
