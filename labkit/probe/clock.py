"""Clock: when did this rank compute, when was something on the wire, and when did it wait?

    def step(group):
        with Clock(group) as clock:                    # on every rank: they compare their clocks first
            with clock.span("forward"):
                ...
        return clock.recording
    recording = Recording.of([reply.value for reply in cluster.run(step)])

    main thread   ---- compute ---- |enter  wait for the all_reduce  leave| ---- compute ----
                                    ^ the ledger's witness hears both     ^
    ledger             |t0 ------------------ all_reduce -------------- t1|

Communication is what the ledger records; waiting is what its witness hears. So the clock steps between the ledger and
the witness that was there before, and passes every call on. Nothing is polled; a verb or a span takes a few
microseconds more.

Clocks: rank 0 asks every other rank for the time, `rounds` times. A question leaves at a, is answered at b on the other
clock, and the answer is back at d: the other clock is then b - (a + d)/2 ahead, with an error of at most (d - a)/2. The
quickest answer counts. That sends at most (2 rounds + 1)(n-1) messages of 16 bytes, which no ledger counts. Ranks of
one machine share a clock, so their offset is near 0. Clocks of different machines drift apart by about 10 us a second:
record a step, not an hour.

On CUDA `span` also puts an event before and after itself on the current stream, which tells when the device did the
work. In a cluster with `blocking=False` a verb of NCCL returns as soon as the device has it in its queue, so the host
seldom waits: there compute, exposed and bubble are only what the host saw.

Source: Cristian 1989, Distributed Computing 3, section 3; Mills, RFC 5905, section 8 (the offset) and 10 (the filter).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from labkit.comm.group import Group
from labkit.comm.ledger import Ledger
from labkit.probe.own_calls import OwnCalls
from labkit.probe.recording import Recording, Shares, bubble_share, overlap_share
from labkit.probe.rows import ProgramSpan, RankTimeline
from labkit.probe.verb_listener import VerbListener
from labkit.probe.watched import WatchedModule

__all__ = ("Clock", "Recording", "Shares", "bubble_share", "clock_offset", "overlap_share")

TAG = (1 << 20) - 1
"""The highest tag that a wire takes, so that the clock's questions do not meet messages of the program."""


class Clock:
    """Records while it is entered; `recording` holds what it saw, also afterwards. Entered again it begins anew.

    Every rank of the group must enter it, since their clocks are compared: give it the world's group where there are
    several, which share a ledger. Without a group it is the stopwatch of one process."""

    def __init__(self, group: Group | None = None, rounds: int = 16) -> None:
        """Nothing is recorded before the clock is entered. ValueError for fewer than one round of questions."""
        if rounds < 1:
            raise ValueError(f"clocks are compared in 1 round or more, got rounds={rounds}")
        self.group, self.rounds = group, rounds
        self._ledger = Ledger() if group is None else group.ledger
        self._cuda = group is not None and group.device.startswith("cuda")
        self._watched: list[WatchedModule] = []
        self._row: RankTimeline | None = None
        self._listener: VerbListener | None = None

    def __enter__(self) -> Clock:
        if self._listener is not None:
            raise ValueError("this clock is running already: leave it first, or make a second one")
        self._offset = (0.0, 0.0) if self.group is None else clock_offset(self.group, self.rounds)
        self._spans: list[ProgramSpan] = []
        self._events: list[tuple[str, Any, Any]] = []
        self._received = self._ledger.received.copy()
        if self._cuda:
            torch.cuda.synchronize()
            self._zero = torch.cuda.Event(enable_timing=True)
            self._zero.record()
            self._zero.synchronize()
        self._own = OwnCalls().__enter__()
        self._begin = time.perf_counter()
        self._listener = self._ledger.witness = VerbListener(self._ledger, self._own)
        return self

    def __exit__(self, *error: Any) -> None:
        listener = self._listener
        assert listener is not None
        try:
            if self._cuda:
                torch.cuda.synchronize()  # what the device still does belongs to the step
            with suppress(ValueError) if error[0] is not None else nullcontext():
                self._row = self._read(listener)
        finally:
            self._own.__exit__()
            listener.deaf, self._listener = True, None
            if self._ledger.witness is listener:  # else a later witness listens through ours, which then only passes on
                self._ledger.witness = listener.inner
            for watched in self._watched:
                watched.let_go()
            self._watched.clear()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Name a piece of the program: `with clock.span("forward")`. Spans may lie in one another.

        ValueError if the clock does not run."""
        if self._listener is None:
            raise ValueError(f"span {name!r}: the clock does not run; use it in `with Clock(group) as clock:`")
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._cuda else []
        spans, t0 = self._spans, time.perf_counter()
        if events:
            events[0].record()
        try:
            yield
        finally:
            if events:
                events[1].record()
                self._events.append((name, events[0], events[1]))
            spans.append(ProgramSpan(name, t0, time.perf_counter()))

    def watch(self, module: nn.Module, name: str = "", depth: int = 1) -> None:
        """Record a span for every forward and backward of `module` and of the parts in it, until the clock is left.

        `depth` says how far down: 0 the module alone, 1 its children, too; the members of a ModuleList count as
        children. See `watched.py` for what begins and ends a backward. ValueError for a depth below 0."""
        if depth < 0:
            raise ValueError(f"depth is how many levels of modules to watch below the first, 0 or more; got {depth}")
        self._watched.append(WatchedModule(module, name, depth, self._passed))

    @property
    def recording(self) -> Recording:
        """The `Recording` of this rank alone; while the clock runs, up to now.

        ValueError if the clock was never entered, or the ledger was cleared under it."""
        row = self._row if self._listener is None else self._read(self._listener)
        if row is None:
            raise ValueError("this clock has recorded nothing: use it in `with Clock(group) as clock:`")
        return Recording((row,))

    @property
    def overlap(self) -> float:
        """Share of this rank's communication that is hidden behind its compute: see `overlap_share`."""
        return self.recording.overlap

    def to_perfetto(self, path: str | Path) -> Path:
        """Write this rank's trace (all ranks': `Recording.of(...).to_perfetto(path)`), and return its path."""
        return self.recording.to_perfetto(path)

    def _passed(self, span: ProgramSpan) -> bool:
        """Keep a watched module's span if it ran under this clock while the clock ran. Returns True if it did."""
        ours = self._listener is not None and self._own.here()
        if ours and span.t1 > span.t0:
            self._spans.append(span)
        return ours

    def _on_device(self, event: Any) -> float:
        """The time on this rank's clock at which the device reached an event. Events know only their distances."""
        return self._begin + self._zero.elapsed_time(event) / 1e3

    def _read(self, listener: VerbListener) -> RankTimeline:
        end, ledger, group = time.perf_counter(), self._ledger, self.group
        if ledger.transfers is not listener.transfers:
            raise ValueError("the ledger was cleared while the clock ran, and its transfers are lost: clear it before")
        heard = listener.taken()
        # of these messages some may never have been waited for: their ranks go into `unseen`
        came = {rank: n - self._received[rank] for rank, n in ledger.received.items()}
        backward = [span for watched in self._watched for span in watched.backward_spans()]
        device = [
            ProgramSpan(name, self._on_device(start), self._on_device(stop), "gpu")
            for name, start, stop in self._events
            if stop.query()
        ]
        sent = Counter(transfer.to for transfer in ledger.transfers[: listener.first] if transfer.to is not None)
        return RankTimeline(
            rank=0 if group is None else group.ranks[group.rank],
            begin=self._begin,
            end=end,
            spans=tuple(sorted((*self._spans, *backward, *device), key=lambda span: (span.t0, -span.t1))),
            entries=listener.read(end),
            transfers=tuple(ledger.transfers[listener.first :]),
            offset_s=self._offset[0],
            error_s=self._offset[1],
            reference=0 if group is None else group.ranks[0],
            earlier=tuple((r, sent[r], self._received[r]) for r in sorted({*sent, *self._received})),
            unseen=tuple(sorted(rank for rank, n in came.items() if n > heard[rank])),
            queued=group is not None and bool(getattr(group.wire, "queues", False)),
        )


def clock_offset(group: Group, rounds: int = 16) -> tuple[float, float]:
    """(seconds that this rank's clock is ahead of rank 0's, how far off that may be); every rank must call it.

    Rank 0 asks one rank after the other. It sends each its offset only at the end, so that all go on together."""
    ledger = Ledger(group.ledger.witness)  # one of its own: what the clock sends is no part of the program
    wire = group.wire
    quiet = Group(group.axis, group.ranks, group.rank, wire, group.algorithms, ledger, group.device, group.state)

    def stamped(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=group.device)

    if group.rank > 0:
        for _ in range(rounds):
            quiet.recv(0, TAG)
            quiet.send(stamped(time.perf_counter()), 0, TAG).wait()
        ahead, error = quiet.recv(0, TAG).tolist()
        return ahead, error
    offsets: list[tuple[float, float]] = []
    for peer in range(1, group.size):
        answers = []
        for _ in range(rounds):
            asked = time.perf_counter()
            asking = quiet.send(stamped(asked), peer, TAG)
            theirs = float(quiet.recv(peer, TAG))
            back = time.perf_counter()
            asking.wait()
            answers.append((back - asked, theirs - (asked + back) / 2))
        quickest, ahead = min(answers)
        offsets.append((ahead, quickest / 2))
    sendings = [quiet.send(stamped(*offset), peer, TAG) for peer, offset in enumerate(offsets, 1)]
    for sending in sendings:
        sending.wait()
    return 0.0, 0.0
