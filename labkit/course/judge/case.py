"""A case: one run that an attempt has to pass, with random numbers that no rank can predict for another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from labkit.plan.words import dtype_name

Drawn = TypeVar("Drawn")


@dataclass(frozen=True)
class Case:
    """One run of an attempt: how many ranks, a seed, a dtype, and other settings of the problem (`case["rows"]`).

    `others` are the cases that may be tried in its place, so that no attempt knows all sizes in advance."""

    n_ranks: int
    dtype: torch.dtype = torch.float32
    seed: int = 0
    what: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[Case, ...] = ()

    @classmethod
    def of(cls, n_ranks: int, dtype: torch.dtype = torch.float32, **what: Any) -> Case:
        """A case without a seed; the judge draws one for each check."""
        return cls(n_ranks, dtype, 0, MappingProxyType(what))

    def among(self, *others: Case) -> Case:
        """This case, or one of the others: the judge draws which with the seed. As it stands it is this one."""
        return replace(self, others=others)

    def thrown(self, seed: int) -> Case:
        """The case that is tried with this seed."""
        return replace(Random(seed).choice((self, *self.others)), seed=seed, others=())

    @property
    def dice(self) -> Random:
        """A random generator of this seed."""
        return Random(self.seed)

    def __getitem__(self, name: str) -> Any:
        return self.what[name]

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return self.dtype.itemsize

    def random(self, *shape: int, key: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        """Random numbers, the same for the same seed and `key`; a rank cannot guess another's.   -> shape"""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + key) % 2**63)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        wanted = dtype or self.dtype
        return drawn.to(wanted) if wanted.is_floating_point else (100 * drawn).to(wanted)

    def draw(self, make: Callable[[Random], Drawn], tells: Callable[[Drawn], bool]) -> Drawn:
        """Call `make` with a random generator of this seed until `tells` accepts what it returns.

        `tells` turns down values on which a wrong program would give the right answer by chance."""
        dice = Random(self.seed)
        while not tells(value := make(dice)):
            pass
        return value

    def __str__(self) -> str:
        return self.without()

    def without(self, *names: str) -> str:
        """The case in words, but for the settings of these names: `3 ranks, float32, rows (1, 3, 2)`."""
        kept = {name: value for name, value in self.what.items() if name not in names}
        settings = ", ".join(f"{name} {_short(value)}" for name, value in kept.items())
        ranks = f"{self.n_ranks} rank{'s' if self.n_ranks > 1 else ''}"
        return f"{ranks}, {dtype_name(self.dtype)}{f', {settings}' if settings else ''}"


def _short(value: Any) -> str:
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)
