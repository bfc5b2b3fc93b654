"""Questions about values that many places ask of what they are given."""

from __future__ import annotations

from typing import TypeGuard


def is_whole(value: object, least: int = 1) -> TypeGuard[int]:
    """True for a whole number of at least `least`. True and False are none, though Python counts them as 1 and 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
