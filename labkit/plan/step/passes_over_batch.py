"""What a predicted step is put together from: the seconds of a stage's passes over one micro-batch."""

from __future__ import annotations

from typing import NamedTuple


class Pass(NamedTuple):
    """Seconds of one direction of a layer or a stage, for one micro-batch.

    compute   of the device;   tp   of sums over tp;   host   in which the device waits for Python;   ep   of
    all_to_alls;   cp   in which attention waits for other ranks;   hidden   of their exchange, behind compute"""

    compute: float = 0.0
    tp: float = 0.0
    host: float = 0.0
    ep: float = 0.0
    cp: float = 0.0
    hidden: float = 0.0

    @property
    def total(self) -> float:
        """Seconds from its begin to its end; what is hidden makes it no longer."""
        return self.compute + self.tp + self.host + self.ep + self.cp

    def plus(self, other: Pass, times: int = 1) -> Pass:
        """This, and the other one so many times behind it."""
        return Pass(*(own + times * added for own, added in zip(self, other, strict=True)))
