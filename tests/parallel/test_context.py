"""Attention over a sequence that is cut over ranks, against torch's attention in one process and torch's own ring."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from labkit import Cluster, run_threads
from labkit.parallel import blockwise_attention
from labkit.parallel.blockwise_attention import positions_of
from labkit.parallel.context import (
    contiguous,
    documents_of,
    gathered_attention,
    ring_attention,
    ulysses_attention,
    zigzag,
)
from labkit.parallel.contexts import Context
from tests.cases import cases

WAYS = {"ring": ring_attention, "gather": gathered_attention, "ulysses": ulysses_attention}
SIZES = (1, 2, 3, 4)
LENGTH, WIDTH = 12, 4
PACKED = documents_of((1, 6, 5))
"""Documents that begin and end inside a rank's tokens."""
OWN = torch.stack([PACKED, documents_of((4, 4, 4))])
"""Each row with documents of its own."""


def made(length=LENGTH, heads=4, key_heads=4, dtype=torch.float64):
    """Queries, keys, values and a gradient for the answer, of whole rows."""
    stream = torch.Generator().manual_seed(length + key_heads)
    shapes = [(2, count, length, WIDTH) for count in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, generator=stream, dtype=torch.float64).to(dtype) for shape in shapes]


def whole(tensors, causal=True, documents=None):
    """The answer and the three gradients of torch's attention in one process."""
    q, k, v, grad = tensors
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    length = q.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool)
    mask = mask.tril() if causal else mask
    if documents is not None:
        mask = mask & (documents[..., :, None] == documents[..., None, :])
        mask = mask[:, None] if mask.dim() == 3 else mask
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), grad)]


def cut(way, tensors, n, parts=None, **options):
    """The same from n ranks, put together again."""
    if parts is None:
        parts = (contiguous if way == "ulysses" else zigzag)(tensors[0].shape[2], n)
    elif way != "ulysses":
        options["parts"] = parts

    def on_rank(group):
        mine = positions_of(parts[group.rank])
        q, k, v, grad = (x[:, :, mine].clone() for x in tensors)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        y = WAYS[way](q, k, v, group, **options)
        return [y.detach(), *torch.autograd.grad(y, (q, k, v), grad)]

    back = torch.cat([positions_of(part) for part in parts]).argsort()
    return [torch.cat(pieces, 2)[:, :, back] for pieces in zip(*run_threads(on_rank, n), strict=True)]


def apart(mine, theirs):
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(mine, theirs, strict=True))


@cases(
    ("way", "n", "key_heads"),
    [(way, n, heads) for way in WAYS for n in SIZES for heads in (1, 2, 12) if way != "ulysses" or heads % n == 0],
)
@cases("causal", (True, False))
@cases("documents", (None, PACKED, OWN))
def test_answer_and_gradients_are_those_of_one_process(way, n, key_heads, causal, documents):
    """Would catch a merge that forgets to weigh, a mask from a rank's own positions, a gradient that stops a hop short,
    and query heads that meet another group's keys."""
    tensors = made(heads=12, key_heads=key_heads)
    options = {"causal": causal, "documents": documents}
    assert apart(cut(way, tensors, n, **options), whole(tensors, **options)) < 1e-13


@cases("way", ("ring", "gather"))
@cases("causal", (True, False))
def test_tiles_change_nothing(way, causal, monkeypatch):
    """Would catch a tile that starts at the wrong place of a part which has two runs."""
    monkeypatch.setattr(blockwise_attention, "TILE", 2)
    tensors = made(length=20, key_heads=2)
    assert apart(cut(way, tensors, 2, causal=causal), whole(tensors, causal)) < 1e-13


@cases(("length", "n"), [(7, 2), (13, 3), (11, 4), (10, 4)])
@cases("order", (zigzag, contiguous))
def test_a_ring_takes_parts_of_different_lengths(length, n, order):
    """Would catch a buffer for the next block that is as long as the last one."""
    tensors = made(length=length)
    assert apart(cut("ring", tensors, n, order(length, n)), whole(tensors)) < 1e-13


@cases("n", SIZES)
@cases("way", WAYS)
def test_sixteen_bits_lose_no_more_than_torchs_own_attention_does(n, way):
    """Would catch scores and sums over keys that are rounded to bf16 at each step."""
    tensors = made(length=48, heads=12, key_heads=12, dtype=torch.bfloat16)
    exact = whole([x.double() for x in tensors])
    assert apart(cut(way, tensors, n), exact) <= 1.5 * apart(whole(tensors), exact)


def test_autocast_leaves_sums_in_fp32():
    """Would catch products of fp32 tensors that autocast turns into bf16 products inside the attention."""
    tensors = made(dtype=torch.float32)

    def on_rank(group):
        q, k, v, _ = tensors
        with torch.autocast("cpu", torch.bfloat16):
            return ring_attention(q, k, v, group, parts=((range(LENGTH),),))

    assert apart(run_threads(on_rank, 1), [whole(tensors)[0]]) < 1e-6


@cases("n", SIZES)
@cases("way", WAYS)
@cases("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_bytes_sent_are_those_of_the_law(n, way, dtype):
    """Would catch a block that goes the whole way round, gradients that travel one hop too many, and a narrow sum."""
    tensors = made(heads=12, key_heads=12 if way == "ulysses" else 3, dtype=dtype)
    rows, key_heads, word = 2, tensors[1].shape[1], dtype.itemsize
    parts = (contiguous if way == "ulysses" else zigzag)(LENGTH, n)

    def on_rank(group):
        mine = positions_of(parts[group.rank])
        q, k, v, grad = (x[:, :, mine].clone().requires_grad_() for x in tensors)
        y = WAYS[way](q, k, v, group)
        forward = group.ledger.sent_bytes()
        y.backward(grad.detach())
        return forward, group.ledger.sent_bytes() - forward

    local = rows * LENGTH // n * WIDTH
    if way == "ulysses":
        law = ((n - 1) * 2 * (12 + key_heads) * local * word // n,) * 2
    else:
        block = 2 * key_heads * local
        law = (n - 1) * block * word, (n - 1) * block * (word + max(word, 4))
    assert run_threads(on_rank, n) == [law] * n


@cases("n", (2, 3, 4))
def test_zigzag_gives_each_rank_the_same_number_of_scores_at_every_hop(n):
    """Would catch chunks in order, with which the last rank computes 2n-1 times as much as the first."""
    parts, rule = zigzag(8 * n, n), blockwise_attention.Rule(causal=True, documents=None)

    def scores(rank, source):
        places = [(mine, keys) for mine in parts[rank] for keys in parts[source]]
        masks = [rule.between(mine, keys, torch.device("cpu")) for mine, keys in places]
        return sum(int((torch.ones(4, 4) * torch.as_tensor(mask)).sum()) for mask in masks)

    found = [[scores(rank, (rank - hop) % n) for rank in range(n)] for hop in range(n)]
    assert found == [[16 + 2 * 10] * n, *[[32] * n] * (n - 1)]


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.rest)])
def test_the_ring_gives_what_torchs_own_ring_attention_gives(n):
    """Would catch an order of tokens, a scale or a mask that is right against itself only. (torch's ring is causal in
    the same zigzag order, which it calls head-tail.)"""

    def parity(group):
        from labkit.comm import bridge
        from tests.comm import stock

        _, theirs = stock.context(bridge.process_group(group))
        stream = torch.Generator().manual_seed(group.rank)
        q, k, v, grad = (torch.randn(1, 2, 16, 8, generator=stream) for _ in range(4))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        y = ring_attention(q, k, v, group)
        mine = [y.detach(), *torch.autograd.grad(y, (q, k, v), grad)]
        return max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True))

    with Cluster(n, device="cpu", quiet=True) as cluster:
        assert max(reply.value for reply in cluster.run(parity)) < 2e-6


def test_a_row_is_cut_where_its_positions_say():
    """Would catch tokens in one order and positions in another."""

    def on_rank(kind, group):
        context = Context(kind, group)
        rows = torch.arange(24).reshape(2, 12)
        assert torch.equal(context.cut(rows)[0], context.positions(12 // group.size, None))
        assert torch.equal(context.cut(rows)[1], 12 + context.positions(12 // group.size, None))
        return context.cut(rows)[0].tolist()

    assert run_threads(lambda group: on_rank("ring", group), 2) == [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
    assert run_threads(lambda group: on_rank("ulysses", group), 2) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


def q_and_k(query_heads=4, key_heads=4, tokens=6):
    return torch.zeros(2, query_heads, tokens, WIDTH), torch.zeros(2, key_heads, tokens, WIDTH)


REFUSED = [
    ("ulysses", q_and_k(6, 6), {}, "6 query heads and 6 key heads over 4 ranks"),
    ("ulysses", q_and_k(4, 2), {}, "4 query heads and 2 key heads over 4 ranks"),
    ("ring", q_and_k(4, 3), {}, "4 query heads cannot share 3 key heads"),
    ("ring", (q_and_k()[0], q_and_k(tokens=5)[1]), {}, r"got \(2, 4, 6, 4\)"),
    ("ring", q_and_k(), {"parts": zigzag(20, 4)}, r"parts have \[5, 5, 5, 5\]"),
    ("gather", q_and_k(), {"parts": contiguous(27, 4)}, r"one length, got \[6, 7, 7, 7\]"),
    ("gather", q_and_k(), {"documents": PACKED[:6]}, r"are \[24\] or \[2, 24\], got \[6\]"),
]


@cases(("way", "tensors", "options", "words"), REFUSED)
def test_what_does_not_fit_is_refused_with_the_numbers(way, tensors, options, words):
    """Would catch an error from deep inside a product, or a hang of the ranks that had nothing to refuse."""
    q, k = tensors
    with pytest.raises(ValueError, match=words):
        run_threads(lambda group: WAYS[way](q, k, k, group, **options) if group.rank == 0 else None, 4)


def test_rows_and_documents_that_cannot_be_cut_are_refused():
    """Would catch tokens that nobody gets, and a document without tokens."""
    with pytest.raises(ValueError, match="10 tokens a row have no 4 equal parts"):
        run_threads(lambda group: Context("ring", group).cut(torch.zeros(1, 10)), 4)
    with pytest.raises(ValueError, match=r"lengths \[3, 0\]"):
        documents_of((3, 0))
