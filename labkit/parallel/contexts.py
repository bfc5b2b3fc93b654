"""Context parallelism in a model: which tokens a rank gets, where they stand, and by which way they attend.

    way       order of the tokens      attention                                       bytes of keys and values
    ring      zigzag                   context.ring_attention                          (n-1) b, hop by hop
    gather    zigzag                   context.gathered_attention                      (n-1) b, at once
    ulysses   in order                 context.ulysses_attention                       tokens for heads
    halo      in order                 halo.halo_attention, in a sliding window        min(w-1, T - T/n) tokens

A way is a row of WAYS: the order in which a sequence is cut, and attention over what the ranks have. Under a window all
four give the same numbers, and only the halo leaves out what no query may look at. The laws of the same names:
labkit.plan.laws.context.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.parallel.blockwise_attention import Part, positions_of
from labkit.parallel.context import contiguous, gathered_attention, ring_attention, ulysses_attention, zigzag
from labkit.parallel.halo import halo_attention
from labkit.plan.contracts import AsksPositions, Attends


class ContextWay(NamedTuple):
    """How tokens are dealt out, `order(T, n)`, and how they attend: (q, k, v, group, documents=, window=) -> y."""

    order: Callable[[int, int], tuple[Part, ...]]
    attention: Callable[..., Tensor]


WAYS = MappingProxyType(
    {
        "ring": ContextWay(zigzag, ring_attention),
        "gather": ContextWay(zigzag, gathered_attention),
        "ulysses": ContextWay(contiguous, ulysses_attention),
        "halo": ContextWay(contiguous, halo_attention),
    }
)
"""What runs for each of labkit.plan.model.cut_attention.CONTEXTS."""


class Context:
    """One of WAYS for a model: which tokens this rank gets, where they stand, and how they attend."""

    def __init__(self, kind: str, group: Group, window: int = 0) -> None:
        """`kind` is a key of WAYS, `group` the ranks of cp, `window` the keys that a query sees (0: all before it)."""
        self.kind, self.group, self.window = kind, group, window

    def part(self, n_tokens: int) -> Part:
        """The positions of the `n_tokens` tokens that this rank has of each row."""
        return WAYS[self.kind].order(self.group.size * n_tokens, self.group.size)[self.group.rank]

    def cut(self, x: Tensor) -> Tensor:
        """This rank's tokens.   [B, T] -> [B, T/n]   Raises ValueError if n does not divide T."""
        if self.group.size == 1:
            return x
        n_tokens, rest = divmod(x.shape[1], self.group.size)
        if rest:
            raise ValueError(
                f"{x.shape[1]} tokens a row have no {self.group.size} equal parts: pad rows to a multiple of "
                f"{self.group.size}, or change cp"
            )
        return torch.cat([x[:, run.start : run.stop] for run in self.part(n_tokens)], dim=1)

    def positions(self, length: int, device: Any) -> Tensor:
        """Where this rank's `length` tokens stand in the row.   -> [T/n]"""
        return positions_of(self.part(length), device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Causal attention.   [B, H, T/n, W], twice [B, K, T/n, W] -> [B, H, T/n, W]   `documents` of whole rows"""
        return WAYS[self.kind].attention(q, k, v, self.group, documents=documents, window=self.window)

    def into_(self, model: nn.Module) -> None:
        """Let every module of the model that asks for `positions`, and every one that has an `attend`, use these.

        Raises ValueError for attention with dropout, whose masks would differ from those of a row that is whole."""
        for name, module in model.named_modules():
            if isinstance(module, Attends):
                if module.dropout:
                    raise ValueError(f"{name} drops weights with p={module.dropout}: with cp > 1 take dropout=0")
                module.attend = self.attend
            if isinstance(module, AsksPositions):
                module.positions = self.positions
