"""A case: one run that an attempt has to pass, and random numbers for it that no rank knows of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

Drawn = TypeVar("Drawn")


@dataclass(frozen=True)
class Case:
    """One run of an attempt: how many ranks, a seed, a dtype, and what else the problem needs (`case["rows"]`)."""

    n_ranks: int
    dtype: torch.dtype = torch.float32
    seed: int = 0
    what: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, n_ranks: int, dtype: torch.dtype = torch.float32, **what: Any) -> Case:
        """A case whose seed is still to be drawn."""
        return cls(n_ranks, dtype, 0, MappingProxyType(what))

    def __getitem__(self, name: str) -> Any:
        return self.what[name]

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return self.dtype.itemsize

    def random(self, *shape: int, key: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        """Random numbers that no rank knows of another: the same for the same seed and `key`.   -> shape"""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + key) % 2**63)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        wanted = dtype or self.dtype
        return drawn.to(wanted) if wanted.is_floating_point else (100 * drawn).to(wanted)

    def draw(self, make: Callable[[Random], Drawn], tells: Callable[[Drawn], bool]) -> Drawn:
        """What `make` makes of dice with this seed, thrown again until it `tells` a mistake that chance may hide."""
        dice = Random(self.seed)
        while not tells(made := make(dice)):
            pass
        return made

    def __str__(self) -> str:
        told = ", ".join(f"{name} {_short(value)}" for name, value in self.what.items())
        ranks = f"{self.n_ranks} rank{'s' if self.n_ranks > 1 else ''}"
        return f"{ranks}, {str(self.dtype)[6:]}{f', {told}' if told else ''}"


def _short(value: Any) -> str:
    return str(value)[6:] if isinstance(value, torch.dtype) else str(value)
