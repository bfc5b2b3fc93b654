"""Sequence parallelism: what tensor parallelism leaves whole is cut by position (Korthikanti et al., 2022,
arXiv:2205.05198, section 4.2.2).

Norms, dropouts and residual sums work on each position by itself. So between the tensor-parallel pairs each rank keeps
only T/n positions, and the entry f and the exit g of a pair change:

    x_r [B,T/n,D] --f'--> x [B,T,D] --> column --> act --> row --> [B,T,D] --g'--> y_r [B,T/n,D] + b
                  gather            heads or H/n                    reduce-scatter

          tensor parallel                          sequence parallel
          forward        backward                  forward           backward
    f     nothing        all-reduce          f'    all-gather        reduce-scatter
    g     all-reduce     nothing             g'    reduce-scatter    all-gather

    sent per rank    the same: an all-reduce is a reduce-scatter and an all-gather, 2(n-1)/n N = (n-1)/n N + (n-1)/n N;
                     on top come the gradients of the norms and row biases, 2(n-1)/n * 6 D numbers a block
    memory           activations outside the pairs / n; the gathered x inside a pair stays whole until its backward.
                     The paper keeps x_r alone and gathers it again in backward, for (n-1)/n N more on the wire: that
                     is labkit's recompute="gathers" (labkit.train.recompute), which asks for what `gathers` marks

A parameter that stays whole but meets only T/n positions has 1/n of its gradient on each rank. It is sent through f on
its way into the layer, and f's backward, an all-reduce, makes its gradient whole; no other code has to know of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from labkit.comm.group import Group
from labkit.parallel.tensor import ColumnParallelLinear, RowParallelLinear, copy_to, divided, join, part
from labkit.parallel.vocab import VocabParallelEmbedding

POSITIONS = -2
"""The dim of activations [.., T, D] that is cut."""


class _GatherTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return join(x, group, POSITIONS)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # summed and cut at once: each rank saw the whole x, and owns only its positions
        return scatter_from(grad, ctx.group), None


class _ScatterFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        divided(x.shape[POSITIONS], group.size, "the length of the sequence")
        # reduce_scatter cuts along dim 0, so the ranks' positions become dim 0
        parts = x.unflatten(POSITIONS, (group.size, -1)).movedim(POSITIONS - 1, 0)
        return group.reduce_scatter(parts).squeeze(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # each rank's term gets the gradient of the whole sum, of which every rank has only its positions
        return gather_to(grad, ctx.group), None


def gather_to(x: Tensor, group: Group) -> Tensor:
    """f': the whole sequence for a parallel region; its gradients are summed, each rank gets its positions back.

    [.., T/n, D] -> [.., T, D]. Sends (n-1)/n of the whole's bytes forward and backward."""
    return x if group.size == 1 else _GatherTo.apply(x, group)


def scatter_from(x: Tensor, group: Group) -> Tensor:
    """g': the sum of every rank's x, of which each keeps its positions.   [.., T, D] -> [.., T/n, D]

    Sends (n-1)/n of x's bytes forward and backward. Raises ValueError if n does not divide T."""
    return x if group.size == 1 else _ScatterFrom.apply(x, group)


class SequenceColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel linear behind f'.   x_r [.., T/n, I] -> y_r [.., T, O/n]   with W[O/n, I] and b[O/n]"""

    @property
    def gathers(self) -> bool:
        """True if what `enter` returns came from other ranks, who can send it again."""
        return self.group.size > 1 and not self.entered

    def enter(self, x: Tensor) -> Tensor:
        """f'.   [.., T/n, I] -> [.., T, I]"""
        return gather_to(x, self.group)


class SequenceRowParallelLinear(RowParallelLinear):
    """A row-parallel linear before g'.   x_r [.., T, I/n] -> y_r [.., T/n, O]   with W[O, I/n] and b[O]"""

    def leave(self, y: Tensor) -> Tensor:
        """g', then the bias, which meets T/n positions.   [.., T, O] -> [.., T/n, O]"""
        y = scatter_from(y, self.group)
        # f around the bias: this rank's positions give 1/n of its gradient, f's backward adds up the rest
        return y if self.bias is None else y + copy_to(self.bias, self.group)


class SequenceVocabParallelEmbedding(VocabParallelEmbedding):
    """A vocab-parallel embedding before g'.   tokens [.., T], whole -> [.., T/n, D]   with W[V/n, D]"""

    def leave(self, x: Tensor) -> Tensor:
        """g'.   [.., T, D] -> [.., T/n, D]"""
        return scatter_from(x, self.group)


class SequenceEmbedding(nn.Module):
    """A table that stays whole, of positions for one; looks up this rank's part.   [.., T] -> [.., T/n, D]"""

    def __init__(self, embedding: nn.Embedding, group: Group):
        super().__init__()
        self.weight, self.padding_idx, self.group = embedding.weight, embedding.padding_idx, group

    @classmethod
    def of(cls, embedding: nn.Embedding, group: Group) -> SequenceEmbedding:
        """The same table, sent through f. Raises ValueError for options that work on the table itself."""
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            raise ValueError(
                "an embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be cut by position: "
                f"make it without; this one is {embedding}"
            )
        return cls(embedding, group)

    def forward(self, indices: Tensor) -> Tensor:
        """indices [.., T], the same on every rank -> [.., T/n, D]. Backward sends 2(n-1)/n of the table's bytes.

        Raises ValueError if n does not divide T."""
        own = part(indices, self.group, -1, "the length of the sequence")
        # f around the table, as around every parameter that is whole but meets T/n positions
        return F.embedding(own, copy_to(self.weight, self.group), self.padding_idx)


class SequenceNorm(nn.Module):
    """A LayerNorm or RMSNorm on this rank's positions.   x_r [.., T/n, D] -> [.., T/n, D]   with w[D] and b[D]"""

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm, group: Group):
        super().__init__()
        self.shape, self.eps, self.group = list(norm.normalized_shape), norm.eps, group
        self.centred = isinstance(norm, nn.LayerNorm)
        self.weight, self.bias = norm.weight, getattr(norm, "bias", None)

    @classmethod
    def of(cls, norm: nn.LayerNorm | nn.RMSNorm, group: Group) -> SequenceNorm:
        """The same parameters, sent through f."""
        return cls(norm, group)

    def forward(self, x: Tensor) -> Tensor:
        """[.., T/n, D] -> [.., T/n, D]. Backward sends 2(n-1)/n of the parameters' bytes, in one message."""
        weight, bias = shared(self.weight, self.bias, self.group)
        if self.centred:
            return F.layer_norm(x, self.shape, weight, bias, self.eps or 0.0)
        return F.rms_norm(x, self.shape, weight, self.eps)


def shared(weight: Tensor | None, bias: Tensor | None, group: Group) -> tuple[Tensor | None, Tensor | None]:
    """A module's whole parameters through one f: their small gradients travel in one message, not in two."""
    if weight is None or bias is None or group.size == 1:  # one message needs both, of the same shape
        return (None if weight is None else copy_to(weight, group)), bias
    stacked = copy_to(torch.stack([weight, bias]), group)
    return stacked[0], stacked[1]
