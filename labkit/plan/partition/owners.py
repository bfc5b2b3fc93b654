"""Who works on which whole matrix, where matrices lie in pieces on several ranks.

    a flat buffer of 4 matrices, 2 ranks     |  q  |  k  |  up          | out |
                                             |--- rank 0 ---|--- rank 1 ---|
    pieces                                     q, k, 1/3 of up   2/3 of up, out
    owners                                     q, k              up, out

Muon needs a matrix whole. Each has one owner, which is among the ranks that hold a piece of it: the others send it
theirs, it works, and sends each its part of the answer. What lies on one rank alone is not sent at all. Matrices are
given out from the one with the most work to the one with the least, each to the rank that has the least work so far
(the longest-processing-time rule: Graham 1969, "Bounds on multiprocessing timing anomalies").

    bytes that a rank sends     those of its pieces of matrices that others own, and those of the others' pieces of
                                matrices that it owns; fewer than 2 (n-1)/n of the matrices' bytes in a flat shard, on
                                average over the ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class ElementRun(NamedTuple):
    """`size` elements of a flattened matrix, from element `start`, lie on `rank`."""

    rank: int
    start: int
    size: int


class PlacedMatrix(NamedTuple):
    """A matrix of `numel` elements: the work of its owner, in flops or any other unit, and where its pieces lie."""

    numel: int
    work: int
    runs: tuple[ElementRun, ...]


def runs_of(sizes: Sequence[int], n: int) -> list[tuple[ElementRun, ...]]:
    """The pieces of matrices of these sizes, laid end to end in a flat buffer that is cut into n equal shards."""
    shard = -(-sum(sizes) // n)
    runs = []
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        first = end - size
        ranks = range(first // max(1, shard), min(n, -(-end // max(1, shard))))  # the only ones that may have a piece
        cuts = [(rank, max(first, rank * shard), min(end, (rank + 1) * shard)) for rank in ranks]
        runs.append(tuple(ElementRun(rank, low - first, high - low) for rank, low, high in cuts if low < high))
    return runs


def assign(held: Sequence[PlacedMatrix], n: int) -> tuple[int, ...]:
    """The owner of each matrix: a rank, of those that hold a piece of it. The same on every rank."""
    owners, load = [0] * len(held), [0] * n
    for k in sorted(range(len(held)), key=lambda k: (-held[k].work, k)):
        run = min(held[k].runs, key=lambda run: (load[run.rank], -run.size, run.rank))
        owners[k] = run.rank
        load[run.rank] += held[k].work
    return tuple(owners)


def sent(held: Sequence[PlacedMatrix], owners: Sequence[int], rank: int) -> int:
    """Elements that a rank sends in a step: to owners before their work, and of its own answers after it."""
    total = 0
    for matrix, owner in zip(held, owners, strict=True):
        own = sum(run.size for run in matrix.runs if run.rank == rank)
        total += matrix.numel - own if owner == rank else own
    return total
