"""A run record: what the judge saw of one run of an attempt. Only `memory` and `outputs` in it come from a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.judge.case import Case

ASIDE = "aside"


class Event(NamedTuple):
    """A message, a collective, or a mark that the exercise itself set (`mark` below), as it reached the judge.

    number, at    place among all events of the run; seconds since it began
    rank          who did it
    kind, what    "message" ("send"), "collective" (its verb), "arrival" ("recv": a message was handed over), "mark"
    to            the receiver, or for an arrival the sender; None for a collective
    n_bytes       payload of a message; for a collective what a ring would have this rank send
    axis          of the group; ASIDE: `play` did it, and not the attempt
    line          the line of the attempt that did it, 0 if none did, or it was called by torch
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
        """In a few words."""
        if self.kind == "message":
            return f"a message of {self.n_bytes:,} bytes to rank {self.to}"
        if self.kind == "arrival":
            return f"a message from rank {self.to}"
        return self.what


class Memory(NamedTuple):
    """Bytes of tensors that a rank made and held, by kind, and of Python objects besides.

    peak, now        by kind, at the highest moment and at the end
    timeline         (seconds, bytes) of all kinds together
    python_bytes     the most that objects other than tensors took
    scalars          how many numbers were taken out of tensors, one by one
    """

    peak: Mapping[str, int]
    now: Mapping[str, int]
    timeline: Sequence[tuple[float, int]]
    python_bytes: int
    scalars: int = 0

    @property
    def peak_bytes(self) -> int:
        """Of all kinds together."""
        return sum(self.peak.values())


class Fault(NamedTuple):
    """An exception, as text; `line` is the last one of the attempt that it went through."""

    kind: str
    message: str
    line: int
    refused: bool = False

    @property
    def words(self) -> str:
        """In one line."""
        where = f" in line {self.line} of the attempt" if self.line else ""
        return f"{self.kind}: {self.message}{where}"


class Wait(NamedTuple):
    """What a rank was waiting for, or doing, when the run was ended."""

    words: str
    line: int


@dataclass(frozen=True)
class RunRecord:
    """One run. `ended` is "finished", "raised", "deadlock" or "time-out"."""

    case: Case
    events: tuple[Event, ...] = ()
    outputs: tuple[Any, ...] = ()
    expected: tuple[Any, ...] = ()
    memory: tuple[Memory | None, ...] = ()
    faults: Mapping[int, Fault] = field(default_factory=dict)
    ended: str = "finished"
    waits: Mapping[int, Wait] = field(default_factory=dict)
    undelivered: Mapping[tuple[int, int], int] = field(default_factory=dict)
    mismatch: str = ""
    damaged: Mapping[int, str] = field(default_factory=dict)
    printed: tuple[str, ...] = ()
    input_bytes: tuple[int, ...] = ()
    seconds: float = 0.0

    @property
    def answer_bytes(self) -> tuple[int, ...]:
        """Bytes of what each rank should give."""
        return tuple(n_bytes(each) for each in self.expected)

    def of(self, rank: int) -> list[Event]:
        """What a rank did, in order."""
        return [each for each in self.events if each.rank == rank]

    def sent(self, rank: int) -> list[Event]:
        """The messages and collectives of the attempt on this rank; aside, too, if a line of it is at work."""
        mine = (each for each in self.of(rank) if each.axis != ASIDE or each.line)
        return [each for each in mine if each.kind in ("message", "collective")]

    def sent_bytes(self, rank: int) -> int:
        """Bytes that it sent."""
        return sum(each.n_bytes for each in self.sent(rank))

    def marks(self, rank: int) -> list[Event]:
        """The marks that the exercise set on it."""
        return [each for each in self.of(rank) if each.kind == "mark"]


def mark(group: Any, words: str) -> None:
    """Set a mark: `play` says where an attempt has got to. Costs a message to the judge, none to the ledger."""
    group.wire.mark(words)


def aside(group: Group) -> Group:
    """The same ranks over a wire of the exercise's own: what `play` sends there is none of the attempt's doing.
    Take it once a run: collectives are matched by their count."""
    wire: Any = group.wire  # the judge's, which can make groups over the same pipe
    ours: Group = wire.along(group, ASIDE, group.ranks, group.rank)
    return ours


def weigh(group: Any) -> None:
    """Look at what this rank holds now, for laws about what is left (`holds`); without it the end of `play` counts."""
    group.wire.weigh()


def n_bytes(thing: Any) -> int:
    """Bytes of all tensors in nested lists, tuples and dicts."""
    return sum(each.numel() * each.element_size() for each in tensors(thing))


def tensors(thing: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts, and parameters of modules."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, torch.nn.Module):
        return [each.detach() for each in thing.parameters()]
    if isinstance(thing, Mapping):
        return [each for value in thing.values() for each in tensors(value)]
    if isinstance(thing, list | tuple):
        return [each for value in thing for each in tensors(value)]
    return []
