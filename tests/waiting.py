"""Waiting in a test: until the thing is there, and no longer; and as long as a machine needs that is slow and busy."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from labkit import Cluster

LONG_S = 120.0
"""A hundred times what a quiet machine needs for anything that is waited for here; who sees this limit has a hang."""


def until(true: Callable[[], Any], within_s: float = LONG_S) -> bool:
    """Wait for `true()`; whether it came."""
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def once(*steps: Callable[[], Any]) -> Iterator[None]:
    """`once(true, action, true, action, ...)`: while the block runs, somebody looks out for each `true()` in turn, and
    does the action then."""
    over = threading.Event()

    def look_out() -> None:
        for true, action in zip(steps[::2], steps[1::2], strict=True):
            while not true():
                if over.wait(0.01):
                    return
            action()

    watcher = threading.Thread(target=look_out, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join(LONG_S)


def stop_button() -> None:
    """What Jupyter's stop button does to a kernel."""
    os.kill(os.getpid(), signal.SIGINT)


def here(group: Any) -> None:
    """A rank says that it has come to this line of a call; `come` hears it."""
    group.ledger.witness.track(1, 1)


def meet(group: Any, *ranks: int) -> None:
    """On a rank: go on when these others wait in a verb of a group."""
    assert until(lambda: all(group.ledger.witness.box.read(rank).entry is not None for rank in ranks))


def come(cluster: Cluster, *ranks: int) -> Callable[[], bool]:
    """Whether these ranks (all, if none is named) have come to where they say `here` in the present call."""
    return lambda: all(_page(cluster, rank).total > 0 for rank in ranks or range(cluster.n_ranks))


def waiting(cluster: Cluster, *ranks: int) -> Callable[[], bool]:
    """Whether these ranks (all, if none is named) wait in a verb of a group."""
    return lambda: all(_page(cluster, rank).entry is not None for rank in ranks or range(cluster.n_ranks))


def _page(cluster: Cluster, rank: int) -> Any:
    return cluster._processes.box.read(rank)


def replaced(before: Sequence[int], cluster: Cluster) -> list[int]:
    """The ranks that have another process than `before`."""
    return [rank for rank, (a, b) in enumerate(zip(before, cluster.pids, strict=True)) if a != b]
