"""A real router whose experts are not equally liked, and what it chooses: the data of the router explorer.

`choose` asks `labkit.train.moe` itself, route and capacity; only the router's weights and the tokens are made up here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from labkit.plan.laws.experts import expert_traffic
from labkit.train.config import GPTConfig
from labkit.train.moe import MoE

FEATURES, SEQ = 16, 64
"""Numbers by which the router tells tokens apart, and tokens of a sequence, by which a capacity is counted."""


class Routing(NamedTuple):
    """Rows of a layer, counted: `wanted` [rank][expert] as the router chose, `kept` those that found room.

    top_k, capacity   of the layer that chose; room is what one expert takes of all ranks together, None: all"""

    wanted: tuple[tuple[int, ...], ...]
    kept: tuple[tuple[int, ...], ...]
    top_k: int
    capacity: float | None = None
    room: int | None = None

    @property
    def n_ranks(self) -> int:
        """Ranks among whom the experts are dealt out."""
        return len(self.kept)

    @property
    def by_expert(self) -> list[int]:
        """Rows that each expert computes, from all ranks."""
        return [sum(rows) for rows in zip(*self.kept, strict=True)]

    @property
    def by_rank(self) -> list[int]:
        """Rows that each rank computes: those of its experts."""
        per_rank = len(self.kept[0]) // self.n_ranks
        loads = self.by_expert
        return [sum(loads[rank * per_rank : (rank + 1) * per_rank]) for rank in range(self.n_ranks)]

    @property
    def dropped(self) -> int:
        """Rows that found no room."""
        return sum(map(sum, self.wanted)) - sum(map(sum, self.kept))

    @property
    def imbalance(self) -> float:
        """Rows of the busiest rank over the mean: the factor on the time of the experts. 1 if there are no rows."""
        rows = self.by_rank
        return max(rows) * len(rows) / sum(rows) if any(rows) else 1.0

    def sent(self, row_bytes: int) -> list[int]:
        """Bytes that each rank sends for this layer, forward and backward: 2(out + in) rows, and the counts."""
        n, count_bytes = self.n_ranks, 8 * len(self.kept[0]) * (self.n_ranks - 1) // self.n_ranks
        return [2 * (out + come) * row_bytes + count_bytes for out, come in expert_traffic(self.kept, n)]


def choose(
    skew: float, n_expert: int = 16, top_k: int = 2, capacity: float | None = None, n_ranks: int = 4,
    n_tokens: int = 256, seed: int = 0,
) -> Routing:  # fmt: skip
    """The choice of a real router for random tokens, `n_tokens` of each rank, with experts that are not equally liked.

    ValueError for experts that cannot be dealt out, and for more experts a token than there are."""
    if n_expert % n_ranks:
        raise ValueError(f"{n_expert} experts have no {n_ranks} equal parts: take a divisor of {n_expert}")
    layer, wanted, kept = unfair_layer(skew, n_expert, top_k, capacity, seed), [], []
    x = tokens(n_ranks, -(-n_tokens // SEQ), SEQ, seed)
    for rank_tokens in x:
        chosen, _, _ = layer.route(rank_tokens)
        stays = layer.kept(chosen)
        wanted.append(tuple(torch.bincount(chosen.flatten(), minlength=n_expert).tolist()))
        kept.append(tuple(torch.bincount(chosen[stays], minlength=n_expert).tolist()))
    sequences = n_ranks * x.shape[1]
    room = None if capacity is None else sequences * math.ceil(capacity * SEQ * top_k / n_expert)
    return Routing(tuple(wanted), tuple(kept), top_k, capacity, room)


def unfair_layer(skew: float, n_expert: int, top_k: int, capacity: float | None = None, seed: int = 0) -> MoE:
    """A mixture whose experts give back what they get, without gradients.

    The score of expert e is a normal number minus skew times log(1 + e): a skew of 0 is fair, and with a larger one the
    first experts are liked more. ValueError for more experts a token than there are, and for a capacity that is none.
    """
    config = GPTConfig(
        d_model=FEATURES, n_head=1, n_expert=n_expert, top_k=top_k, capacity=capacity, balance="none", expert_ff=1
    )
    layer = MoE(config, lambda config: nn.Identity()).requires_grad_(False)
    weight = torch.randn(n_expert, FEATURES, generator=torch.Generator().manual_seed(seed))
    weight[:, :-1] /= weight[:, :-1].norm(dim=1, keepdim=True)  # all scores are spread alike
    weight[:, -1] = -skew * torch.log1p(torch.arange(n_expert, dtype=torch.float32))
    layer.router.weight.copy_(weight)
    return layer


def tokens(n_ranks: int, n_sequences: int, seq: int, seed: int = 0) -> Tensor:
    """Random tokens of each rank; their last number is the one by which the skew comes in.   [n, B, T, FEATURES]"""
    x = torch.randn(n_ranks, n_sequences, seq, FEATURES, generator=torch.Generator().manual_seed(1000 + seed))
    x[..., -1] = 1.0
    return x
