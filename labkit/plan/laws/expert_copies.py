"""The law of copies of hot experts: rows of each rank before and after, what copies cost in bytes, and when they pay.

A router is not fair for long, and a layer waits for the rank whose experts have most rows. Moving an expert elsewhere
helps only if it is not itself the trouble. An expert with more rows than a rank's fair share is copied: c ranks hold
it, and each takes 1/c of its rows.

    rows of 4 experts            8 2 1 1         n = 2 ranks, the mean is 6 rows a rank

    rank 0 has e0 e1, rank 1 has e2 e3           loads 10 and 2       max / mean  1.67
    rank 1 also has e0                           loads  6 and 6                   1.00

`placed` gives out copies one by one: each time it tries every expert of the rank with the most rows on every rank that
lacks it, and takes what leaves the ranks most even. It stops where no copy makes the busiest rank less busy.

    held      F bytes of weights and F of gradients a copy; no optimizer state: one rank, the home, steps
    sent      a step: F from home to each copy (new weights), F from each copy home (its gradient)
              rows: as many as without copies, or fewer, for a copy may lie where rows begin
    waits     saved are (max before - max after) rows x flops of a row / rate, in each direction once or twice
    pays      if that is more than 2 F / S times the copies of the busiest sender, where nothing hides them

F grows with the width of an expert, and so do the flops of a row: the width cancels out. With 3 x 2 x 2 D F' flops of a
row forward and backward (two matrices of D F' weights, w bytes each) and copies of one expert a layer, it pays from

    rows saved  >=  2 (2 w D F') / S  x  rate / (12 D F')  =  w rate / (3 S)

whatever D and F' are: 6,667 rows in bf16 at 400 Tflop/s and 40 GB/s. So copies pay where batches are large or links
are fast. Serving, which sends no gradients and keeps a copy for many steps, needs far fewer.

Sources: copies of heavily loaded experts, packed on devices by their load, are DeepSeek's EPLB (described in NVIDIA's
TensorRT-LLM, examples/ep_load_balancer, README). The law is counted here. Held by labkit.parallel.expert_copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from labkit.plan.checks import is_whole


@dataclass(frozen=True)
class ExpertPlacement:
    """Which ranks hold which experts: `held[r]`, numbers in rising order; `homes[e]` is the rank that steps expert e.

    ValueError for an expert that is not at home, twice on a rank, or on a rank that there is not."""

    held: tuple[tuple[int, ...], ...]
    homes: tuple[int, ...]

    def __post_init__(self) -> None:
        for expert, home in enumerate(self.homes):
            if home not in range(len(self.held)) or expert not in self.held[home]:
                raise ValueError(f"expert {expert} is at home on rank {home}, which does not hold it: {self.held}")
        for rank, numbers in enumerate(self.held):
            if list(numbers) != sorted({*numbers} & {*range(len(self.homes))}):
                raise ValueError(
                    f"rank {rank} holds experts {numbers}: each once, in rising order, of {len(self.homes)} experts"
                )

    @classmethod
    def plain(cls, n_expert: int, n_ranks: int) -> ExpertPlacement:
        """The r-th n-th of the experts on rank r, and no copies. ValueError if n does not divide E."""
        if not is_whole(n_expert) or not is_whole(n_ranks) or n_expert % n_ranks:
            raise ValueError(f"{n_expert} experts have no {n_ranks} equal parts: take ep that divides them")
        own = n_expert // n_ranks
        held = tuple(tuple(range(rank * own, (rank + 1) * own)) for rank in range(n_ranks))
        return cls(held, tuple(expert // own for expert in range(n_expert)))

    def holders(self, expert: int) -> tuple[int, ...]:
        """The ranks that hold an expert, in rising order."""
        return tuple(rank for rank, numbers in enumerate(self.held) if expert in numbers)

    @property
    def copies(self) -> tuple[tuple[int, int], ...]:
        """(expert, rank) of each copy beside the one at home."""
        return tuple(
            (expert, rank) for expert, home in enumerate(self.homes) for rank in self.holders(expert) if rank != home
        )

    def with_copy(self, expert: int, rank: int) -> ExpertPlacement:
        """The same with one more copy. ValueError if the rank has it already."""
        if expert in self.held[rank]:
            raise ValueError(f"rank {rank} holds expert {expert} already: a copy goes to another rank")
        held = list(self.held)
        held[rank] = tuple(sorted((*held[rank], expert)))
        return replace(self, held=tuple(held))


def shares(rows: int, n_holders: int, first: int = 0) -> tuple[int, ...]:
    """Rows of an expert on each of its holders: as equal as can be, what is left over from holder `first` on."""
    even, left = divmod(rows, n_holders)
    return tuple(even + ((place - first) % n_holders < left) for place in range(n_holders))


def rank_rows(counts: Sequence[Sequence[int]], placement: ExpertPlacement) -> tuple[int, ...]:
    """Rows that each rank computes, of `counts` [n][E] of the rows of each rank for each expert."""
    total = [0] * len(placement.held)
    for source, row in enumerate(counts):
        for expert, rows in enumerate(row):
            holders = placement.holders(expert)
            for holder, share in zip(holders, shares(rows, len(holders), source), strict=True):
                total[holder] += share
    return tuple(total)


def imbalance(loads: Sequence[float]) -> float:
    """max / mean: the factor by which the busiest rank makes the experts' part longer; 1 for no rows at all."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def placed(load: Sequence[float], n_ranks: int, copies: int) -> ExpertPlacement:
    """A placement with at most so many copies, for `load` [E] rows of each expert.

    ValueError if n does not divide E, and for a number of copies below 0."""
    if not is_whole(copies, 0):
        raise ValueError(f"copies are a whole number, 0 or more, got {copies!r}")
    placement = ExpertPlacement.plain(len(load), n_ranks)
    loads = mean_loads(load, placement)
    for _ in range(copies):
        busiest = max(range(n_ranks), key=loads.__getitem__)
        tried = [
            placement.with_copy(expert, rank)
            for expert in placement.held[busiest]
            for rank in range(n_ranks)
            if expert not in placement.held[rank]
        ]
        # the busiest rank first; of equals what leaves the others most even
        best = min(tried, key=lambda one: sorted(mean_loads(load, one), reverse=True), default=placement)
        after = mean_loads(load, best)
        if max(after) >= max(loads):
            break
        placement, loads = best, after
    return placement


def mean_loads(load: Sequence[float], placement: ExpertPlacement) -> list[float]:
    """Rows of each rank if each holder of an expert takes an equal share of its rows."""
    total = [0.0] * len(placement.held)
    for expert, rows in enumerate(load):
        holders = placement.holders(expert)
        for rank in holders:
            total[rank] += rows / len(holders)
    return total


def copied_bytes(placement: ExpertPlacement, expert_bytes: int, rank: int) -> tuple[int, int]:
    """Bytes that `rank` sends in a step: new weights of its experts to their copies, and gradients of its copies."""
    weights = sum(placement.homes[expert] == rank for expert, _ in placement.copies)
    gradients = sum(holder == rank for _, holder in placement.copies)
    return weights * expert_bytes, gradients * expert_bytes


def pays_from_rows(word: int, flops_per_s: float, bytes_per_s: float, steps: int = 1, gradients: bool = True) -> float:
    """Rows by which the busiest rank must have fewer, for one copy a layer to pay: w rate / (3 S) in training.

    `steps`: so many steps share one sending of weights (1 in training); without `gradients`, as in serving, only
    forward is computed and only weights are sent."""
    per_row = 12 if gradients else 4  # flops for each weight pair: 2 matrices, 2 flops, and twice that backward
    sent = 2 * word * (1 / steps + gradients)
    return sent / bytes_per_s * flops_per_s / per_row
