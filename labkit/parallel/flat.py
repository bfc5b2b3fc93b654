"""Parameters laid end to end in one flat buffer, which is cut into equal shards.

    a [2, 3]      b [5]        c [2]      pad
    |a a a a a a|b b b b b|c c|0|          14 elements on 2 ranks
    |-- rank 0: 7 elements --|-- rank 1: 7 elements --|

A collective on one large tensor costs one latency, on a hundred small ones a hundred. The padding makes all shards
equal, which is what reduce_scatter and all_gather want.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Flat:
    """The map between named parameters and one flat buffer of `numel` elements (padded: n_shards divides it)."""

    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    starts: tuple[int, ...]
    numel: int
    n_shards: int

    @classmethod
    def of(cls, named: Sequence[tuple[str, nn.Parameter]], n_shards: int = 1) -> Flat:
        """The map for these parameters, in this order. ValueError if they differ in dtype or device."""
        names, params = tuple(name for name, _ in named), tuple(p for _, p in named)
        kinds = {(p.dtype, p.device) for p in params}
        if len(kinds) != 1:
            listed = ", ".join(sorted(f"{str(dtype)[6:]} on {device}" for dtype, device in kinds))
            raise ValueError(f"one flat buffer holds one dtype on one device, got {listed or 'no parameters'}")
        ends = tuple(accumulate(p.numel() for p in params))
        return cls(names, params, (0, *ends[:-1]), ends[-1] + -ends[-1] % n_shards, n_shards)

    @property
    def shard_numel(self) -> int:
        """Elements of one shard."""
        return self.numel // self.n_shards

    def empty(self, dtype: torch.dtype | None = None) -> Tensor:
        """A zeroed flat buffer [numel] on the parameters' device, in their dtype unless another is asked for."""
        return torch.zeros(self.numel, dtype=dtype or self.params[0].dtype, device=self.params[0].device)

    def windows(self, buffer: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its window of `buffer` [numel], in the parameter's shape; no copies."""
        for p, start in zip(self.params, self.starts, strict=True):
            yield p, buffer[start : start + p.numel()].view(p.shape)

    def pack(self, dtype: torch.dtype | None = None) -> Tensor:
        """The parameters' values as one flat buffer [numel]."""
        buffer = self.empty(dtype)
        for p, window in self.windows(buffer):
            window.copy_(p.detach())
        return buffer

    def shard(self, buffer: Tensor, rank: int) -> Tensor:
        """Rank's part of `buffer`: a view [numel / n_shards]."""
        return buffer[rank * self.shard_numel : (rank + 1) * self.shard_numel]

    def owned(self, rank: int) -> Iterator[tuple[str, nn.Parameter, int, int, int]]:
        """What lies in a rank's shard: (name, parameter, first element of it, first place in the shard, count)."""
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        for name, p, start in zip(self.names, self.params, self.starts, strict=True):
            first, last = max(low, start), min(high, start + p.numel())
            if first < last:
                yield name, p, first - start, first - low, last - first
