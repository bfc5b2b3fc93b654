"""Packed documents: each is treated in its row as if it were alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from labkit.comm.local import run_threads
from labkit.train.gpt import GPT, GPTConfig
from labkit.train.packed import checked, places, share, weighted
from tests.cases import cases

SIZES = {"n_layer": 2, "d_model": 24, "n_head": 4, "vocab": 19, "seq": 11}
DOCUMENTS = torch.tensor([[0] * 11, [0, 0, 0, 1, 1, 4, 4, 4, 4, 4, 7], list(range(11))])
"""One document that fills its row, four of several lengths, and eleven of one token each."""


def tokens_for(documents):
    return torch.randint(SIZES["vocab"], documents.shape, generator=torch.Generator().manual_seed(4))


@cases("position", ["learned", "rotary"])
@cases("kv_heads", [None, 2])
def test_a_document_in_a_packed_row_gets_the_scores_and_gradients_that_it_gets_alone(position, kv_heads):
    """Would catch a token that sees another document, positions that go on from document to document or from those of
    another row, and gradients that leave a document."""
    model = GPT(GPTConfig(**SIZES, position=position, kv_heads=kv_heads), seed=1).double()
    tokens = tokens_for(DOCUMENTS)
    logits = model(tokens, DOCUMENTS)
    alone = torch.empty_like(logits)
    for row, numbers in enumerate(DOCUMENTS):
        for number in numbers.unique():
            alone[row, numbers == number] = model(tokens[row, numbers == number][None])[0]
    torch.testing.assert_close(logits, alone, rtol=1e-12, atol=1e-12)
    weights = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    params = list(model.parameters())
    mine, theirs = (torch.autograd.grad((y * weights).sum(), params, allow_unused=True) for y in (logits, alone))
    torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)
    assert (logits[1] - model(tokens)[1]).abs().max() > 1e-3, "without documents the rows are others"


def test_places_start_anew_in_each_document_also_for_some_tokens_of_a_row():
    """Would catch places that are counted among the tokens at hand, where cp has cut the row, and numbers of documents
    that are taken for places."""
    whole = [[*range(11)], [0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0], [0] * 11]
    assert places(torch.arange(11), DOCUMENTS).tolist() == whole
    some = torch.tensor([0, 1, 9, 10])  # as in zigzag order
    assert places(some, DOCUMENTS).tolist() == [[row[k] for k in some.tolist()] for row in whole]
    assert places(some, None) is some


def test_shares_of_ranks_and_micro_batches_make_the_mean_over_all_targets_that_count():
    """Would catch a mean of means, in which a target counts more where there are few, and a micro-batch without any
    that makes everything NaN."""
    stream = torch.Generator().manual_seed(6)
    logits = torch.randn(2, 3, 4, 19, dtype=torch.float64, generator=stream)  # ranks, micro-batches, tokens
    targets = torch.randint(19, (2, 3, 4), generator=stream)
    targets[0, 1] = targets[1, 0, :3] = targets[1, 2, 1] = -100

    def rank(group):
        scores, wanted = logits[group.rank].clone().requires_grad_(), targets[group.rank]
        each = share(wanted, 3, group)
        losses = [weighted(F.cross_entropy(x, t), t, each) for x, t in zip(scores, wanted, strict=True)]
        loss = sum(losses) / 3
        loss.backward()
        return loss.detach(), scores.grad

    found = run_threads(rank, 2)
    every = logits.clone().requires_grad_()
    mean = F.cross_entropy(every.view(-1, 19), targets.view(-1))
    mean.backward()
    assert sum(loss for loss, _ in found) / 2 == pytest.approx(float(mean.detach()), abs=1e-14)
    torch.testing.assert_close(torch.stack([grad for _, grad in found]) / 2, every.grad, rtol=1e-13, atol=1e-15)


@cases(
    ("documents", "told"),
    [
        (torch.zeros(11, dtype=torch.int64), r"shape \[3, 11\], got torch.int64 \[11\]"),
        (torch.zeros(3, 5, dtype=torch.int64), "also where cp cuts rows"),
        (torch.zeros(3, 11), "torch.float32"),
        (DOCUMENTS.flip(1), "number them anew"),
    ],
)
def test_numbers_that_say_of_no_token_to_which_document_it_belongs_are_refused(documents, told):
    """Would catch documents of a rank's tokens in the place of those of the row, and one that is in two pieces."""
    with pytest.raises(ValueError, match=told):
        checked(documents, tokens_for(DOCUMENTS))


def test_a_step_in_which_nothing_counts_is_refused_on_every_rank():
    """Would catch a division by zero, and a rank that waits for the others."""

    def rank(group):
        with pytest.raises(ValueError, match="no target of this step counts"):
            share(torch.full((2, 3), -100), 1, group)
        return True

    assert all(run_threads(rank, 2))
