"""Load: how many rows each rank has for each expert, where no router is asked: in a rehearsal and in the laws.

A router decides by values, and neither a rehearsal nor a law has any. So the load is given, as counts [n][E] of the
rows that each of n ranks has for each of E experts in one forward of one layer, after those without room are dropped:

    balanced     the kT routed rows of a sequence are dealt out to experts in turn, and the next sequence, or the next
                 rank, goes on where the last one stopped. So no expert has more than one row more than another

                 n = 2 ranks, 1 sequence of T = 3 tokens each, k = 2, E = 4         rank 0    2 2 1 1
                                                                                    rank 1    1 1 2 2
    counts       what somebody has seen or fears, the same in every layer and every micro-batch

With a capacity c an expert takes ceil(c k T / E) rows of each sequence (labkit.train.moe): c of 1 or more drops nothing
of a balanced load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Table = tuple[tuple[int, ...], ...]
"""Rows by rank, and in each by expert."""


@dataclass(frozen=True)
class Load:
    """A balanced load of `n_expert` experts, of which a token meets `top_k`, or the one that `counts` say."""

    n_expert: int
    top_k: int
    capacity: float | None = None
    counts: Table | None = None

    @classmethod
    def of(cls, sizes: Any, counts: Sequence[Sequence[int]] | None = None) -> Load:
        """The load of a model with these sizes (a ModelShape or a GPTConfig)."""
        table = None if counts is None else tuple(tuple(row) for row in counts)
        return cls(sizes.n_expert, sizes.top_k, sizes.capacity, table)

    def table(self, sequences: int, length: int, n_ranks: int) -> Table:
        """Rows of each of `n_ranks` for each expert in a forward of `sequences` of `length` tokens on each rank.

        ValueError for counts of another size, and for more or, without a capacity, other rows than tokens have."""
        if self.counts is None:
            return balanced(self, sequences, length, n_ranks)
        rows = self.top_k * sequences * length
        if [len(row) for row in self.counts] != [self.n_expert] * n_ranks:
            raise ValueError(
                f"counts are rows of each of {n_ranks} ranks of ep for each of {self.n_expert} experts, "
                f"[{n_ranks}][{self.n_expert}]; got {[len(row) for row in self.counts]} numbers"
            )
        for rank, row in enumerate(self.counts):
            if min(row) < 0 or sum(row) > rows or (self.capacity is None and sum(row) < rows):
                most = "" if self.capacity is None else "at most "
                raise ValueError(
                    f"{sequences} rows of {length} tokens that meet top_k={self.top_k} experts each are "
                    f"{most}{rows} rows for experts, got counts of {sum(row)} for rank {rank} of ep: counts are those "
                    "of one micro-batch in one layer, and micro-batches must be of one size"
                )
        return self.counts


def room(capacity: float | None, n_rows: int, n_expert: int) -> int:
    """Rows that an expert takes of a sequence's `n_rows` routed ones; without a capacity all."""
    return n_rows if capacity is None else math.ceil(capacity * n_rows / n_expert)


@lru_cache(maxsize=1024)
def balanced(load: Load, sequences: int, length: int, n_ranks: int) -> Table:
    """Rows of each rank for each expert, dealt out in turn."""
    rows, n = load.top_k * length, load.n_expert
    even, left_over = divmod(rows, n)
    most = room(load.capacity, rows, n)
    table = []
    for rank in range(n_ranks):
        counts = [min(even, most) * sequences] * n
        if even < most:  # there is room for what is left over
            left = range(rank * sequences * left_over, (rank + 1) * sequences * left_over)
            for k in range(n):  # those of `left` that fall on expert k
                counts[k] += len(range(left.start + (k - left.start) % n, left.stop, n))
        table.append(tuple(counts))
    return tuple(table)
