"""Ranks on threads with a clock of their own: it stands still while any of them computes, and jumps when all wait.

    rank 0   compute  send ........ sleep until 0.30 s ............| compute        the clock jumps to 0.30 s, since
    rank 1   compute  recv, which rests until 0.30 s ..............| compute        nobody can do anything before

Nothing of the machine is in such seconds, so a law of seconds holds to the last digit on a quiet machine and on a busy
one. For the threads of a simulation `time.sleep`, `time.monotonic` and `time.perf_counter` are the simulated ones, and
everybody else keeps the real ones. Shaped links are `labkit.comm.traffic` itself, one page for all ranks as between
processes; the bytes travel between threads, in no time.
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import tempfile
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from labkit.comm import stream, traffic
from labkit.comm.group import Group
from labkit.comm.ledger import Ledger
from labkit.comm.local import Exchange, group_on
from labkit.comm.shaped import shape
from labkit.comm.traffic import Traffic
from labkit.plan.machine.topology import Links

START_S, TICK_S = 100.0, 1e-10
MOST_S = 60.0
"""Nothing that is simulated takes so long, but for ranks that ask and ask and get no answer."""


def simulate(
    fn: Callable[..., Any], world: Links | int, *args: Any, late_s: float = 0.0, ahead_s: Sequence[float] = ()
) -> list[Any]:
    """Run `fn(group, *args)` on simulated ranks; the results by rank.

    `world` says how many, or the links between them; `late_s` is how much later than asked every sleeper wakes, and
    `ahead_s` how far `time.perf_counter` of each rank runs ahead, as on another machine."""
    n_ranks = world if isinstance(world, int) else world.n_ranks
    meeting, results = Meeting(late_s), [None] * n_ranks

    def life(rank: int, path: str) -> None:
        meeting.members[threading.get_ident()] = ahead_s[rank] if ahead_s else 0.0
        group = group_on(meeting, "world", tuple(range(n_ranks)), rank, Ledger())
        try:
            if isinstance(world, Links):
                page = Traffic(path, world)
                meeting.pages.append(page)
                group = _shaped(group, meeting, page)
            results[rank] = fn(group, *args)
        except BaseException as error:
            meeting.fail(error)

    with tempfile.TemporaryDirectory() as folder, meeting.time_of_its_members():
        with meeting.held():
            for rank in range(n_ranks):
                meeting.member(target=life, args=(rank, os.path.join(folder, "page")), daemon=True).start()
        for thread in iter(meeting.next_thread, None):
            thread.join()
        for page in meeting.pages:
            page.close()
    if meeting.failed is not None:
        raise meeting.failed
    assert not meeting.undelivered(), "messages were sent and never received"
    return results


def _shaped(group: Group, meeting: Meeting, page: Traffic) -> Group:
    """The group with shaped links, and its groups along the axes of a mesh on the same links."""
    made = shape(group, page)
    made.wire.along = lambda world, axis, ranks, index: shape(  # type: ignore[attr-defined]
        group_on(meeting, axis, ranks, index, world.ledger), page
    )
    return made


class Meeting(Exchange):
    """Where the threads meet, and their clock."""

    def __init__(self, late_s: float) -> None:
        super().__init__(math.inf)
        self.now, self.late_s = START_S, late_s
        self.members: dict[int, float] = {}  # the threads, and how far the clock of each runs ahead
        self.waits: dict[int, tuple[Callable[[], bool], float]] = {}  # until what, and until when at the latest
        self.threads: deque[threading.Thread] = deque()
        self.pages: list[Traffic] = []
        self.n_alive, self.ticks = 0, itertools.count()

    def until(self, ready: Callable[[], bool], at: float = math.inf) -> None:
        """Wait until `ready()`, or until the clock says `at`. Whoever is the last to wait moves the clock."""
        me = threading.get_ident()
        with self.changed:
            self.waits[me] = (ready, at)
            try:
                while not (ready() or self.now >= at):
                    if len(self.waits) < self.n_alive or any(
                        true() or self.now >= t for true, t in self.waits.values()
                    ):
                        self.changed.wait()
                        continue
                    soonest = min(t for _, t in self.waits.values())
                    if soonest == math.inf:
                        raise RuntimeError("everybody waits for somebody who waits")
                    if soonest > START_S + MOST_S:
                        raise RuntimeError(f"this has gone on for {MOST_S:g} simulated seconds")
                    self.now = soonest
                    self.changed.notify_all()
            finally:
                del self.waits[me]

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for the wire."""
        self.until(lambda: ready() or self.failed is not None)
        if not ready():
            raise RuntimeError(f"gave up in {what}: another rank has failed")

    def sleep(self, seconds: float) -> None:
        """Sleep, and wake late."""
        self.until(lambda: False, self.now + seconds + self.late_s)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The clock stands: somebody is still to come."""
        self.n_alive += 1
        yield
        self.gone()

    def gone(self) -> None:
        """Somebody waits no more and does nothing more."""
        with self.changed:
            self.n_alive -= 1
            self.changed.notify_all()

    def perf_counter(self) -> float:
        """The clock of the rank that asks. It never says the same twice, as no clock of a machine does."""
        return self.now + self.members[threading.get_ident()] + next(self.ticks) * TICK_S

    def member(self, **how: Any) -> threading.Thread:
        """A thread of this meeting; the clock stands from its start on."""
        return _Member(self, **how)

    def next_thread(self) -> threading.Thread | None:
        """One of those that have been started."""
        return self.threads.popleft() if self.threads else None

    @contextmanager
    def time_of_its_members(self) -> Iterator[None]:
        """In the threads of this meeting time is the simulated one, also where the stream waits."""

        def either(real: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: (simulated if threading.get_ident() in self.members else real)(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "sleep", either(time.sleep, self.sleep))
            patch.setattr(time, "monotonic", either(time.monotonic, lambda: self.now))
            patch.setattr(time, "perf_counter", either(time.perf_counter, self.perf_counter))
            patch.setattr(traffic, "LOOK_S", math.inf)  # whoever sleeps until a time that was put off sleeps once more
            events = types.SimpleNamespace(Event=lambda: _Event(self), Thread=self.member, Lock=threading.Lock)
            patch.setattr(stream, "threading", events)
            patch.setattr(stream, "queue", types.SimpleNamespace(SimpleQueue=lambda: _Queue(self), Empty=queue.Empty))
            yield


class _Member(threading.Thread):
    def __init__(self, meeting: Meeting, **how: Any) -> None:
        super().__init__(**how)
        self.meeting = meeting

    def start(self) -> None:
        with self.meeting.changed:
            self.meeting.n_alive += 1
            self.meeting.threads.append(self)
        super().start()

    def run(self) -> None:
        me = threading.get_ident()
        self.meeting.members[me] = 0.0
        try:
            super().run()
        finally:
            del self.meeting.members[me]
            self.meeting.gone()


class _Event:
    """A `threading.Event` whose wait is one of the meeting's."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting, self.flag = meeting, False

    def is_set(self) -> bool:
        return self.flag

    def set(self) -> None:
        with self.meeting.changed:
            self.flag = True
            self.meeting.changed.notify_all()

    def wait(self, _: float) -> bool:
        self.meeting.until(self.is_set)
        return self.flag


class _Queue:
    """A `queue.SimpleQueue` whose get is a wait of the meeting."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting, self.items = meeting, deque[Any]()

    def put(self, item: Any) -> None:
        with self.meeting.changed:
            self.items.append(item)
            self.meeting.changed.notify_all()

    def empty(self) -> bool:
        return not self.items

    def get(self, timeout: float) -> Any:
        self.meeting.until(lambda: bool(self.items), self.meeting.now + timeout)
        if not self.items:
            raise queue.Empty
        return self.items.popleft()
