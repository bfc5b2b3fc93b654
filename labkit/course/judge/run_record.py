"""A run record: what the judge saw of one run of an attempt. Only `memory` and `outputs` in it come from a rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.comm.group import Group, Work
from labkit.course.judge.case import Case
from labkit.course.judge.judge_wire import ASIDE

IN_VAIN = "stands still until another rank begins: rank "
"""The mark of a rank that is late, about one that waits for it (`begin_late`)."""
TAKEN = "took a message of rank "
"""The mark of a rank that has received a message (`marking_receives`)."""


class Event(NamedTuple):
    """A message, a collective, or a mark that the exercise itself set (`mark` below), as it reached the judge.

    number, at    place among all events of the run; seconds since it began
    rank          the rank that did it
    kind, what    "message" ("send"), "collective" (its verb), "arrival" ("recv": a message was handed over), "mark"
    to            the receiver, or for an arrival the sender; None for a collective
    n_bytes       payload of a message; for a collective what this rank would send in a ring
    axis          of the group; ASIDE if `play` did it, and not the attempt
    line          the line of the attempt that did it; 0 if none did, or torch called it
    """

    number: int
    at: float
    rank: int
    kind: str
    what: str
    to: int | None = None
    n_bytes: int = 0
    axis: str = "world"
    tag: int = 0
    line: int = 0

    @property
    def words(self) -> str:
        """The event in a few words."""
        if self.kind == "message":
            return f"a message of {self.n_bytes:,} bytes to rank {self.to}"
        if self.kind == "arrival":
            return f"a message from rank {self.to}"
        return self.what


class Memory(NamedTuple):
    """Bytes of tensors that a rank created and held, by kind, and of other Python objects.

    peak, now        by kind, at the highest moment and at the end
    timeline         (seconds, bytes) of all kinds together
    python_bytes     the most that objects other than tensors took
    scalars          how many numbers were taken out of tensors, one by one
    pages            from outside (page_memory.py): pages that the process had more than at its start, at most
    weighed_pages    the same when the exercise weighed; None where there is no /proc
    """

    peak: Mapping[str, int]
    now: Mapping[str, int]
    timeline: Sequence[tuple[float, int]]
    python_bytes: int
    scalars: int = 0
    pages: int | None = None
    weighed_pages: int | None = None

    @property
    def peak_bytes(self) -> int:
        """The peak of all kinds together."""
        return sum(self.peak.values())


class Fault(NamedTuple):
    """An exception as text; `line` is the last line of the attempt that it went through."""

    kind: str
    message: str
    line: int
    refused: bool = False

    @property
    def words(self) -> str:
        """The exception in one line."""
        where = f" in line {self.line} of the attempt" if self.line else ""
        return f"{self.kind}: {self.message}{where}"


class Wait(NamedTuple):
    """The state of one rank when the run was ended: the call that it waited in, or the line that it executed; or an
    operation that it never waited for, and the line that started it."""

    words: str
    line: int


class Race(NamedTuple):
    """A tensor that a rank changed while it was on its way: what was to happen with it, and the line that changed it
    (or the line at which it was noticed)."""

    rank: int
    words: str
    line: int


@dataclass(frozen=True)
class RunRecord:
    """All that the judge saw of one run. `ended` is "finished", "raised", "deadlock", "time-out" or "flood"."""

    case: Case
    events: tuple[Event, ...] = ()
    outputs: tuple[Any, ...] = ()
    expected: tuple[Any, ...] = ()
    memory: tuple[Memory | None, ...] = ()
    faults: Mapping[int, Fault] = field(default_factory=dict)
    ended: str = "finished"
    waits: Mapping[int, Wait] = field(default_factory=dict)
    undelivered: Mapping[tuple[int, int], int] = field(default_factory=dict)
    unanswered: Mapping[tuple[int, int], int] = field(default_factory=dict)
    unwaited: Mapping[int, Sequence[Wait]] = field(default_factory=dict)
    races: tuple[Race, ...] = ()
    flood: str = ""
    mismatch: str = ""
    damaged: Mapping[int, str] = field(default_factory=dict)
    printed: tuple[str, ...] = ()
    input_bytes: tuple[int, ...] = ()
    seconds: float = 0.0

    @property
    def answer_bytes(self) -> tuple[int, ...]:
        """For each rank, the bytes of the right answer."""
        return tuple(n_bytes(answer) for answer in self.expected)

    def of(self, rank: int) -> list[Event]:
        """The events of one rank, in order."""
        return [event for event in self.events if event.rank == rank]

    def sent(self, rank: int) -> list[Event]:
        """The messages and collectives of the attempt on this rank; those on an ASIDE group only if it called them."""
        events = (event for event in self.of(rank) if event.axis != ASIDE or event.line)
        return [event for event in events if event.kind in ("message", "collective")]

    def sent_bytes(self, rank: int) -> int:
        """Bytes that this rank sent."""
        return sum(event.n_bytes for event in self.sent(rank))

    def marks(self, rank: int) -> list[Event]:
        """The marks that the exercise set on this rank."""
        return [event for event in self.of(rank) if event.kind == "mark"]


def mark(group: Any, words: str) -> None:
    """Set a mark: `play` says how far an attempt has got. It costs a message to the judge, and none in the ledger."""
    group.wire.mark(words)


def marking_receives(group: Group) -> Group:
    """The group, with a mark in the record for each message that this rank receives over it."""

    def tap(event: str, peer: int, tag: int, tensor: Tensor) -> None:
        if event == "recv":
            mark(group, f"{TAKEN}{group.ranks.index(peer)}")  # a tap tells global ranks

    return group.tapped(tap)


def aside(group: Group) -> Group:
    """A group of the same ranks for the exercise itself: what `play` sends over it does not count for the attempt.
    Create it once per run, since collectives are matched by their count."""
    wire: Any = group.wire  # the judge's, which can make groups over the same pipe
    group_aside: Group = wire.along(group, ASIDE, group.ranks, group.rank)
    return group_aside


def alone(group: Group) -> Group:
    """A group of this rank only, for exercises about regions that lie over different groups."""
    wire: Any = group.wire
    group_alone: Group = wire.along(group, "alone", group.ranks[group.rank : group.rank + 1], 0)
    return group_alone


def others_wait(group: Any) -> bool:
    """True if every other rank waits, or has ended: then nothing can happen before this rank does something."""
    return bool(group.wire.others_wait())


def begin_late(group: Group, ours: Group) -> list[Work]:
    """Return, on a rank that is to be late, when each other rank has sent it a message over `ours`, an `aside`: what it
    could do without this rank is then done. Those that have sent none when all of them wait stand still; this rank
    marks each (`stands_still` in laws.py finds the marks). Wait for the receives that it returns when all is over."""
    signals = {peer: ours.recv_start(peer) for peer in range(group.size) if peer != group.rank}
    while not all(work.done for work in signals.values()) and not others_wait(group):
        time.sleep(0.002)
    for peer, work in signals.items():
        if not work.done:
            mark(group, f"{IN_VAIN}{peer}")
    return list(signals.values())


def weigh(group: Any) -> None:
    """Measure what this rank holds now, for laws about what is left (`holds`); by default the end of `play` counts."""
    group.wire.weigh()


def n_bytes(thing: Any) -> int:
    """Bytes of all tensors in nested lists, tuples and dicts."""
    return sum(tensor.nbytes for tensor in tensors(thing))


def tensors(thing: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts, and parameters of modules."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, torch.nn.Module):
        return [parameter.detach() for parameter in thing.parameters()]
    if isinstance(thing, Mapping):
        return [tensor for value in thing.values() for tensor in tensors(value)]
    if isinstance(thing, list | tuple):
        return [tensor for value in thing for tensor in tensors(value)]
    return []
