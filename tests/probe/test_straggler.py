"""A rank's own time, in threads: what differs between ranks of a step that takes as long on all of them."""

from __future__ import annotations

import threading

import pytest
import torch

from labkit import run_threads
from labkit.probe import straggler
from labkit.probe.straggler import OwnTime, of_all, stragglers


def steps(group, gate, clock):
    """Rank 1 works for 5 s by the clock while the others wait for it; all work for 1 s before."""
    own = OwnTime(group)
    for _ in range(3):
        with own:
            clock.tick(group.rank, 1.0)
            gate.wait()
            if group.rank == 1:
                clock.tick(group.rank, 5.0)
            group.all_reduce(torch.ones(3))
            clock.tick(group.rank, 0.5)
        group.barrier()
    return own.seconds, of_all(group, own.seconds), group.ledger.witness


class Clock:
    """perf_counter of each thread: what was ticked there, and a wait in a verb that takes as long as the slowest."""

    def __init__(self):
        self.mine = threading.local()

    def tick(self, rank, seconds):
        self.mine.now = getattr(self.mine, "now", 0.0) + seconds

    def perf_counter(self):
        return getattr(self.mine, "now", 0.0)


def test_time_inside_verbs_is_not_a_ranks_own(monkeypatch):
    """Would catch a straggler that looks like the others, because they wait for it, and a witness that stays behind."""
    clock = Clock()
    real_leave = OwnTime.leave

    def leave(self, call):  # the wait of those who came early
        if call.verb == "all_reduce" and call.rank != 1:
            clock.tick(call.rank, 5.0)
        real_leave(self, call)

    monkeypatch.setattr(OwnTime, "leave", leave)
    monkeypatch.setattr(straggler, "time", clock)
    for rank, (own, everybody, witness) in enumerate(run_threads(steps, 3, threading.Barrier(3), clock)):
        assert own == [1.5 + 5 * (rank == 1)] * 3
        assert everybody == [1.5, 6.5, 1.5]
        assert witness is None


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([1.0, 1.0, 1.0], []), ([1.0, 1.4, 1.0], []), ([1.0, 1.6, 1.0], [1]), ([2.0, 1.0], [0]), ([1.0], []),
        ([3.0, 1.0, 2.0, 1.0, 1.0], [0, 2]), ([0.0, 0.0], []),
    ],
)  # fmt: skip
def test_who_is_much_slower_than_the_others_is_named_slowest_first(seconds, slow):
    """Would catch a measure that a straggler is part of, or one that calls everybody slow."""
    assert stragglers(seconds) == slow


def test_a_factor_that_calls_everybody_slow_is_refused():
    """Would catch a threshold of 1, at which each rank but one is a straggler."""
    with pytest.raises(ValueError, match="above 1, got 1"):
        stragglers([1.0, 1.0], 1)
