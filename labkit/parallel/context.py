"""Context parallelism: attention over a sequence that is cut over the ranks of a group.

Norms, linears and the loss work on each token by itself. Attention alone looks at other tokens, so it alone has to be
replaced; between two attentions a rank keeps T/n tokens of each row. Three ways, all of them exact:

    ring      keys and values go round, one hop after another, while the queries stay (Liu et al., arXiv:2310.01889)
    gather    every rank gathers all keys and values, then attends alone (Llama 3, arXiv:2407.21783, section 3.3.2)
    ulysses   tokens are exchanged for heads, each rank attends with H/n heads over the whole row, and back
              (Jacobs et al., arXiv:2309.14509, section 3)

    ring, n=4     hop 0   hop 1   hop 2   hop 3            ulysses, n=2      tokens 0..3   4..7
      rank 0       kv0     kv3     kv2     kv1               heads 0 1        rank 0      rank 0
      rank 1       kv1     kv0     kv3     kv2                     2 3        rank 1      rank 1     after all_to_all
      rank 2       kv2     kv1     kv0     kv3
      rank 3       kv3     kv2     kv1     kv0

A softmax needs the sum over all keys. The online softmax keeps, for each query, the mean of the values seen so far and
the logarithm of the sum of weights, and merges one block of keys after another into both (blockwise_attention.py).
Backward needs neither the scores nor the order: from the final logarithm each block's weights are computed again.

Under a causal mask the last tokens have most to look at. If rank r held the r-th part of n, the last rank would compute
2n-1 times as much as the first. In zigzag order rank r holds chunks r and 2n-1-r of 2n, and all compute the same:

    n=4       rank 0    rank 1    rank 2    rank 3         keys seen, in chunks: (r + 1/2) + (2n-1-r + 1/2) = 2n
    chunks    0 7       1 6       2 5       3 4

    shapes    q [B, H, T/n, W], k and v [B, K, T/n, W] with K key heads, each for H/K query heads -> [B, H, T/n, W]
    sent      with b = 2 B K T/n W bytes of a rank's keys and values, and b' the same numbers in fp32 at least:
              ring, gather   forward (n-1) b, backward (n-1)(b + b')     keys and values again, and their gradients
              ulysses        forward and backward each (n-1)/n of 2 B (H + K) T/n W numbers: q, k, v there, y back
    memory    kept for backward: q, k, v and y of T/n tokens, and a number for each query and head. While it runs:
              ring     two blocks b, and in backward up to four b' of gradients
              gather   this rank's b and all n b; in backward (2n+1) b' of gradients too
              ulysses  q, k, v and y of T tokens and 1/n of the heads, which are also what it keeps
              ring and gather also hold scores of TILE x TILE tokens, whatever T is

Gradients of keys and values are sums over all ranks: they travel in fp32 at least, where a bf16 sum would be rounded n
times. Each rank adds its own term last, at home, so that they travel n-1 hops and not n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from labkit.comm.group import Group, Work
from labkit.parallel.blockwise_attention import Answers, Part, Queries, Rule, rule_of


def contiguous(length: int, n: int) -> tuple[Part, ...]:
    """The part of each of n ranks if a row is cut in order.   8 tokens, 2 ranks -> ((0..3), (4..7))"""
    ends = [length * k // n for k in range(n + 1)]
    return tuple((range(begin, end),) for begin, end in zip(ends, ends[1:], strict=False))


def zigzag(length: int, n: int) -> tuple[Part, ...]:
    """The part of each of n ranks in zigzag order: chunks r and 2n-1-r of 2n.   8, 2 -> ((0 1, 6 7), (2 3, 4 5))

    Parts are of one length if n divides the row's, for then the longer chunks are the first n."""
    base, longer = divmod(length, 2 * n)
    ends = [base * k + min(k, longer) for k in range(2 * n + 1)]
    chunks = [range(begin, end) for begin, end in zip(ends, ends[1:], strict=False)]
    return tuple((chunks[r], chunks[2 * n - 1 - r]) for r in range(n))


def documents_of(lengths: Sequence[int]) -> Tensor:
    """The number of each token's document in a row that packs documents of these lengths.   (2, 3) -> [0 0 1 1 1]"""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"documents have at least one token each, got lengths {list(lengths)}: leave empty ones out")
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(list(lengths)))


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    causal: bool = True,
    documents: Tensor | None = None,
    parts: Sequence[Part] | None = None,
    window: int = 0,
) -> Tensor:
    """softmax(q k^T / sqrt(W)) v over the tokens of all ranks.   [B, H, T/n, W], twice [B, K, T/n, W] -> [B, H, T/n, W]

    `parts` says which tokens each rank holds, also of different numbers; None: `zigzag`. `documents`, the same on every
    rank, has the document of each token of the whole row, [T] or [B, T]: tokens see their own document only.
    With `window` a query sees the last so many keys alone, its own among them; a ring brings it all of them
    nevertheless (halo.py does not). ValueError for sizes that do not fit."""
    parts = checked_parts(q, k, v, group, documents, parts)
    return _Blocks.apply(q, k, v, _Ring(group, parts), rule_of(causal, documents, window))  # type: ignore[no-any-return]


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    causal: bool = True,
    documents: Tensor | None = None,
    parts: Sequence[Part] | None = None,
    window: int = 0,
) -> Tensor:
    """The same from all keys and values at once. ValueError also for parts of different lengths."""
    parts = checked_parts(q, k, v, group, documents, parts)
    sizes = [sum(map(len, part)) for part in parts]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"a gather takes parts of one length, got {sizes} tokens: pad rows to a multiple of {len(sizes)}, or take "
            "the ring, which does not mind"
        )
    return _Blocks.apply(q, k, v, _Gather(group, parts), rule_of(causal, documents, window))  # type: ignore[no-any-return]


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    causal: bool = True,
    documents: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """The same, with H/n heads a rank over whole rows, which are cut in order (`contiguous`, parts of one length).

    Each rank's attention is torch's; where it would need a mask of T x T, that of this file. ValueError also for heads
    that n does not divide."""
    n = group.size
    checked_parts(q, k, v, group, documents, contiguous(n * q.shape[2], n))
    heads, groups = q.shape[1], k.shape[1]
    if heads % n or groups % n:
        raise ValueError(
            f"ulysses deals heads out: {heads} query heads and {groups} key heads over {n} ranks do not come out even; "
            "take a cp that divides both, or ring or gather, which cut no heads"
        )
    q, k, v = _ToHeads.apply(torch.cat([_dealt(x, n) for x in (q, k, v)], 2), group).split(
        [heads // n, groups // n, groups // n], dim=1
    )
    if documents is None and not window:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != groups)
    else:
        y = _Blocks.apply(q, k, v, _Ring(group, ((range(q.shape[2]),),)), rule_of(causal, documents, window))
    return _ToTokens.apply(y, group)  # type: ignore[no-any-return]


# Two ways for the blocks to come to the queries


class _Ring:
    """Blocks go to the next rank, while this one computes with what it has."""

    def __init__(self, group: Group, parts: Sequence[Part]) -> None:
        self.group, self.parts, self.n = group, parts, len(parts)
        self.rank = group.rank if self.n > 1 else 0  # with one part everything is here, however large the group

    def start(self, x: Tensor, source: int, tag: int) -> tuple[Work, Work]:
        """Send x on, and receive what is like it but belongs to the tokens of rank `source`."""
        after, before = (self.rank + 1) % self.n, (self.rank - 1) % self.n
        shape = list(x.shape)
        shape[-2] = sum(map(len, self.parts[source]))
        expected = self.group.recv_start(before, tag, into=x.new_empty(shape))
        return expected, self.group.send(x, after, tag)

    def forward(self, queries: Queries, kv: Tensor) -> None:
        for hop in range(self.n):
            source = (self.rank - hop) % self.n
            last = hop == self.n - 1
            under_way = None if last else self.start(kv, (source - 1) % self.n, tag=0)
            queries.look(kv, self.parts[source])
            if under_way is not None:
                kv = _arrived(under_way)

    def backward(self, answers: Answers, kv: Tensor) -> Tensor:
        home: Tensor | None = None
        travelling: tuple[Work, Work] | None = None
        for hop in range(self.n):
            source = (self.rank - hop) % self.n
            last = hop == self.n - 1
            under_way = None if last else self.start(kv, (source - 1) % self.n, tag=0)
            grads = answers.give(kv, self.parts[source])
            if home is None:
                home = grads  # these tokens' own term waits here for those of the other ranks
            else:
                if travelling is not None:
                    grads += _arrived(travelling)
                travelling = self.start(grads, (source - 1) % self.n, tag=1)
            if under_way is not None:
                kv = _arrived(under_way)
        assert home is not None
        return home if travelling is None else home + _arrived(travelling)


class _Gather:
    """All blocks come at once; their gradients go back as a sum."""

    def __init__(self, group: Group, parts: Sequence[Part]) -> None:
        self.group, self.parts, self.rank = group, parts, group.rank

    def forward(self, queries: Queries, kv: Tensor) -> None:
        for part, block in zip(self.parts, self.group.all_gather(kv).chunk(len(self.parts)), strict=True):
            queries.look(block, part)

    def backward(self, answers: Answers, kv: Tensor) -> Tensor:
        # gathered again, and not kept: n times this rank's keys and values in each layer would undo what cp is for
        blocks = self.group.all_gather(kv).chunk(len(self.parts))
        grads = [answers.give(block, part) for part, block in zip(self.parts, blocks, strict=True)]
        return self.group.reduce_scatter(torch.cat(grads))


class _Blocks(Function):
    """Attention from blocks of keys that come in one of these ways."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, way: _Ring | _Gather, rule: Rule) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):  # what is added up here wants its fp32
            queries = Queries(q, way.parts[way.rank], k.shape[1], rule)
            way.forward(queries, torch.stack([k, v]))
        y = queries.answer()
        ctx.save_for_backward(q, k, v, y, queries.log_sum)
        ctx.way, ctx.rule = way, rule
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, y, log_sum = ctx.saved_tensors
        way = ctx.way
        answers = Answers(q, way.parts[way.rank], ctx.rule, y, log_sum, grad)
        grad_k, grad_v = way.backward(answers, torch.stack([k, v])).to(k.dtype)
        return answers.grad_q.flatten(1, 2).to(q.dtype), grad_k, grad_v, None, None


# Heads for tokens, and back


class _ToHeads(Function):
    """[n, B, H/n, T/n, W], a slice for each rank -> [B, H/n, T, W]; backward is _ToTokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _to_heads(x, group)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(grad, ctx.group), None


class _ToTokens(Function):
    """[B, H/n, T, W] -> [B, H, T/n, W]; backward is _ToHeads."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _to_tokens(y, group).transpose(0, 1).flatten(1, 2)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_heads(_dealt(grad, ctx.group.size), ctx.group), None


def _dealt(x: Tensor, n: int) -> Tensor:
    """[B, H, T, W] -> [n, B, H/n, T, W]"""
    return x.unflatten(1, (n, -1)).transpose(0, 1)


def _to_heads(x: Tensor, group: Group) -> Tensor:
    return torch.cat(list(group.all_to_all(x.contiguous())), dim=-2)


def _to_tokens(y: Tensor, group: Group) -> Tensor:
    return group.all_to_all(torch.stack(y.chunk(group.size, dim=-2)))


def _arrived(under_way: tuple[Work, Work]) -> Tensor:
    expected, sent = under_way
    x = expected.wait()
    sent.wait()
    assert x is not None
    return x


def checked_parts(
    q: Tensor, k: Tensor, v: Tensor, group: Group, documents: Tensor | None, parts: Sequence[Part] | None
) -> Sequence[Part]:
    """The parts. ValueError, with the numbers and the mend, for what does not fit."""
    if q.dim() != 4 or k.shape != v.shape or (*q.shape[:1], *q.shape[2:]) != (*k.shape[:1], *k.shape[2:]):
        raise ValueError(
            f"attention takes q [B, H, T, W] and k, v [B, K, T, W], got {tuple(q.shape)}, {tuple(k.shape)} and "
            f"{tuple(v.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads evenly: make one a multiple of the other"
        )
    if parts is None:
        parts = zigzag(group.size * q.shape[2], group.size)
    sizes = [sum(map(len, part)) for part in parts]
    if len(sizes) != group.size or sizes[group.rank] != q.shape[2]:
        raise ValueError(
            f"rank {group.rank} of {group.size} has {q.shape[2]} tokens, and parts have {sizes}: give all ranks the "
            "parts by which the row was cut"
        )
    if documents is not None and tuple(documents.shape) not in ((sum(sizes),), (q.shape[0], sum(sizes))):
        raise ValueError(
            f"documents of {q.shape[0]} rows are [{sum(sizes)}] or [{q.shape[0]}, {sum(sizes)}], got "
            f"{list(documents.shape)}: give those of whole rows, not of a rank's tokens"
        )
    return parts
