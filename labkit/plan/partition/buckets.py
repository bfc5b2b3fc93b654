"""Gradients that travel together: the rule by which parameters fall into buckets.

    parameters     embedding | block 0        | block 1        | head
    expected         last                                        first
    buckets        |     bucket 2     |     bucket 1     | bucket 0 |        bucket 0 is full at 1 MiB

labkit.parallel.bucket puts real gradients where this rule says (Li et al., arXiv:2006.15704, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that the wire is not idle while the first large one fills."""


class Params(NamedTuple):
    """Parameters of one layer of a stage, in the order in which the module names them: (name, elements)."""

    layer: int
    sizes: tuple[tuple[str, int], ...]

    @property
    def numel(self) -> int:
        """Elements of all."""
        return sum(size for _, size in self.sizes)


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
