"""A clock's verb listener stands between a ledger and its witness, and notes when each verb is entered and left.

    verb --enter--> VerbListener --enter--> the witness that was there (the page that a hang is read from)
         --leave-->              --leave-->

A call is noted under a number: the start of an asynchronous verb and the wait for it are the same call, twice.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from typing import Any, NamedTuple

from labkit.comm.ledger import Ledger, PendingOperation
from labkit.probe.own_calls import OwnCalls
from labkit.probe.rows import OperationSpan


class Open(NamedTuple):
    """A verb that has been entered and not left. `guess` is the number of its transfer in the ledger, or -1."""

    call: PendingOperation
    t0: float
    blocks: bool
    inside: bool
    guess: int


class VerbListener:
    """A `Witness` that notes every call and passes it on to the one before it. Once it is `deaf` it only passes on."""

    def __init__(self, ledger: Ledger, own: OwnCalls) -> None:
        """Of `own` calls it notes that the program waits in them; those of others are only noted. The caller puts the
        listener into `ledger.witness`, and takes it out."""
        self.ledger, self.inner = ledger, ledger.witness
        self.transfers, self.first = ledger.transfers, len(ledger.transfers)
        self.deaf = False
        self._own = own
        self._open: dict[int, list[Open]] = defaultdict(list)  # by thread: calls lie in one another there
        self._entries: list[OperationSpan] = []
        self._kept: list[PendingOperation] = []  # kept, so that no two have the same id
        self._numbers: dict[int, int] = {}

    def enter(self, call: PendingOperation) -> None:
        """Pass it on, since the other may refuse the call; then note the time."""
        if self.inner is not None:
            self.inner.enter(call)
        if self.deaf:
            return
        thread = threading.get_ident()
        around, within = self._open[thread], self.ledger.within
        guess = -1
        if call.peer is None and not around and id(call) not in self._numbers:
            guess = within[-1][1] if within else len(self.transfers)  # a blocking verb has been written down already
        if id(call) not in self._numbers:
            self._numbers[id(call)] = len(self._kept)
            self._kept.append(call)
        inside = bool(within) if call.peer is not None else bool(around)
        around.append(Open(call, time.perf_counter(), self._own.here() and not around, inside, guess))

    def leave(self, call: PendingOperation) -> None:
        """Note the time, then pass it on."""
        t1 = time.perf_counter()
        if self.inner is not None:
            self.inner.leave(call)
        around = self._open[threading.get_ident()]
        for k in reversed(range(len(around))):
            if around[k].call is call:
                self._entries.append(self._entry(around.pop(k), t1))
                break

    def track(self, done: float, total: float) -> None:
        """Pass progress on to the witness before this one, if it takes any."""
        track: Any = getattr(self.inner, "track", None)
        if track is not None:
            track(done, total)

    def read(self, end: float) -> tuple[OperationSpan, ...]:
        """The entries so far, ordered by begin; those that are still open end at `end`."""
        unfinished = [self._entry(verb, end) for around in self._open.values() for verb in around]
        return tuple(sorted((*self._entries, *unfinished), key=lambda entry: (entry.t0, -entry.t1)))

    def taken(self) -> Counter[int]:
        """Global rank -> messages from there that were waited for."""
        calls = {entry.call: entry.peer for entry in self._entries if entry.verb == "recv"}
        return Counter(peer for peer in calls.values() if peer is not None)

    def _entry(self, verb: Open, t1: float) -> OperationSpan:
        call, number = verb.call, verb.guess
        written = self.transfers[number] if 0 <= number < len(self.transfers) else None
        if written is None or written.verb != call.verb:  # a wait has no transfer of its own
            written, number = None, self.first - 1
        starts = written is not None and written.t0 >= verb.t0  # a blocking verb is written down before it is entered
        peer = None if call.peer is None else call.ranks[call.peer]
        place = (call.verb, call.axis, call.ranks, peer, call.tag, call.seq)
        blocks, number = verb.blocks and not starts, max(-1, number - self.first)
        return OperationSpan(self._numbers[id(call)], *place, verb.t0, t1, blocks, verb.inside, number)
