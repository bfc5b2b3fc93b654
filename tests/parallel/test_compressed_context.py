"""Compressed attention over ranks: against one process with the definition written out, and against the law's bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from labkit.comm.local import run_threads
from labkit.parallel.compressed_context import compressed_attention
from labkit.plan.laws import compressed_context as law
from labkit.plan.laws.context import sent as sent_by
from labkit.plan.model.cut_attention import CutAttention
from tests.cases import cases

MISTRAL = CutAttention(2**17, 8, 32, 8, 128, window=128)
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def drawn(heads, keys, length, dtype):
    stream = torch.Generator().manual_seed(0)
    shapes = [(2, n, length, 4) for n in (heads, keys, keys, heads)]
    return [torch.randn(shape, generator=stream, dtype=torch.float64).to(dtype) for shape in shapes]


def defined(q, k, v, window, stride):
    """The definition, one query at a time, for heads that share keys."""
    shared, rows = q.shape[1] // k.shape[1], []
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    for i in range(q.shape[2]):
        begin = max(0, i - window + 1)
        whole = [j for j in range(q.shape[2] // stride) if (j + 1) * stride <= i - window + 1]
        seen = [
            torch.cat(
                [
                    *(x[:, :, j * stride : (j + 1) * stride].mean(2, keepdim=True) for j in whole),
                    x[:, :, begin : i + 1],
                ],
                2,
            )
            for x in (k, v)
        ]
        weights = (q[:, :, i : i + 1] @ seen[0].mT / q.shape[-1] ** 0.5).softmax(-1)
        rows.append(weights @ seen[1])
    return torch.cat(rows, 2)


def on_rank(group, tensors, window, stride):
    q, k, v, grad = (x.chunk(group.size, 2)[group.rank].clone() for x in tensors)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    y = compressed_attention(q, k, v, group, window, stride)
    forward = group.ledger.sent_bytes()
    grads = torch.autograd.grad(y, (q, k, v), grad)
    return [y.detach(), *grads], (forward, group.ledger.sent_bytes() - forward)


@cases(
    ("n", "heads", "keys", "window", "stride", "dtype"),
    [
        (1, 2, 2, 3, 2, torch.float64), (2, 4, 2, 3, 2, torch.float64), (3, 2, 2, 1, 4, torch.float64),
        (3, 2, 1, 9, 2, torch.float64), (4, 2, 2, 5, 3, torch.float64), (4, 4, 2, 7, 1, torch.float64),
        (2, 2, 2, 4, 6, torch.float32), (4, 2, 2, 4, 2, torch.bfloat16),
    ],
)  # fmt: skip
def test_ranks_give_what_the_definition_says_and_send_what_the_law_says(n, heads, keys, window, stride, dtype):
    """Would catch a block that a query may not see yet, a halo that is a token short, means of other ranks' tokens in
    another place, and gradients that stay where they were made."""
    length = 24 if n != 3 else 24 + 12
    tensors = drawn(heads, keys, length, dtype)
    q, k, v, grad = (x.double() for x in tensors)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    y = defined(q, k, v, window, stride)
    wanted = [y.detach(), *torch.autograd.grad(y, (q, k, v), grad)]
    ranks = run_threads(on_rank, n, tensors, window, stride)
    for parts, whole in zip(zip(*(own for own, _ in ranks), strict=True), wanted, strict=True):
        torch.testing.assert_close(torch.cat(parts, 2).double(), whole, rtol=DTYPES[dtype], atol=DTYPES[dtype])
    layer = CutAttention(length, n, heads, keys, 4, rows=2, word=dtype.itemsize, window=window)
    for rank, (_, n_bytes) in enumerate(ranks):
        assert n_bytes == law.sent(layer, stride, rank)


def test_the_table_of_the_docstring_is_what_the_laws_give():
    """Would catch a law that was changed, and a table that was not."""
    lines = {line.split()[0]: line for line in (law.__doc__ or "").splitlines() if line.split()}
    for name, seq in (("32k", 2**15), ("128k", 2**17), ("1M", 2**20)):
        layer = replace(MISTRAL, seq=seq)
        numbers = [float(word) for word in lines[name].split()[1:]]
        found = [law.sent(layer, 4)[0] / 2**20, sent_by("ring", layer)[0] / 2**20]
        assert numbers == pytest.approx(found, rel=2e-3)
    assert 1 / 4 < law.ratio(MISTRAL, 4) < 1 / 3.9
    assert law.ratio(MISTRAL, 1) > 1, "blocks of one token compress nothing, and the halo comes on top"


def test_what_cannot_be_is_refused_with_the_numbers():
    """Would catch blocks that lie on two ranks, and a halo from further than the neighbour."""
    q = torch.zeros(1, 2, 6, 4)
    for (window, stride), words in {
        (3, 4): "6 tokens a rank do not fill blocks of 4", (9, 2): "a window of 9 reaches over more than the 6 tokens",
        (0, 2): "at least 1; got 0, 2",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=words):
            run_threads(lambda group, a=window, b=stride: compressed_attention(q, q, q, group, a, b), 2)
    with pytest.raises(ValueError, match="2 ranks or more"):
        law.ratio(replace(MISTRAL, n=1), 4)
