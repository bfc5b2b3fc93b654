"""All derivations, by topic: 30 questions whose truth is a function of the planner."""

from __future__ import annotations

import difflib

from labkit.course.whiteboard.derivation import Derivation
from labkit.course.whiteboard.memory_derivations import MEMORY
from labkit.course.whiteboard.speed_derivations import SPEED
from labkit.course.whiteboard.wire_derivations import WIRE

DERIVATIONS: tuple[Derivation, ...] = (*WIRE, *MEMORY, *SPEED)


def derivation(name: str) -> Derivation:
    """The derivation of this name. ValueError, with the nearest, for one that is not there."""
    for each in DERIVATIONS:
        if each.name == name:
            return each
    near = difflib.get_close_matches(name, [each.name for each in DERIVATIONS], 1, 0.3)
    raise ValueError(f"no derivation is called {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
