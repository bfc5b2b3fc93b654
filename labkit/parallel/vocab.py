"""The two ends of a language model, cut by vocabulary (Shoeybi et al., 2019, arXiv:1909.08053, section 3).

Rank r owns the V/n words from r V/n on: their rows of the embedding table, and their columns of the logits.

    embedding   tokens [B,T] --> look up my words, zero for the others --g--> x [B,T,D]      one rank has the row, n-1
                                                                                            add zeros: the sum is exact
    logits      x [B,T,D] --f--> x W_r^T = z_r [B,T,V/n]                                    a column-parallel linear

    loss        top  = max over ranks of max(z_r)                 all-reduce of B T numbers
                sum  = sum over ranks of sum(exp(z_r - top))      all-reduce of B T numbers  } one
                mine = sum over ranks of (z[target] - top)        all-reduce of B T numbers  } message
                mean of log(sum) - mine

    sent per rank      embedding 2(n-1)/n B T D elements forward; loss 2(n-1)/n * 3 B T numbers forward, 0 backward
                       (gathering the logits first would send (n-1)/n B T V elements, with V of about 50,000)
    memory per rank    table / n, logits / n, and one buffer of [B,T,V/n] kept for backward

Subtracting the whole row's maximum keeps exp in range whatever the logits are. Logits of low precision are computed
with in float32. A tied head shares its shard with the embedding: both are cut by rows of [V, D], so it is the same
shard.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from labkit.comm.group import Group
from labkit.parallel.tensor import reduce_from, shard


class VocabParallelEmbedding(nn.Module):
    """Row t of a table of V words, of which this rank holds V/n.   tokens [..] -> [.., D]   with W[V/n, D]"""

    def __init__(self, weight: nn.Parameter, padding_idx: int | None, group: Group):
        super().__init__()
        self.weight, self.padding_idx, self.group = weight, padding_idx, group

    @classmethod
    def of(cls, embedding: nn.Embedding, group: Group) -> VocabParallelEmbedding:
        """This rank's words of an embedding that all ranks hold; the embedding stays as it is.   W[V, D] -> W[V/n, D]

        Sends nothing. Raises ValueError if n does not divide V, or for options that need the whole table at once."""
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            raise ValueError(
                "an embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be cut by vocabulary: "
                f"make it without, or leave it whole; this one is {embedding}"
            )
        weight = shard(embedding.weight, 0, group, "the vocabulary (pad it, or use other ranks): num_embeddings")
        return cls(weight, embedding.padding_idx, group)

    def leave(self, x: Tensor) -> Tensor:
        """g.   [.., D] -> [.., D]"""
        return reduce_from(x, self.group)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [..], the same on every rank -> [.., D], whole on every rank. Sends 2(n-1)/n of that.

        Raises ValueError for a token outside the vocabulary (on a GPU, which is not waited for, a device assertion)."""
        index, in_shard = _mine(tokens, self.weight.shape[0], self.group, "token")
        first = self.group.rank * self.weight.shape[0]
        padding = None if self.padding_idx is None else self.padding_idx - first
        inside = padding is not None and 0 <= padding < self.weight.shape[0]
        rows = F.embedding(index, self.weight, padding if inside else None)
        # exactly one rank has the row and the others add zeros, so the sum is exact in any dtype
        return self.leave(rows.masked_fill(~in_shard.unsqueeze(-1), 0))

    def extra_repr(self) -> str:
        """Local shape and place, for `print(model)`."""
        return f"W{list(self.weight.shape)}, rank {self.group.rank} of {self.group.size} on {self.group.axis}"


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, group: Group, ignore_index: int = -100) -> Tensor:
    """Mean of -log softmax(whole logits)[target] over the targets that are not `ignore_index`, the same on every rank.

    logits [.., V/n] of this rank, targets [..] of 0 to V-1, the same on every rank -> [] in float32, or float64 for
    such logits. Sends 2(n-1)/n of 3 numbers a target. Raises ValueError if shapes or targets do not fit; NaN if every
    target is ignored, as in torch."""
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits {list(logits.shape)} want targets {list(logits.shape[:-1])}, one a row; got {list(targets.shape)}"
        )
    return _CrossEntropy.apply(logits, targets, group, ignore_index)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group, ignore_index: int) -> Tensor:
        counted = targets != ignore_index
        index, in_shard = _mine(targets.where(counted, 0), logits.shape[-1], group, "target")
        index = index.unsqueeze(-1)
        wide = torch.promote_types(logits.dtype, torch.float32)
        # the maximum over all ranks, not this rank's: the terms of one sum must be shifted alike
        top = group.all_reduce(logits.amax(-1).to(wide), op="max")
        shifted = logits - top.unsqueeze(-1)  # a new wide tensor, so that the next steps may change it in place
        picked = shifted.gather(-1, index).squeeze(-1).where(in_shard, 0)
        exps = shifted.exp_()  # in place: one buffer of [.., V/n] and not three
        total, picked = group.all_reduce(torch.stack([exps.sum(-1), picked])).unbind()
        ctx.save_for_backward(exps, total, index, in_shard, counted)
        ctx.dtype = logits.dtype
        return (total.log() - picked).where(counted, 0).sum() / counted.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        exps, total, index, in_shard, counted = ctx.saved_tensors
        # no communication: the sums of forward are all that a rank needs for its own columns
        share = (grad / counted.sum()).where(counted, 0)
        out = exps * (share / total).unsqueeze(-1)  # softmax, minus one at the target's place
        out.scatter_add_(-1, index, -share.where(in_shard, 0).unsqueeze(-1))
        return out.to(ctx.dtype), None, None, None


def _mine(tokens: Tensor, n_rows: int, group: Group, kind: str) -> tuple[Tensor, Tensor]:
    """Row of each token in this rank's shard (0 if another rank has it), and True where it is here.   [..], [..]"""
    n_words = n_rows * group.size
    if tokens.device.type == "cpu" and tokens.numel():
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= n_words:
            raise ValueError(f"{kind} {low if low < 0 else high} is outside the vocabulary of 0 to {n_words - 1}")
    index = tokens - group.rank * n_rows
    in_shard = (index >= 0) & (index < n_rows)
    # a token that no rank has keeps an index outside the shard, so the look-up fails: a check would make a GPU wait
    elsewhere = (tokens >= 0) & (tokens < n_words) & ~in_shard
    return index.masked_fill(elsewhere, 0), in_shard
