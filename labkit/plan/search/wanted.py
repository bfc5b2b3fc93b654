"""Choices that somebody has made before a search of plans: the search tries them alone, and all else as before.

plans(shape, "h100", 8, 64, strategy="zero3", recompute="full", n_micro=2, offload=True)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from labkit.plan.checks import is_whole
from labkit.plan.job.recipe import STRATEGIES
from labkit.plan.laws.strategies import HYBRID
from labkit.plan.model.setting import RECOMPUTE
from labkit.plan.words import nearest

SYNONYMS = MappingProxyType({"fsdp": "zero3", "fsdp2": "zero3", "fully-sharded": "zero3"})
"""Names of strategies in other libraries."""
WORDS = MappingProxyType({"strategy": (*STRATEGIES, "hsdp"), "recompute": RECOMPUTE})
"""The words that each choice can be."""


@dataclass(frozen=True)
class Wanted:
    """Choices that are fixed. "" and None leave one to the search.

    strategy    "ddp", "zero1", "zero2", "zero3" ("fsdp" means that, too), or "hsdp": zero3 inside groups of ranks
    recompute   what backward runs again: "none", "gathers", "selective" or "full"
    n_micro     micro-batches that each rank of dp cuts its rows into
    offload     the optimizer's state is on the CPU

    ValueError, with the nearest words, for words that are none of these."""

    strategy: str = ""
    recompute: str = ""
    n_micro: int | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", SYNONYMS.get(self.strategy.lower(), self.strategy))
        for name, known in WORDS.items():
            value = getattr(self, name)
            if value and value not in known:
                raise ValueError(f"{name}={value!r} is none of {', '.join(known)}; {nearest(value, known)}")
        if self.n_micro is not None and not is_whole(self.n_micro):
            raise ValueError(f"n_micro must be a whole number of at least 1, got {self.n_micro!r}")
        if self.offload and self.strategy == "ddp":
            raise ValueError("offload is a choice for zero1, zero2 and zero3, got strategy='ddp': leave it out")

    def strategies(self, tried: Sequence[tuple[str, int | None]]) -> list[tuple[str, int | None]]:
        """Of (strategy, ranks that share one copy) those that are wanted. Where one rank has a copy for itself, and the
        search would try one strategy for all, the one that is wanted."""
        if len(tried) == 1 and (self.strategy or self.offload):
            named = "zero3" if self.strategy == "hsdp" else self.strategy
            return [(named or "zero1", None)]
        law = HYBRID if self.strategy == "hsdp" else self.strategy
        return [
            (name, shard)
            for name, shard in tried
            if (not law or (name == law and (shard is not None) == (self.strategy == "hsdp")))
            and not (self.offload and name == "ddp")
        ]

    def recomputations(self, tried: Sequence[str]) -> Sequence[str]:
        """Of what backward may run again, what is wanted."""
        return (self.recompute,) if self.recompute else tried

    def rows(self, tried: Sequence[int], of_rank: int) -> list[int]:
        """The rows of a micro-batch to try, where a rank has `of_rank` rows of a step; [] if these cannot be cut so."""
        if self.n_micro is None:
            return [rows for rows in tried if of_rank % rows == 0]
        return [of_rank // self.n_micro] if of_rank and of_rank % self.n_micro == 0 else []

    def __str__(self) -> str:
        """`strategy=zero3, n_micro=2`; "" if nothing is wanted."""
        named = (("strategy", self.strategy), ("recompute", self.recompute), ("n_micro", self.n_micro))
        return ", ".join([*(f"{name}={value}" for name, value in named if value), *["offload"] * self.offload])
