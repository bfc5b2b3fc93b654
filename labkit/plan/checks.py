"""Questions about values that many places ask of what they are given."""

from __future__ import annotations

import math
from numbers import Real
from typing import TypeGuard


def is_whole(value: object, least: int = 1) -> TypeGuard[int]:
    """True for a whole number of at least `least`. True and False are none, though Python counts them as 1 and 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object, least: float = 0, *, above: bool = False) -> TypeGuard[float]:
    """True for a finite number of at least `least`, or `above` it. True, False and "3" are no numbers."""
    if not isinstance(value, (int, float, Real)) or isinstance(value, bool) or not math.isfinite(value):
        return False
    return float(value) > least if above else float(value) >= least
