"""What a cluster asks of its ranks, wherever they come from: `Ranks`, and the loop that hears from them.

RankProcesses      processes of this machine, forked by a warden (rank_processes.py)
JoinedRanks        processes that torchrun, Slurm, Kubernetes or Ray has started anywhere (joined.py)
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import zmq

from labkit.launch.blackbox import BlackBox
from labkit.launch.output import Tail
from labkit.launch.warden import Ended


class RankMessage(NamedTuple):
    """A message from a rank or the warden: its kind, the rank, its contents `what`, and the frames that came along."""

    kind: str
    rank: int
    what: tuple[Any, ...]
    frames: list[Any]


class Reach(Protocol):
    """The operations that differ between forked ranks and executed ones."""

    @abstractmethod
    def receive(self, ready: dict[Any, int], events: list[RankMessage]) -> None:
        """Read what has come on the channels that are `ready`, and add to `events` what concerns a call."""

    @abstractmethod
    def tell(self, rank: int, kind: str, *rest: Any, frames: Sequence[Any] = ()) -> None:
        """Send a message to the main thread of `rank`."""

    @abstractmethod
    def ask(self, ranks: Iterable[int], question: str, detail: Any = None) -> None:
        """Ask the control threads of `ranks`; the answers come as events."""

    @abstractmethod
    def answer(self, rank: int, number: int, kind: str, *rest: Any) -> None:
        """Answer question `number` of the debugger of `rank`."""

    @abstractmethod
    def signal(self, ranks: Iterable[int], number: int) -> None:
        """Send a signal to ranks."""

    @abstractmethod
    def kill(self, ranks: Iterable[int]) -> None:
        """End ranks and all that they started, and wait until they are gone."""

    @abstractmethod
    def heal(self, everybody: bool = False) -> list[int]:
        """A new generation in which all meet again, with fresh processes where they can be had at once. Returns the
        ranks that are new."""

    @abstractmethod
    def mend(self, everybody: bool) -> str:
        """Before a call: as `heal`, with all the time that fresh processes need. Returns what to tell the learner."""

    @abstractmethod
    def endpoints(self) -> frozenset[tuple[str, int]]:
        """Addresses of all TCP sockets of the ranks: a connection between two of them is gloo's."""

    @abstractmethod
    def close(self) -> None:
        """End every rank; nothing is left."""


class Ranks(Reach):
    """The ranks that are alive (`pids`) or have `ended`, those that have joined, and what is known of each.

    box            what every rank is doing; tails: what each has printed; devices: where each computes
    nodes          the machine of each rank, by rank; () if all are on this one
    command        the line with which somebody else starts the ranks; "" if labkit does
    folder         the cluster's private folder on this machine
    shares_memory  whether large tensors reach the ranks through memory that both processes map
    """

    n_ranks: int
    box: BlackBox
    tails: list[Tail]
    devices: Sequence[str]
    folder: str
    shares_memory = True
    nodes: tuple[str, ...] = ()
    command = ""

    def __init__(self) -> None:
        self.generation = 0
        self.pids: dict[int, int] = {}
        self.ended: dict[int, Ended] = {}
        self.joined: dict[int, str | None] = {}
        self.waiting: list[RankMessage] = []
        self.sent_sources: set[str] = set()
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        self.poller = zmq.Poller()
        self.poller.register(self.wake_read, zmq.POLLIN)

    # -- hearing -----------------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> list[RankMessage]:
        """The messages that have come; waits `timeout_s` at most for the first. KeyboardInterrupt on `interrupt()`."""
        events, self.waiting = self.waiting, []
        ready = dict(self.poller.poll(0 if events else int(timeout_s * 1e3)))
        if self.wake_read in ready:
            os.read(self.wake_read, 4096)
            raise KeyboardInterrupt
        self.receive(ready, events)
        return events

    def wait(self, until: Callable[[], Any], timeout_s: float) -> bool:
        """Handle messages until `until()` holds; keeps the events for the next `poll`."""
        deadline = time.monotonic() + timeout_s
        kept: list[RankMessage] = []
        while not until() and time.monotonic() < deadline:
            kept += self.poll(min(0.1, max(0.0, deadline - time.monotonic())))
        self.waiting += kept
        return bool(until())

    def interrupt(self) -> None:
        """Make the thread that polls raise KeyboardInterrupt."""
        os.write(self.wake_write, b"!")

    def hang_up(self) -> None:
        """Close what wakes the loop."""
        os.close(self.wake_read)
        os.close(self.wake_write)

    def alive(self, rank: int) -> bool:
        """True if `rank` has a process, as far as is known."""
        return rank in self.pids

    def lost(self, rank: int) -> Ended | None:
        """How a rank has ended of which nothing is heard, or None if it can be reached."""
        return None

    def where(self, rank: int) -> str:
        """` on node b`, where the ranks are on several machines."""
        return f" on node {self.nodes[rank]}" if self.nodes else ""
