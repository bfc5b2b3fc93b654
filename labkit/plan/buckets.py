"""Gradients that travel together: how parameters fall into buckets, and what is alive at a moment.

    parameters     embedding | block 0        | block 1        | head
    expected         last                                        first
    buckets        |     bucket 2     |     bucket 1     | bucket 0 |        bucket 0 is full at 1 MiB

The same rule as labkit.parallel.bucket, on sizes alone (Li et al., arXiv:2006.15704, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from labkit.plan.tape import Bytes, plus

FIRST_BUCKET_BYTES = 2**20


class Params(NamedTuple):
    """Parameters of one layer of a stage, in the order in which the module names them: (name, elements)."""

    layer: int
    sizes: tuple[tuple[str, int], ...]

    @property
    def numel(self) -> int:
        """Elements of all."""
        return sum(size for _, size in self.sizes)


class Live:
    """What is alive, by kind, and the highest moment; everything that a layer's tape says comes on top."""

    def __init__(self, base: Bytes) -> None:
        self.now = list(base)
        self.top, self.highest, self.when = base, sum(base), "between steps"

    def add(self, kind: int, n_bytes: int) -> None:
        """Bytes are born (or die, below 0)."""
        self.now[kind] += n_bytes

    def see(self, more: Bytes, when: str) -> None:
        """A moment: what is alive, and `more`."""
        a, b, c, d, e = self.now
        total = a + b + c + d + e + sum(more)
        if total > self.highest:
            self.highest, self.top, self.when = total, plus((a, b, c, d, e), more), when


class Bucket:
    """Gradients that travel together. `grads`: bytes of those that are here; `packed`: on their way, and the kind of
    memory that the answer will be."""

    def __init__(self, members: Sequence[tuple[int, str]], numel: int, n: int) -> None:
        self.members, self.numel = frozenset(members), numel + -numel % n
        self.here: set[tuple[int, str]] = set()
        self.missing, self.grads = len(self.members), 0
        self.packed: int | None = None


def in_buckets(layers: Sequence[Params], n: int, width: int, bucket_bytes: int) -> list[Bucket]:
    """Parameters from last to first; a bucket holds `bucket_bytes` at most, unless one parameter is larger."""
    found: list[Bucket] = []
    members: list[tuple[int, str]] = []
    held, first = 0, True
    for layer in reversed(layers):
        for name, size in reversed(layer.sizes):
            if members and (held + size) * width > bucket_bytes:
                found.append(Bucket(members, held, n))
                members, held, first = [], 0, False
            members, held = [*members, (layer.layer, name)], held + size
            if first and held * width >= FIRST_BUCKET_BYTES:
                found.append(Bucket(members, held, n))
                members, held, first = [], 0, False
    return [*found, Bucket(members, held, n)] if members else found
