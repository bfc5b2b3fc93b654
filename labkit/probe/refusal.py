"""What a cap of memory says when there is no room: what was wanted, what is held, and who holds the most of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from labkit.plan.breakdown import KINDS, Breakdown
from labkit.probe.history import Held


class Holder(NamedTuple):
    """Somebody who holds memory: what it is, who made it where, how many bytes it keeps."""

    kind: str
    n_bytes: int
    name: str
    op: str
    phase: str
    module: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        made = "made from data" if self.op == "lift_fresh" else f"made by {self.op}" if self.op else ""
        place = f"in {self.phase} of {self.module}" if self.module else f"in {self.phase}" if self.phase else ""
        looks = f"{self.dtype} {list(self.shape)}"
        return " ".join(f"{self.n_bytes:,} B of {self.kind}: {self.name} {looks} {made} {place}".split())


class VirtualOutOfMemory(torch.OutOfMemoryError):
    """What would not have fitted under `cap_bytes`; the program's memory is untouched and it can go on. Code that
    catches torch's error of a GPU catches this one too.

    wanted  the Holder that was refused    held  Breakdown of what was alive    largest  who held the most of it"""

    wanted: Holder
    held: Breakdown
    largest: tuple[Holder, ...]
    cap_bytes: int


def holder(held: Held) -> Holder:
    """A storage for people."""
    looks = (tuple(held.shape), str(held.dtype).removeprefix("torch."))
    return Holder(KINDS[held.kind], held.n_bytes, held.name, held.op, *held.where, *looks)


def refusal(wanted: Held, held: Breakdown, largest: Sequence[Holder], cap_bytes: int) -> VirtualOutOfMemory:
    """The error for `wanted`, which does not fit under `cap_bytes` beside what is held."""
    room = cap_bytes - int(held.total)
    free = f"{room:,} are free" if room >= 0 else f"{-room:,} more are held already"
    lines = [
        f"out of memory under a cap of {cap_bytes:,} bytes: {free}",
        f"wanted   {holder(wanted)}",
        "held     " + ", ".join(f"{name} {held[name]:,}" for name in held) + f": {held.total:,} B",
        *(f"largest  {each}" for each in largest),
    ]
    error = VirtualOutOfMemory("\n".join(lines))
    error.wanted, error.held, error.largest, error.cap_bytes = holder(wanted), held, tuple(largest), cap_bytes
    return error
