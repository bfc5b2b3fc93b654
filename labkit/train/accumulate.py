"""Gradient accumulation that gives the gradient of one big batch, also when micro-batches differ in tokens.

The loss of a step is the mean over all tokens that count, whichever micro-batch and rank they lie in:

    loss = (sum of all token losses) / (number of all tokens)

The common mistake takes the mean in each micro-batch and then the mean of these means: a token in a short micro-batch
then weighs more than one in a long one. With 2 tokens of loss 1 in one and 6 of loss 3 in the other:

    by tokens    (2 * 1 + 6 * 3) / 8 = 2.5           mean of means   (1 + 3) / 2 = 2.0

So the tokens are counted first, over micro-batches and over the data-parallel ranks, and each micro-batch then sums its
token losses and multiplies by one factor. The factor has the number of ranks in it, since data parallelism ends with
the mean over ranks (loss_r is what rank r adds up):

    factor = n_ranks / tokens        mean over ranks of (factor * sum_r) = (sum of all sums) / tokens

A micro-batch without any token that counts adds zero (its mean would be NaN). Bytes sent: one int64 a step,
2(n-1)/n * 8, and 4 or 8 bytes more for the loss. Memory: activations of one micro-batch, one set of gradients.
Source: the derivation above; for accumulation itself, Huang 2019 (GPipe), arXiv:1811.06965, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.train.gpt import cross_entropy

IGNORED = -100


def n_tokens(targets: Tensor) -> int:
    """The number of targets that count, which are all but those of -100."""
    return int((targets != IGNORED).sum())


def loss_factor(counts: Iterable[int], group: Group | None = None) -> float:
    """The factor for a sum of token losses: ranks / tokens of all micro-batches on all ranks.

    `counts` are the tokens of this rank's micro-batches; there may be none. Sends one int64 (an all-reduce). Raises
    ValueError, on every rank, if no token counts anywhere."""
    own = sum(counts)
    n_ranks = 1 if group is None else group.size
    total = own if group is None else int(group.all_reduce(torch.tensor([own], device=group.device)))
    if not total:
        raise ValueError(
            f"no token counts in any micro-batch of {n_ranks} rank(s): all targets are {IGNORED}, the mean loss is 0/0"
        )
    return n_ranks / total


def accumulate(
    model: nn.Module,
    micros: Sequence[tuple[Tensor, Tensor]],
    group: Group | None = None,
    accumulating: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Tensor:
    """Forward and backward of all micro-batches (tokens, targets): adds the gradient of the mean token loss.   -> []

    Returns that loss, over all ranks of the group. Every micro-batch but the last runs inside `accumulating()`: give a
    data-parallel strategy's `accumulate` (or DistributedDataParallel's `no_sync`), so that gradients travel once a
    step. With a group, gradients are right once a strategy has taken their mean over its ranks, as all strategies do.
    Raises ValueError, on every rank, if no token counts."""
    factor = loss_factor([n_tokens(targets) for _, targets in micros], group)
    total = torch.zeros((), device="cpu" if group is None else group.device)
    for index, (tokens, targets) in enumerate(micros):
        with accumulating() if index < len(micros) - 1 else nullcontext():
            loss = cross_entropy(model(tokens), targets, reduction="sum") * factor
            loss.backward()
        total = total.to(loss) + loss.detach()
    return total if group is None else group.all_reduce(total, op="mean")
