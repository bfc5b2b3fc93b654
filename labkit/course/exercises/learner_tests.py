"""Exercises in which the learner writes a test, and the judge shows it right and wrong objects to tell apart.

    def shown(case): return {"a ring": (True, messages, n), "a star": (False, others, n), ...}
    PROBLEM = exercise(__name__, reference, **told_apart(shown))

The test is given a copy of one object at a time, in random order and without its name. What it replies is read before
it sees the next one: only True, False and numbers count, since anything else could be asked later, when all is known.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from labkit.course.judge.case import Case

PLAIN = (bool, int, float, str, list, tuple, dict, set, frozenset)
"""What says at once whether it is true: of these kinds themselves, and of no kind that is made of them."""
Shown = Callable[[Case], Mapping[str, tuple[Any, ...]]]


def settled(reply: Any) -> bool | None:
    """A reply as it is at this moment; None where there is none. TypeError for an object with a will of its own."""
    if reply is None or isinstance(reply, Tensor):
        return None if reply is None else bool(reply)
    if type(reply) not in PLAIN:
        raise TypeError(f"the test returned a {type(reply).__name__}: return True or False")
    return bool(reply)


def reply_to_each(attempt: Any, group: Any, objects: list[tuple[str, list[Any]]]) -> dict[str, bool | None]:
    """Show the test one object after the other. Its reply to each, by name; None where it returns nothing."""
    return {name: settled(attempt(*copy.deepcopy(args))) for name, args in objects}


def told_apart(shown: Shown) -> dict[str, Any]:
    """The fields of such a Problem.

    `shown(case)` is a dict: the name of an object -> (True if the test must accept it, its arguments)."""

    def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
        """The objects that are shown, without the truth about them."""
        objects = [(name, args) for name, (_, *args) in shown(case).items()]
        random.Random(case.seed + 1).shuffle(objects)
        return [(objects,)]

    def answer(case: Case, inputs: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """True for each object that the test must accept, False for each other one."""
        return [{name: truth for name, (truth, *_) in shown(case).items()}]

    return {"inputs": inputs, "play": reply_to_each, "answer": answer, "writes_test": True}
