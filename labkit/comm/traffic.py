"""Traffic: when a message arrives on shaped links, kept in one page of memory that all ranks of a machine share.

The bytes themselves take the real wire, at once. What is shaped is when they count as arrived:

    handed over at t        the edge carries its messages one after the other,        arrived: last byte + alpha
    ────┬──────────────────  as fast as `rates` of plan/machine/fair_share.py allows ────────────────┬───────────
        │ booked += bytes                                         served reaches the mark
        └ mark = booked                                           of the message

For each directed edge the page holds two counts, `booked` and `served`. Every look brings them up to date: from the
time of the last look to now, all edges with bytes to carry are served at their fair rates, from one change of rates to
the next. An idle edge gives t + alpha + bytes * beta to the microsecond; two edges that share a trunk get half each for
as long as both are busy, whenever the second came. As rates change, a history for each edge remembers since when it was
served how fast, so that a rank which looks late still finds when the mark was passed. Nothing runs in the background.

A busy machine wakes a rank that should have gone on at t some time later. The links did not cause that, so it is
forgiven: until it next waits, what this rank hands over counts as handed over that much sooner (`late`, at most alpha
and 10 ms). Otherwise the latencies of a ring would grow by a wake-up at every step.

All times are CLOCK_MONOTONIC, one clock for all processes of a machine. A look takes 5 to 10 us and is done under a
file lock, which the system frees when a process dies.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from labkit.comm.message import Stamp
from labkit.comm.preallocated_file import allocated
from labkit.plan.machine.fair_share import rates
from labkit.plan.machine.topology import Links

LOOK_S = 4e-3
"""A sleeper looks up this often: a message that was handed over meanwhile may have changed its due time."""
BEAT_S = 0.2
FORGIVEN_S = 10e-3
HISTORY = 48
_PR_SET_TIMERSLACK = 29
_SEGMENT = 3  # since when (s), served by then (bytes), rate (bytes/s)
_SLACK_BYTES = 0.5  # rounding below this is no change

T = TypeVar("T")
Doubles: TypeAlias = "array[float]"


class Traffic:
    """The page, seen from one process. `path` is created if it is missing; every rank must give the same links.

    `beat` is called now and then by a thread that sleeps here, so that nobody takes the sleep for a hang."""

    def __init__(self, path: str, links: Links, beat: Callable[[], None] | None = None):
        self.links, self.beat, self.n = links, beat, links.n_ranks
        self.edges = [a * self.n + b for a in range(self.n) for b in range(self.n) if a != b]
        self.alpha = {a * self.n + b: link.alpha_s for (a, b), link in links.wires}
        # doubles in the page: the time of the last look; booked and served of each edge; then each edge's history
        self.core = 1 + 2 * self.n**2
        size = 8 * (self.core + self.n**2 * (1 + _SEGMENT * HISTORY))
        self.fd = allocated(path, size, "the traffic of shaped links")  # zeros: nothing booked, nothing served
        self.memory = mmap.mmap(self.fd, size)
        self.page = memoryview(self.memory).cast("d")
        self.shares: dict[tuple[int, ...], dict[int, float]] = {}
        self.lock = threading.Lock()  # a file lock knows processes, not threads
        self.closed = False
        self.punctual()
        _wake_promptly()

    def road(self, a: int, b: int) -> Road:
        """The edge from rank a to rank b (global ranks)."""
        return Road(self, a * self.n + b)

    def close(self) -> None:
        """Release the page; a thread that still sleeps on it gets a RuntimeError."""
        with self.lock:
            if not self.closed:
                self.closed = True
                self.page.release()
                self.memory.close()
                os.close(self.fd)

    def book(self, edge: int, n_bytes: int) -> Stamp:
        """Hand over a message now: (when, mark, late); mark counts the edge's bytes up to the message's last."""
        late = min(self._late(), self.alpha[edge])
        return *self._look(lambda core, now: self._book(core, edge, n_bytes, now)), late

    def due(self, edge: int, stamp: Stamp, behind: int = 0) -> float:
        """The time at which all but the last `behind` bytes of a message are there, if nobody hands over more."""
        handed_over, mark, late = stamp
        passed = self._look(lambda core, _: self._passed(core, edge, mark - behind))
        return max(handed_over, passed) + self.alpha[edge] - late

    def rest(self, edge: int, stamp: Stamp, behind: int = 0) -> None:
        """Sleep until `due`. A signal is handled at once."""
        beat_at, on_time = time.monotonic() + BEAT_S, time.monotonic() - self._late()
        while True:
            due, now = self.due(edge, stamp, behind), time.monotonic()
            if due <= now:
                self.own.late = min(now - max(due, on_time), FORGIVEN_S)
                return
            time.sleep(min(due - now, LOOK_S))
            if now > beat_at and self.beat is not None:
                self.beat()
                beat_at = now + BEAT_S

    def punctual(self) -> None:
        """Forget how late the threads of this process are: a new call begins."""
        self.own = threading.local()

    def _late(self) -> float:
        return getattr(self.own, "late", 0.0)

    # -- the page, with the lock held --------------------------------------------------------------------------------

    def _look(self, fn: Callable[[Doubles, float], T]) -> T:
        """Bring the page up to now and call `fn(core, now)`, which may change the core."""
        with self.lock:
            if self.closed:
                raise RuntimeError("the world of these links is over: this thread was left behind by an earlier call")
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX)
                core = array("d", self.memory[: 8 * self.core])
                now = max(time.monotonic(), core[0])
                self._advance(core, now)
                result = fn(core, now)
                self.page[: self.core] = core  # one write: a signal cannot tear it
                return result
            finally:
                fcntl.flock(self.fd, fcntl.LOCK_UN)

    def _book(self, core: Doubles, edge: int, n_bytes: int, now: float) -> tuple[float, float]:
        core[1 + 2 * edge] += n_bytes
        return now, core[1 + 2 * edge]

    def _advance(self, core: Doubles, until: float, edge: int = -1, mark: float = 0.0) -> float:
        """Serve all edges until `until`, or until `edge` has been served up to `mark`. Returns the time reached."""
        now = core[0] or until
        while now < until:
            busy = tuple(e for e in self.edges if core[1 + 2 * e] > core[2 + 2 * e])
            if not busy:
                break
            rate = self._rates(busy)
            step = min((core[1 + 2 * e] - core[2 + 2 * e]) / rate[e] for e in busy)
            if edge in rate and (mark - core[2 + 2 * edge]) / rate[edge] <= step:
                return now + (mark - core[2 + 2 * edge]) / rate[edge]
            for e in busy if edge < 0 else ():
                self._remember(e, now, core[2 + 2 * e], rate[e])
            step = min(step, until - now)
            for e in busy:
                served = core[2 + 2 * e] + rate[e] * step
                core[2 + 2 * e] = core[1 + 2 * e] if served > core[1 + 2 * e] - _SLACK_BYTES / 1e3 else served
            now += step
            if edge in rate and core[2 + 2 * edge] >= mark:  # done together with another edge, but for rounding
                return now
        core[0] = until
        return until

    def _passed(self, core: Doubles, edge: int, mark: float) -> float:
        """The time at which `edge` was, or will be, served up to `mark`."""
        if core[2 + 2 * edge] < mark:
            return self._advance(array("d", core), float("inf"), edge, mark)
        at = self.core + edge * (1 + _SEGMENT * HISTORY)
        count, since = int(self.page[at]), 0.0
        for k in range(count, max(0, count - HISTORY), -1):
            where = at + 1 + (k - 1) % HISTORY * _SEGMENT
            since, served, rate = self.page[where : where + _SEGMENT]
            if served < mark:
                return since + (mark - served) / rate
        return since  # longer ago than is remembered

    def _remember(self, edge: int, now: float, served: float, rate: float) -> None:
        at = self.core + edge * (1 + _SEGMENT * HISTORY)
        count = int(self.page[at])
        if count:
            where = at + 1 + (count - 1) % HISTORY * _SEGMENT
            since, then, pace = self.page[where : where + _SEGMENT]
            if pace == rate and abs(then + pace * (now - since) - served) < _SLACK_BYTES:
                return
        where = at + 1 + count % HISTORY * _SEGMENT
        self.page[where : where + _SEGMENT] = array("d", (now, served, rate))
        self.page[at] = count + 1

    def _rates(self, busy: tuple[int, ...]) -> dict[int, float]:
        if busy not in self.shares:
            if len(self.shares) > 4096:
                self.shares.clear()
            shares = rates(self.links, [divmod(e, self.n) for e in busy])
            self.shares[busy] = {a * self.n + b: rate for (a, b), rate in shares.items()}
        return self.shares[busy]


def _wake_promptly() -> None:
    """Let this thread, and those that it starts, be woken within a microsecond of the time asked for (Linux rounds
    sleeps up by 50 us to save power)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


class Road:
    """One directed edge, as the `Lane` of messages."""

    def __init__(self, traffic: Traffic, edge: int):
        self.traffic, self.edge = traffic, edge

    def book(self, n_bytes: int) -> Stamp:
        """Hand over a message of `n_bytes` now; its stamp."""
        return self.traffic.book(self.edge, n_bytes)

    def rest(self, stamp: Stamp, behind: int = 0) -> None:
        """Sleep until all but the last `behind` bytes are there."""
        self.traffic.rest(self.edge, stamp, behind)

    def here(self, stamp: Stamp) -> bool:
        """True if the whole message has arrived."""
        return self.traffic.due(self.edge, stamp) <= time.monotonic()
