"""The rank that all others wait for, found without a clock that they share.

    rank 0   | compute ..... | wait ............ |      own time 5
    rank 1   | compute ..... | wait ............ |      own time 5      a step takes as long on all of them,
    rank 2   | compute ................. | wait  |      own time 9      what differs is the time that is a rank's own

A rank's own time is that of a step without the time in which it waits inside a verb of a group. It is the same for all
where the work is; who has much more of it than the others is slow: a hot GPU, a busy host, a disk, a longer sequence.

Sends 8 bytes of each rank to each other when the times are compared. Source: the same comparison is how Llama 3's
stragglers were found (arXiv:2407.21783, section 3.3.4).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from labkit.comm.group import Group
from labkit.comm.ledger import PendingOperation
from labkit.probe.own_calls import OwnCalls

SLOW = 1.5
"""A straggler's own time is at least so many times the median of the others'."""


class OwnTime:
    """A context around a piece of work, again and again; `seconds` has the own time of each, in order."""

    def __init__(self, group: Group) -> None:
        """Hear the waits of all groups that share this one's ledger."""
        self.ledger, self.seconds = group.ledger, list[float]()
        self._inner: Any = None
        self._own, self._depth = OwnCalls(), 0
        self._began = self._since = self._waited = 0.0

    def __enter__(self) -> OwnTime:
        self._inner, self.ledger.witness = self.ledger.witness, self
        self._own.__enter__()
        self._depth, self._waited = 0, 0.0
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self._began - self._waited)
        self.ledger.witness = self._inner
        self._own.__exit__()

    def enter(self, call: PendingOperation) -> None:
        """A wait begins. Waits inside of others count once, and those of other threads not at all,
        but for autograd's, in which the backward of a GPU waits."""
        if self._inner is not None:
            self._inner.enter(call)
        if self._own.here():
            self._depth += 1
            if self._depth == 1:
                self._since = time.perf_counter()

    def leave(self, call: PendingOperation) -> None:
        """A wait ends."""
        if self._own.here() and self._depth:
            self._depth -= 1
            if not self._depth:
                self._waited += time.perf_counter() - self._since
        if self._inner is not None:
            self._inner.leave(call)


def of_all(group: Group, seconds: Sequence[float]) -> list[float]:
    """The median of each rank's seconds, by rank, on every rank. 0 of a rank that has none."""
    median = torch.tensor([statistics.median(seconds or [0.0])], dtype=torch.float64, device=group.device)
    return group.all_gather(median).tolist()


def stragglers(seconds: Sequence[float], factor: float = SLOW) -> list[int]:
    """Ranks whose own time is at least `factor` times the median of all others, the slowest first.

    Two ranks are each other's measure, so of these at most one can be slow. ValueError for a factor of 1 or less."""
    if not factor > 1:
        raise ValueError(f"a straggler is slower than the others: the factor is above 1, got {factor}")
    slow = []
    for rank, own in enumerate(seconds):
        others = [*seconds[:rank], *seconds[rank + 1 :]]
        if others and own > 0 and own >= factor * statistics.median(others):
            slow.append(rank)
    return sorted(slow, key=lambda rank: -seconds[rank])
