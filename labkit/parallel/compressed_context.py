"""Context parallelism for compressed attention: each rank gathers means of all keys, and receives a halo of real ones.

A query at position i sees the last w keys, and of what lies before them one key and one value for each block of m
tokens, their means. Block j holds the tokens j m ... (j+1) m - 1, and is seen by queries whose window begins behind it:

    m = 2, w = 2         0 1 | 2 3 | 4 5 | 6 7       T = 8 tokens over n = 2 ranks
    query 3              c0    x x                   c: the mean of a block    x: a key as it is
    query 6              c0    c1      x   x         blocks 0 and 1 of the other rank come as their means; token 4 is
                                                     in no block that lies wholly before the window

Means are made where the tokens lie, so T/(n m) keys and values of a rank travel in place of T/n, and the w-1 keys
before a rank's first token come from its neighbour. Both are functions that autograd knows: the gradient of a gather is
the sum over ranks of which each keeps its part, and the gradient of a halo goes back to the neighbour.

    shapes    q [B, H, T/n, W], k and v [B, K, T/n, W] -> [B, H, T/n, W], tokens in order
    sent      forward and backward each 2 B K W ((n-1) T/(n m) + w-1) numbers in the dtype of the keys, at most
              (labkit.plan.laws.compressed_context)
    memory    a mask and scores of T/n x (T/m + w + T/n): a plain program that shows what travels, and no fused kernel
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from labkit.comm.group import Group
from labkit.parallel.sequence import gather_to
from labkit.plan.laws.compressed_context import check_blocks


def compressed_attention(q: Tensor, k: Tensor, v: Tensor, group: Group, window: int, stride: int) -> Tensor:
    """Attention to the last `window` keys, and before them to means of `stride`.   [B, H, T/n, W] -> [B, H, T/n, W]

    Ranks hold equal parts of the tokens, in order. ValueError for sizes that do not fit."""
    if q.dim() != 4 or k.shape != v.shape or (*q.shape[:1], *q.shape[2:]) != (*k.shape[:1], *k.shape[2:]):
        raise ValueError(
            f"attention takes q [B, H, T, W] and k, v [B, K, T, W], got {tuple(q.shape)}, {tuple(k.shape)} and "
            f"{tuple(v.shape)}"
        )
    tokens, n = q.shape[2], group.size
    check_blocks(tokens, window, stride, n)
    kv = torch.stack([k, v])
    means = gather_to(kv.unflatten(-2, (-1, stride)).mean(-2), group)
    earlier = take_halo(kv, group, window - 1)
    keys, values = torch.cat([means, earlier, kv], dim=-2)
    first = group.rank * tokens
    at = torch.arange(first, first + tokens, device=q.device)[:, None]
    ends = torch.arange(1, means.shape[-2] + 1, device=q.device) * stride - 1
    near = torch.arange(first - earlier.shape[-2], first + tokens, device=q.device)
    seen = torch.cat([ends <= at - window, (near <= at) & (near > at - window)], dim=1)
    return F.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=q.shape[1] != k.shape[1])


def take_halo(x: Tensor, group: Group, count: int) -> Tensor:
    """The last `count` tokens of the rank before; none for the first rank.   [.., T/n, W] -> [.., count or 0, W]"""
    return _Halo.apply(x, group, count)  # type: ignore[no-any-return]


class _Halo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, count: int) -> Tensor:
        ctx.group, ctx.count, ctx.tokens = group, count, x.shape[-2]
        return _passed(x[..., x.shape[-2] - count :, :], group, count, 1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        group, count = ctx.group, ctx.count
        back = _passed(grad, group, count, -1)
        whole = grad.new_zeros((*grad.shape[:-2], ctx.tokens, grad.shape[-1]))
        whole[..., ctx.tokens - back.shape[-2] :, :] = back
        return whole, None, None


def _passed(x: Tensor, group: Group, count: int, step: int) -> Tensor:
    """x to the rank `step` further on, and what comes from the one before; nothing at the ends of the line."""
    there, source = group.rank + step, group.rank - step
    comes, goes = count and source in range(group.size), count and there in range(group.size)
    room = x.new_empty((*x.shape[:-2], count if comes else 0, x.shape[-1]))
    expected = group.recv_start(source, into=room) if comes else None
    sent = group.send(x.contiguous(), there) if goes else None
    for message in (expected, sent):
        if message is not None:
            message.wait()
    return room
