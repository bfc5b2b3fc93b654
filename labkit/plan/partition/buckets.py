"""Gradients that travel together: the rule by which parameters fall into buckets, and what is alive at a moment.

    parameters     embedding | block 0        | block 1        | head
    expected         last                                        first
    buckets        |     bucket 2     |     bucket 1     | bucket 0 |        bucket 0 is full at 1 MiB

labkit.parallel.bucket puts real gradients where this rule says (Li et al., arXiv:2006.15704, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from labkit.plan.model.tape import Bytes, plus
from labkit.plan.partition.groups import Grouping, ParamGroup

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that the wire is not idle while the first large one fills."""


ONE_GROUP = Grouping()


class Params(NamedTuple):
    """Parameters of one layer of a stage, in the order in which the module names them: (name, elements)."""

    layer: int
    sizes: tuple[tuple[str, int], ...]

    @property
    def numel(self) -> int:
        """Elements of all."""
        return sum(size for _, size in self.sizes)


class Live:
    """Bytes that are alive, by kind, and the highest moment so far. `see` adds what a layer's own tape counts."""

    def __init__(self, base: Bytes) -> None:
        self.now = list(base)
        self.top, self.highest, self.when = base, sum(base), "between steps"

    def add(self, kind: int, n_bytes: int) -> None:
        """Bytes are allocated, or freed if `n_bytes` is below 0."""
        self.now[kind] += n_bytes

    def see(self, extra: Bytes, when: str) -> None:
        """Note a moment in which `extra` is alive besides; it is kept if it is the highest so far."""
        a, b, c, d, e = self.now
        total = a + b + c + d + e + sum(extra)
        if total > self.highest:
            self.highest, self.top, self.when = total, plus((a, b, c, d, e), extra), when


class Bucket:
    """Gradients that travel together. `grads`: bytes of those that have arrived; `packed`: the kind of memory that the
    answer will be while the bucket is on its way, otherwise None. `parts`: elements of each of its flat buffers, one
    for each parameter group, padded so that n divides them."""

    def __init__(self, members: Sequence[tuple[int, str, int]], n: int, grouping: Grouping) -> None:
        """Members are (layer, name, elements)."""
        self.members = frozenset((layer, name) for layer, name, _ in members)
        self.runs: dict[ParamGroup, list[tuple[int, str, int]]] = {}
        for member in members:
            self.runs.setdefault(grouping.of_weight(member[1]), []).append(member)
        sizes = {group: sum(size for *_, size in run) for group, run in self.runs.items()}
        self.parts = {group: numel + -numel % n for group, numel in sizes.items()}
        self.numel = sum(self.parts.values())
        self.arrivals: set[tuple[int, str]] = set()
        self.missing, self.grads = len(self.members), 0
        self.packed: int | None = None


def fill(sizes: Sequence[tuple[Hashable, int]], bucket_bytes: int) -> list[list[int]]:
    """Parameters (kind, bytes) from last to first in buckets of one kind. Returns the places of each bucket's members;
    the buckets are sorted by when their last member is expected.

    A bucket holds `bucket_bytes` at most, unless one parameter is larger; the first of each kind is full at 1 MiB."""
    filling: dict[Hashable, tuple[int, list[int]]] = {}  # kind -> bytes, members
    full: list[list[int]] = []
    first = {kind for kind, _ in sizes}
    for place in reversed(range(len(sizes))):
        kind, n_bytes = sizes[place]
        held, members = filling.pop(kind, (0, []))
        if members and held + n_bytes > bucket_bytes:
            full.append(members)
            first.discard(kind)
            held, members = 0, []
        members.append(place)
        if kind in first and held + n_bytes >= FIRST_BUCKET_BYTES:
            full.append(members)
            first.discard(kind)
        else:
            filling[kind] = (held + n_bytes, members)
    rest = [members for _, members in filling.values()]
    return sorted([*full, *rest], key=lambda members: -members[-1])


def in_buckets(
    layers: Sequence[Params], n: int, width: int, bucket_bytes: int, grouping: Grouping = ONE_GROUP
) -> list[Bucket]:
    """The buckets of parameters of `width` bytes an element, each of one parameter group, padded to a multiple of n
    elements."""
    named = [(layer.layer, name, size) for layer in layers for name, size in layer.sizes]
    groups = fill([(grouping.of_weight(name), size * width) for _, name, size in named], bucket_bytes)
    return [Bucket([named[k] for k in members], n, grouping) for members in groups]
