"""All derivations, by topic: 30 questions whose true answer is a function of the planner."""

from __future__ import annotations

import difflib

from labkit.course.whiteboard.derivation import Derivation
from labkit.course.whiteboard.memory_derivations import MEMORY
from labkit.course.whiteboard.speed_derivations import SPEED
from labkit.course.whiteboard.wire_derivations import WIRE

DERIVATIONS: tuple[Derivation, ...] = (*WIRE, *MEMORY, *SPEED)


def derivation(name: str) -> Derivation:
    """The derivation with this name. ValueError, with the nearest name, if there is none."""
    for entry in DERIVATIONS:
        if entry.name == name:
            return entry
    near = difflib.get_close_matches(name, [entry.name for entry in DERIVATIONS], 1, 0.3)
    raise ValueError(f"no derivation is called {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
