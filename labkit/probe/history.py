"""What the live bytes were at every moment, by kind, in the light of what became of each storage.

    log      t    storage   change   where                a storage's kind is looked up when the log is read,
             0.1  #1        +4096    forward of mlp.up    not when it is written
             0.2  #2        +4096    backward of mlp.up
             0.3  #1        -4096

That is the whole trick: when backward makes a tensor nobody can know that it will be a weight's gradient; a moment
later it is one, and then it has been one from its birth. Sums over the log are exact and kinds are final.

A log of many steps would itself fill the memory. Its older part is therefore folded from time to time: the sums, the
peak and each module's peak are kept as they are, of the moments in between every other one is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any, NamedTuple

import torch

from labkit.plan.breakdown import KINDS, Breakdown

FOLD_AFTER = 1 << 15
KEPT_MOMENTS = 1 << 12

Where = tuple[str, str]
"""(phase, module): ("forward", "blocks.0.mlp")."""


class Held:
    """One storage that is alive: its true size, its kind (an index into KINDS), and who made it where.

    `rank` says how sure the kind is: 0 guessed at birth, higher for what it was found to be (see MemoryProbe)."""

    __slots__ = ("device", "dtype", "folded", "kind", "n_bytes", "name", "op", "rank", "ref", "shape", "where")

    def __init__(self, tensor: torch.Tensor, n_bytes: int, kind: int, rank: int, op: str, where: Where, name: str):
        """Remember the tensor's looks, never the tensor."""
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.n_bytes, self.kind, self.rank, self.op, self.where, self.name = n_bytes, kind, rank, op, where, name
        self.folded = 0
        self.ref: Any = None

    def settled(self, storage: torch.UntypedStorage, kind: int, rank: int) -> bool:
        """Is this the storage's, and does it have a name and this kind, or one that is surer?"""
        alive = self.ref is not None and self.ref() is storage
        return alive and self.name != "" and (self.rank > rank or (self.rank == rank and self.kind == kind))


class Moment(NamedTuple):
    """The live bytes at one moment: `t` seconds since the probe was made, `bytes` in the order of KINDS.

    `phase` and `module` say where the storage was made that made the difference, "" when one died."""

    t: float
    phase: str
    module: str
    bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.bytes)


Event = tuple[float, Held, int, Where | None]


class History:
    """The log, its running total, and what can be read from it."""

    def __init__(self) -> None:
        """An empty one."""
        self.log: list[Event] = []
        self.total = 0
        self._past = _Replay()

    def add(self, t: float, held: Held, change: int, where: Where | None) -> None:
        """Write down that a storage was born, died or changed its size."""
        self.total += change
        self.log.append((t, held, change, where))
        if len(self.log) >= FOLD_AFTER:
            self.fold()

    def fold(self) -> None:
        """Settle all that has been written so far; kinds that change later change only what follows."""
        self._past.play(self.log)
        for _, held, change, _ in self.log:
            held.folded += change
        self._past.thin()
        self.log = []

    def rename(self, held: Held, kind: int) -> None:
        """A storage turns out to be of this kind, from the beginning."""
        self._past.bytes[held.kind] -= held.folded
        self._past.bytes[kind] += held.folded
        held.kind = kind

    def reset_peak(self) -> None:
        """From now on peaks are those of what follows."""
        self.fold()
        self._past.peak = tuple(self._past.bytes)
        self._past.modules = {}

    def read(self) -> _Replay:
        """All that has happened, with the kinds as they are known now."""
        replay = copy(self._past)
        replay.bytes, replay.modules, replay.moments = [*replay.bytes], {**replay.modules}, [*replay.moments]
        replay.play(self.log)
        return replay


class _Replay:
    """The log, played back: bytes by kind, their highest total, the same for each module, and all moments."""

    def __init__(self) -> None:
        self.bytes = [0] * len(KINDS)
        self.peak: tuple[int, ...] = tuple(self.bytes)
        self.modules: dict[Where, tuple[int, ...]] = {}
        self.moments: list[Moment] = []

    def play(self, log: Iterable[Event]) -> None:
        total, highest = sum(self.bytes), sum(self.peak)
        tops = {place: sum(each) for place, each in self.modules.items()}
        for t, held, change, where in log:
            self.bytes[held.kind] += change
            total += change
            now = tuple(self.bytes)
            phase, module = where or ("", "")
            self.moments.append(Moment(t, phase, module, now))
            if total > highest:
                highest, self.peak = total, now
            for place in _places(phase, module):
                if total > tops.get(place, 0):
                    tops[place] = total
                    self.modules[place] = now

    def thin(self) -> None:
        while len(self.moments) > KEPT_MOMENTS:  # of two neighbours the higher stays: hills keep their tops
            pairs = zip(self.moments[::2], self.moments[1::2], strict=False)
            self.moments = [max(pair, key=lambda moment: moment.total) for pair in pairs]


def _places(phase: str, module: str) -> Iterator[Where]:
    """The place itself, the modules around it, and the whole phase; nothing outside of all phases."""
    while phase and module:
        yield phase, module
        module = module.rpartition(".")[0]
    if phase:
        yield phase, ""


def breakdown(by_kind: Iterable[int]) -> Breakdown:
    """Bytes in the order of KINDS as a Breakdown."""
    return Breakdown.of(dict(zip(KINDS, by_kind, strict=True)), "B")
