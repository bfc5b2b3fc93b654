"""Model state under ZeRO: what one of n ranks holds of N parameters, stage by stage, and what it sends in a step.

    bytes of a parameter      weight    gradient    optimizer
    fp32, AdamW               4         4           8 = momentum 4 + variance 4                  16
    mixed, AdamW              2         2           12 = fp32 master 4 + momentum 4 + variance 4 16

    stage 0, DDP       whole     whole     whole       fp32 16 N             mixed 16 N
    stage 1, ZeRO-1    whole     whole     1/n         fp32  8 N +  8 N/n    mixed  4 N + 12 N/n
    stage 2, ZeRO-2    whole     1/n       1/n         fp32  4 N + 12 N/n    mixed  2 N + 14 N/n
    stage 3, ZeRO-3    1/n       1/n       1/n         fp32 16 N/n           mixed 16 N/n

A master copy is read by the optimizer alone, so it is sharded with the rest of its state: the "8 N + 8 N/n" of some
cards is the law of fp32 training, or of mixed training whose masters are whole on each rank.

Pure arithmetic of model state: activations, buckets and units on their way come on top (`predict_memory` has them).
Sources: Rajbhandari et al., arXiv:1910.02054, sections 3.1, 5 and 7; Micikevicius et al., arXiv:1710.03740, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from labkit.plan.breakdown import KINDS, Breakdown, Item
from labkit.plan.checks import is_whole
from labkit.plan.laws.optimizers import LAWS
from labkit.plan.laws.strategies import LAWS as STRATEGY_LAWS
from labkit.plan.step.bytes_sent import dp_moves

STRATEGIES = tuple(STRATEGY_LAWS.values())
STAGES = tuple(range(len(STRATEGIES)))
NAMES = tuple(law.title for law in STRATEGIES)
PRECISIONS = MappingProxyType({"mixed": (2, 2, 4), "fp32": (4, 4, 0)})
"""Bytes a parameter of weight, gradient and master copy."""
OPTIMIZERS = MappingProxyType(
    {"adamw": LAWS["adamw"].tensors, "muon": LAWS["muon"].tensors, "sgd with momentum": LAWS["sgd"].tensors, "sgd": 0}
)
"""The number of fp32 numbers that an optimizer keeps for each parameter; Muon, of a matrix in a block."""
MOST_RANKS = 10**6


@dataclass(frozen=True)
class ModelState:
    """N parameters on n data-parallel ranks. ValueError for what cannot be: no parameters, no ranks, unknown names."""

    n_params: float
    n_ranks: int
    precision: str = "mixed"
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        if not is_whole(self.n_ranks) or self.n_ranks > MOST_RANKS:
            raise ValueError(f"n is a whole number of ranks, 1 to {MOST_RANKS:,}; got {self.n_ranks!r}")
        if not 1 <= self.n_params < 1e15:
            raise ValueError(f"a model has 1 to 10^15 parameters, got {self.n_params!r}")
        for name, known in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}")

    @property
    def widths(self) -> tuple[int, int, int]:
        """Bytes of a parameter before anything is sharded: weight, gradient, optimizer's state."""
        weight, gradient, master = PRECISIONS[self.precision]
        return weight, gradient, master + 4 * OPTIMIZERS[self.optimizer]

    def cut(self, stage: int) -> tuple[bool, bool, bool]:
        """For weights, gradients and optimizer's state: True if they are sharded. ValueError for an unknown stage."""
        if stage not in STAGES:
            raise ValueError(f"ZeRO has stages 1, 2 and 3, and 0 is DDP; got {stage!r}")
        return STRATEGIES[STAGES.index(stage)].cuts

    def held(self, stage: int) -> Breakdown:
        """Bytes that each rank holds, by kind, with their formulas."""
        return Breakdown(
            Item(kind, width * self.n_params / (self.n_ranks if cut else 1), "B", f"{width} N{'/n' * cut}", SOURCE)
            for kind, width, cut in zip(KINDS[:3], self.widths, self.cut(stage), strict=True)
        )

    def law(self, stage: int) -> str:
        """The sum in N and n: `4 N + 12 N/n`."""
        parts = {cut: sum(w for w, c in zip(self.widths, self.cut(stage), strict=True) if c == cut) for cut in (0, 1)}
        return " + ".join(f"{parts[cut]} N{'/n' * cut}" for cut in (0, 1) if parts[cut])

    def bytes_per_param(self, stage: int) -> float:
        """Bytes on each rank for one parameter of the model: 5.5 for ZeRO-1 in mixed precision on 8 ranks."""
        return self.held(stage).total / self.n_params

    def times_less(self, stage: int) -> float:
        """DDP's bytes over those of a stage. As n grows: towards 4 for ZeRO-1 and 8 for ZeRO-2, in mixed precision."""
        return self.held(0).total / self.held(stage).total

    def redundant(self, stage: int) -> float:
        """Bytes that all ranks together hold beyond one copy of everything."""
        return self.n_ranks * self.held(stage).total - sum(self.widths) * self.n_params

    def sent(self, stage: int, n_micro: int = 1) -> float:
        """Bytes that a rank sends in a step of `n_micro` micro-batches: gradients, and weights where they are gathered.

        Weights and gradients travel in their own width. ValueError for fewer than one micro-batch."""
        if n_micro < 1:
            raise ValueError(f"a step has 1 micro-batch or more, got {n_micro}")
        self.cut(stage)
        scatters, gathers = dp_moves(STRATEGIES[stage].name, n_micro)
        share = (self.n_ranks - 1) / self.n_ranks * self.n_params
        weight, gradient, _ = self.widths
        return share * (scatters * gradient + gathers * weight)


SOURCE = "arXiv:1910.02054, 5"
