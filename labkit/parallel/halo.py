"""Context parallelism for sliding windows: a rank receives the last w-1 keys and values before its own tokens, no more.

In a window of w a query at position i looks at the keys i-w+1 ... i. A ring (context.py) carries the keys and values of
all tokens past all ranks, also those that no query there may look at. With tokens in order, the r-th part on rank r, a
rank lacks only w-1 keys and values, its halo:

    T = 8, n = 2, w = 3                keys
                                       rank 0         rank 1
                                       0  1  2  3     4  5  6  7
    queries of rank 0   0              x
                        1              x  x
                        2              x  x  x
                        3                 x  x  x
    queries of rank 1   4                    o  o     x                 o: the halo, w-1 = 2 tokens of rank 0
                        5                       o     x  x
                        6                             x  x  x
                        7                                x  x  x

    forward     send the own tokens that later ranks see  ->  attend to own keys  ->  wait for the halo, attend to it
    backward    gradients of the halo  ->  send them to their owners  ->  gradients of own keys  ->  wait for what later
                ranks send, add it

Communication starts before the computation that does not need it, and is waited for after it. What own keys and the
halo give is merged by the online softmax (blockwise_attention.py).

    shapes    q [B, H, T/n, W], k and v [B, K, T/n, W] with K key heads, each for H/K query heads -> [B, H, T/n, W]
    sent      forward 2 B K W (w-1) numbers a rank, keys and values, in their own dtype; backward the same, gradients.
              The last ranks send less forward, the first ones less backward: there is nobody after or before them.
              A ring sends (n-1) T/n in place of w-1, and in backward keys, values and gradients in fp32
    memory    kept for backward: q, k, v and y of T/n tokens, a number for each query and head, and the halo

The halo may reach over several ranks (w-1 > T/n), and over none (w = 1); parts may be of different lengths. Gradients
travel in the dtype of the keys: each rank rounds its own term once, the owner adds all terms in fp32 at least. (A ring
adds to what it carries at each hop, and a narrow sum would be rounded n times.)

Order matters. In zigzag, which gives each rank of a ring the same work under a full causal mask, a rank has two chunks
and would need a halo for each. Under a window shorter than T/n it is not needed: tokens in order are the same work for
each rank, but for the first w-1 queries of a row, which see fewer keys.

Sources: attention in a window in Beltagy et al. (Longformer), arXiv:2004.05150, section 3.1, and Jiang et al. (Mistral
7B), arXiv:2310.06825, section 2; exchanging borders is the halo exchange of domain decomposition. Its law:
labkit.plan.laws.halo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from labkit.comm.group import Group
from labkit.parallel.blockwise_attention import Answers, Part, Queries, WindowRule
from labkit.parallel.context import checked_parts, contiguous
from labkit.plan.laws.halo import check_window, halo_of, readers_of

HALO, GRADIENTS = 0, 1
"""Tags of the messages."""


def halo_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    window: int,
    documents: Tensor | None = None,
    parts: Sequence[Part] | None = None,
) -> Tensor:
    """Causal attention to the last `window` keys.   [B, H, T/n, W], twice [B, K, T/n, W] -> [B, H, T/n, W]

    A query's own key is one of the `window`; with a window of T or more this is full causal attention. `parts` says
    which tokens each rank holds: one run each, in order, also of different lengths or empty; None: of equal lengths.
    `documents` as in a ring: [T] or [B, T] of the whole row, and tokens see their own document only.

    Sends 2 B K W min(window - 1, tokens of later ranks) numbers forward, and backward as many as it has received.
    ValueError for a window below 1, parts that are not in order, and sizes that do not fit."""
    check_window(window)
    if parts is None and q.dim() == 4:
        parts = contiguous(group.size * q.shape[2], group.size)
    parts = checked_parts(q, k, v, group, documents, parts)
    begin = 0
    for rank, part in enumerate(parts):
        if len(part) != 1 or part[0].step != 1 or part[0].start != begin:
            runs = ", ".join(f"{run.start} to {run.stop - 1}" for run in part)
            raise ValueError(
                f"a halo needs the tokens of a row in order, one run a rank; rank {rank} has {runs}, and the next "
                f"token is {begin}: cut rows by `contiguous`, or take the ring, which does not mind"
            )
        begin = part[0].stop
    lengths = [len(part[0]) for part in parts]
    rule = WindowRule(window, documents)
    return _InWindow.apply(q, k, v, group, lengths, parts[group.rank][0], rule)  # type: ignore[no-any-return]


class _InWindow(Function):
    """Attention to own keys and to a halo; `own` are the positions of this rank's tokens."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group, lengths: list[int], own: range, rule: WindowRule
    ) -> Tensor:
        halo, readers = (runs(lengths, group.rank, rule.window) for runs in (halo_of, readers_of))
        kv = torch.stack([k, v])
        # the halo is on its way, there and from there, while this rank attends to what it has
        expected = [group.recv_start(owner, HALO, kv.new_empty(_shape(kv, run))) for owner, run in halo]
        sent = [group.send(_run(kv, run, own), reader, HALO) for reader, run in readers]
        with torch.autocast(q.device.type, enabled=False):  # what is added up here wants its fp32
            queries = Queries(q, (own,), k.shape[1], rule)
            queries.look(kv, (own,))
            blocks = []
            for (_, run), message in zip(halo, expected, strict=True):
                block = message.wait()
                assert block is not None
                queries.look(block, (run,))
                blocks.append(block)
        for message in sent:
            message.wait()
        y = queries.answer()
        ctx.save_for_backward(q, k, v, y, queries.log_sum, *blocks)
        ctx.group, ctx.own, ctx.rule, ctx.halo, ctx.readers = group, own, rule, halo, readers
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, y, log_sum, *blocks = ctx.saved_tensors
        group, own = ctx.group, ctx.own
        answers = Answers(q, (own,), ctx.rule, y, log_sum, grad)
        kv = torch.stack([k, v])
        expected = [group.recv_start(reader, GRADIENTS, kv.new_empty(_shape(kv, run))) for reader, run in ctx.readers]
        sent = []
        # the halo's gradients first: they travel while those of own keys are made
        for (owner, run), block in zip(ctx.halo, blocks, strict=True):
            sent.append(group.send(answers.give(block, (run,)).to(k.dtype), owner, GRADIENTS))
        grads = answers.give(kv, (own,))
        for (_, run), message in zip(ctx.readers, expected, strict=True):
            _run(grads, run, own).add_(message.wait())
        for message in sent:
            message.wait()
        grad_k, grad_v = grads.to(k.dtype)
        return answers.grad_q.flatten(1, 2).to(q.dtype), grad_k, grad_v, None, None, None, None


def _shape(kv: Tensor, run: range) -> list[int]:
    """The shape of the keys and values at these positions."""
    return [*kv.shape[:-2], len(run), kv.shape[-1]]


def _run(kv: Tensor, run: range, own: range) -> Tensor:
    """The tokens at these positions of a rank whose tokens are at `own`.   [2, B, K, T/n, W] -> [2, B, K, run, W]"""
    return kv[..., run.start - own.start : run.stop - own.start, :]
