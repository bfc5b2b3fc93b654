"""The kernel's lines to a cluster: a socket to the warden, a ZeroMQ router to the ranks. One message loop, no threads.

The warden starts and ends processes and tells how each ended. The main and the control thread of every rank connect to
the router, a unix socket in the cluster's private folder.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import zmq

from labkit.launch.warden import Ended


class Event(NamedTuple):
    """Something that a rank or the warden said: kind, rank, what, and the frames that came with it."""

    kind: str
    rank: int
    what: tuple[Any, ...]
    frames: list[Any]


class Lines:
    """Who is alive (`pids`, `ended`), who has joined the present generation, and how to talk to them."""

    def __init__(self, address: str, warden: Connection):
        self.warden = warden
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.router.setsockopt(zmq.RCVHWM, 0)
        self.router.setsockopt(zmq.SNDHWM, 0)
        self.router.bind(address)
        self.generation = 0
        self.pids: dict[int, int] = {}
        self.ended: dict[int, Ended] = {}
        self.joined: dict[int, str | None] = {}
        self.waiting: list[Event] = []
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        self.poller = zmq.Poller()
        for line in (self.router, self.warden.fileno(), self.wake_read):
            self.poller.register(line, zmq.POLLIN)

    def tell(self, rank: int, kind: str, *rest: Any, frames: Sequence[Any] = ()) -> None:
        """Send a message to the main thread of `rank`."""
        if rank in self.pids:
            identity = f"m{rank}.{self.pids[rank]}".encode()
            self.router.send_multipart([identity, pickle.dumps((kind, *rest)), *frames], copy=False)

    def ask(self, ranks: Iterable[int], question: str, detail: Any = None) -> None:
        """Ask the control threads of `ranks`; the answers come as events."""
        for rank in ranks:
            if rank in self.pids:
                identity = f"c{rank}.{self.pids[rank]}".encode()
                self.router.send_multipart([identity, pickle.dumps((question, detail))])

    def poll(self, timeout_s: float) -> list[Event]:
        """What has been said, waiting at most `timeout_s` for the first. KeyboardInterrupt after `interrupt()`."""
        events, self.waiting = self.waiting, []
        ready = dict(self.poller.poll(0 if events else int(timeout_s * 1e3)))
        if self.wake_read in ready:
            os.read(self.wake_read, 4096)
            raise KeyboardInterrupt
        while self.warden.poll():
            self._from_warden(events)
        if self.router in ready:
            self._from_ranks(events)
        return events

    def _from_warden(self, events: list[Event]) -> None:
        try:
            kind, *what = self.warden.recv()
        except (EOFError, OSError):
            raise RuntimeError(
                "the warden of this cluster is gone, and its ranks with it: make a new Cluster"
            ) from None
        if kind == "started":
            self.pids[what[0]] = what[1]
        elif kind == "refused":
            raise RuntimeError(f"the system refused a process for rank {what[0]} ({what[1]}): use fewer ranks")
        elif kind == "ended":
            ended: Ended = what[0]
            if self.pids.get(ended.rank) == ended.pid:
                del self.pids[ended.rank]
                self.ended[ended.rank] = ended
                events.append(Event("ended", ended.rank, (ended,), []))

    def _from_ranks(self, events: list[Event]) -> None:
        while True:
            try:
                identity, head, *frames = self.router.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            name = identity.bytes.decode()
            rank, _, pid = name[1:].partition(".")
            kind, *what = pickle.loads(head.buffer)
            if kind == "joined":
                if what[1] == self.generation:
                    self.joined[int(rank)] = what[2]
            elif kind != "hello" and self.pids.get(int(rank)) == int(pid):  # else the ghost of a rank that was replaced
                events.append(Event(kind, int(rank), tuple(what), [frame.buffer for frame in frames]))

    def wait(self, until: Callable[[], Any], timeout_s: float) -> bool:
        """Handle messages until `until()` holds; keeps the events for the next `poll`."""
        deadline = time.monotonic() + timeout_s
        kept: list[Event] = []
        while not until() and time.monotonic() < deadline:
            kept += self.poll(min(0.1, max(0.0, deadline - time.monotonic())))
        self.waiting += kept
        return bool(until())

    def interrupt(self) -> None:
        """Make the thread that polls raise KeyboardInterrupt."""
        os.write(self.wake_write, b"!")

    def hang_up(self) -> None:
        """Close every line."""
        self.warden.close()
        self.router.close()
        self.context.term()
        os.close(self.wake_read)
        os.close(self.wake_write)
