"""What is known of a tensor after it was compared, and of all that was looked at."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Judged(NamedTuple):
    """One tensor that was compared, on one rank: what it has added, and how much it may add."""

    step: int
    phase: str
    layer: str
    tensor: str
    rank: int | None
    run: str
    difference: float
    bound: float
    size: float
    formula: str

    @property
    def ratio(self) -> float:
        """Difference over bound: above 1 is too much."""
        return 0.0 if self.difference == 0 else self.difference / self.bound if self.bound else math.inf


class Looked(NamedTuple):
    """What was looked at, and what was not, by reason."""

    tensors: int
    layers: int
    steps: int
    ranks: tuple[int, int]
    skipped: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        n_a, n_b = self.ranks
        text = (
            f"compared {self.tensors:,} tensors of {self.layers} layers in {self.steps} "
            f"step{'s' * (self.steps != 1)}, {n_a} rank{'s' * (n_a != 1)} against {n_b}"
        )
        left = "; ".join(f"{count:,} {reason}" for reason, count in self.skipped)
        return f"{text}; skipped {left}" if left else f"{text}; skipped none"


def unit_of(dtype: torch.dtype) -> float:
    """Unit roundoff: half the gap behind 1."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0
