"""Accumulated micro-batches against one big batch in float64, with ragged numbers of tokens that count."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import labkit
from labkit.comm.local import run_threads
from labkit.train.accumulate import accumulate, loss_factor, n_tokens
from labkit.train.gpt import GPT, GPTConfig, cross_entropy

CONFIG = GPTConfig(n_layer=1, d_model=8, n_head=2, vocab=11, seq=6)


def ragged(n_rows, seed=0):
    """Rows of six tokens of which some count: none in the first, all in the last."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(11, (n_rows, 6), generator=generator) for _ in range(2))
    lengths = torch.randint(7, (n_rows,), generator=generator)
    lengths[0], lengths[-1] = 0, 6
    targets[torch.arange(6) >= lengths[:, None]] = -100
    return tokens, targets


def micros_of(tokens, targets, sizes):
    return list(zip(tokens.split(sizes), targets.split(sizes), strict=True))


def one_big_batch(tokens, targets):
    """Loss and gradients of the mean over all tokens that count, taken at once."""
    model = GPT(CONFIG, seed=0).double()
    logits = model(tokens)
    counted = targets != -100
    loss = -logits.log_softmax(-1)[counted].gather(1, targets[counted][:, None]).mean()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def assert_close(found, expected):
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sizes", [[6], [1, 5], [3, 3], [2, 1, 3], [1] * 6])
def test_gradients_and_loss_are_those_of_one_big_batch(sizes):
    """Would catch a mean of means, and a micro-batch without any token that turns everything into NaN."""
    tokens, targets = ragged(6)
    model = GPT(CONFIG, seed=0).double()
    loss = accumulate(model, micros_of(tokens, targets, sizes))
    expected, grads = one_big_batch(tokens, targets)
    assert_close([loss, *(p.grad for p in model.parameters())], [expected, *grads])


def test_the_common_mistake_gives_something_else():
    """Would catch test data on which a mean of means is right by accident."""
    tokens, targets = ragged(6)
    model = GPT(CONFIG, seed=0).double()
    halves = micros_of(tokens, targets, [3, 3])
    means = [cross_entropy(model(x), y) for x, y in halves]
    expected, grads = one_big_batch(tokens, targets)
    (sum(means) / 2).backward()
    assert abs(sum(means).item() / 2 - expected.item()) > 1e-6
    assert (model.head.out.weight.grad - grads[0]).abs().max() > 1e-6


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_mean_over_ranks_is_the_gradient_of_one_big_batch(n):
    """Would catch tokens counted on one rank only, and a factor that forgets that strategies take the mean."""
    tokens, targets = ragged(3 * n)

    def work(group):
        rows = slice(3 * group.rank, 3 * group.rank + 3)
        model = GPT(CONFIG, seed=0).double()
        loss = accumulate(model, micros_of(tokens[rows], targets[rows], [1, 2]), group)
        return [loss, *(group.all_reduce(p.grad, op="mean") for p in model.parameters())]

    expected, grads = one_big_batch(tokens, targets)
    for found in run_threads(work, n):
        assert_close(found, [expected, *grads])


def test_ranks_may_have_different_numbers_of_micro_batches():
    """Would catch a mean over micro-batches, and a rank without any that leaves the others waiting."""
    tokens, targets = ragged(4)
    parts = [[], micros_of(tokens, targets, [1, 1, 2]), []]

    def work(group):
        return loss_factor([n_tokens(y) for _, y in parts[group.rank]], group)

    assert run_threads(work, 3) == [3 / int((targets != -100).sum())] * 3


def test_one_number_is_sent_for_the_tokens():
    """Would catch a message for every micro-batch."""

    def work(group):
        loss_factor([3, 1, 4, 1, 5, 9], group)
        return group.ledger.calls("all_reduce"), group.ledger.sent_bytes()

    for calls, sent in run_threads(work, 2):
        assert calls == 1
        assert sent == 8


def test_every_micro_batch_but_the_last_runs_inside_accumulating():
    """Would catch gradients that travel once a micro-batch, and a last one that never travels."""
    inside, seen = [False], []

    @contextmanager
    def accumulating():
        inside[0] = True
        yield
        inside[0] = False

    tokens, targets = ragged(5)
    model = GPT(CONFIG, seed=0)
    model.register_forward_pre_hook(lambda *_: seen.append(("forward", inside[0])))
    model.head.out.weight.register_post_accumulate_grad_hook(lambda _: seen.append(("backward", inside[0])))
    accumulate(model, micros_of(tokens, targets, [2, 2, 1]), accumulating=accumulating)
    expected = [(kind, index < 2) for index in range(3) for kind in ("forward", "backward")]
    assert seen == expected


def test_torchs_data_parallel_gets_the_gradient_of_one_big_batch():
    """Would catch a factor that is right for our strategies only; on real processes, with no_sync."""
    tokens, targets = ragged(6)

    def work(group, tokens, targets, config):
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(GPT(config, seed=0).double())
        rows = slice(3 * group.rank, 3 * group.rank + 3)
        micros = list(zip(tokens[rows].split([2, 1]), targets[rows].split([2, 1]), strict=True))
        loss = accumulate(model, micros, group, model.no_sync)
        return [loss, *(p.grad for p in model.parameters())]

    expected, grads = one_big_batch(tokens, targets)
    with labkit.Cluster(2, device="cpu", quiet=True) as cluster:
        for reply in cluster.run(work, tokens, targets, CONFIG):
            assert_close(reply.value, [expected, *grads])


def test_gradients_are_added_to_what_is_there():
    """Would catch an accumulate that forgets what was there: the strategy owns zero_grad."""
    tokens, targets = ragged(2)
    model = GPT(CONFIG, seed=0).double()
    for _ in range(2):
        accumulate(model, micros_of(tokens, targets, [2]))
    _, grads = one_big_batch(tokens, targets)
    assert_close([p.grad / 2 for p in model.parameters()], grads)


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 1000), max_size=4), min_size=1, max_size=4))
def test_the_factor_is_ranks_over_tokens_whatever_the_counts(counts):
    """Would catch a factor that differs between ranks, or divides by micro-batches."""
    total = sum(map(sum, counts))

    def work(group):
        try:
            return loss_factor(counts[group.rank], group)
        except ValueError as error:
            return str(error)

    found = run_threads(work, len(counts))
    if total:
        assert found == [len(counts) / total] * len(counts)
    else:
        assert all("no token counts" in each and f"{len(counts)} rank(s)" in each for each in found)


def test_a_step_without_any_token_is_refused_before_anything_runs():
    """Would catch NaN gradients, and an error on one rank while the others wait."""

    def work(group):
        model = nn.Linear(1, 1)
        with pytest.raises(ValueError, match="no token counts in any micro-batch of 2 rank"):
            accumulate(model, [(torch.zeros(1, 1), torch.full((1, 1), -100))], group)
        return model.weight.grad is None

    assert run_threads(work, 2) == [True, True]
    with pytest.raises(ValueError, match="no token counts"):
        accumulate(GPT(CONFIG), [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_adds_up_to_the_same_within_its_rounding(dtype):
    """Would catch a loss summed in half precision: a sum over tokens is larger than a mean by their number."""
    tokens, targets = ragged(6)
    model = GPT(CONFIG, seed=0).to(dtype)
    loss = accumulate(model, micros_of(tokens, targets, [2, 2, 2]))
    expected, _ = one_big_batch(tokens, targets)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - expected.item()) < 16 * torch.finfo(dtype).eps
