"""Questions about values that many places ask of what they are given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard


def is_whole(value: object, least: int = 1) -> TypeGuard[int]:
    """True for a whole number of at least `least`. True and False are none, though Python counts them as 1 and 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_masters(held: Iterable[Any], saved: Iterable[Any] | None) -> None:
    """ValueError, with both lists of shapes, if saved masters differ in number or shape from those an optimizer holds.

    `saved` is None for a state without masters: that of a plain optimizer."""
    wanted = [tuple(master.shape) for master in held]
    shapes = None if saved is None else [tuple(master.shape) for master in saved]
    if shapes != wanted:
        raise ValueError(f"this optimizer has masters of shapes {wanted}, the saved state has {shapes}")
