"""A mixture of experts against a plain loop over tokens and experts, and dealt out to ranks against one process."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from labkit.comm import by_messages
from labkit.comm.local import run_threads
from labkit.parallel import expert
from labkit.plan.laws.experts import expert_traffic
from labkit.train.config import GPTConfig
from labkit.train.gpt import MLP
from labkit.train.moe import BALANCE_LOSS, BIAS_STEP, MoE
from tests.cases import cases

BASE = GPTConfig(n_layer=1, d_model=8, n_head=2, n_expert=12, expert_ff=6, top_k=2)
CONFIGS = {
    "k=1": replace(BASE, top_k=1),
    "k=2": BASE,
    "k=8": replace(BASE, top_k=8),
    "drops": replace(BASE, capacity=0.75),
    "k=1 drops": replace(BASE, top_k=1, capacity=0.5),
    "shared": replace(BASE, n_shared=2, balance="none"),
    "bias": replace(BASE, balance="bias", capacity=1.0),
}
LENGTH = 7


def layer_of(config):
    """A layer whose values are the same in every thread: torch's own stream belongs to all of them."""
    layer = MoE(config, MLP).double()
    stream = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=stream, dtype=torch.float64) * (0.1 if p is layer.bias else 0.5))
    return layer


def rows(n_rows):
    return torch.randn(n_rows, LENGTH, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def plain(layer, x, config):
    """The definition, one token and one expert at a time: output, balance loss, rows by expert, rows dropped."""
    out, loss, load, dropped = [], 0.0, [0] * config.n_expert, 0
    for sequence in x:
        taken, seen = [0] * config.n_expert, [0] * config.n_expert
        room = math.inf
        if config.capacity is not None:
            room = math.ceil(config.capacity * config.top_k * len(sequence) / config.n_expert)
        mean = torch.zeros(config.n_expert, dtype=x.dtype)
        for token in sequence:
            p = torch.exp(layer.router.weight @ token)
            p = p / p.sum()
            mean = mean + p / len(sequence)
            score = p + (0 if layer.bias is None else layer.bias)
            best = sorted(range(config.n_expert), key=lambda e: -score[e].item())[: config.top_k]
            total = sum(p[e] for e in best) if config.top_k > 1 else 1.0
            y = torch.zeros_like(token)
            for e in best:
                seen[e] += 1
                if taken[e] == room:
                    dropped += 1
                    continue
                taken[e] += 1
                up, down = layer.experts[str(e)].up, layer.experts[str(e)].down
                y = y + p[e] / total * (down.weight @ F.gelu(up.weight @ token + up.bias) + down.bias)
            out.append(y if layer.shared is None else y + layer.shared(token))
        if config.balance == "loss":
            share = torch.tensor(seen, dtype=x.dtype) / sum(seen)
            loss = loss + BALANCE_LOSS * config.n_expert * (share * mean).sum() / len(x)
        load = [a + b for a, b in zip(load, seen, strict=True)]
    return torch.stack(out).view(x.shape), loss, load, dropped


def gradients(layer):
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


@cases("name", CONFIGS)
def test_the_layer_does_what_a_loop_over_tokens_and_experts_does(name):
    """Would catch rows added to another token, weights of another expert, capacity that drops late rows first, a bias
    that changes the weights, and a balance loss of other shares. Outputs and all gradients in float64."""
    config, x = CONFIGS[name], rows(3).requires_grad_()
    layer, other = layer_of(config), layer_of(config)
    y = layer(x)
    y.square().mean().backward()
    x2 = x.detach().clone().requires_grad_()
    want, loss, load, dropped = plain(other, x2, config)
    (want.square().mean() + loss).backward()
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, x2.grad, rtol=1e-10, atol=1e-13)
    found, wanted = gradients(layer), gradients(other)
    for key in found:
        torch.testing.assert_close(found[key], wanted.get(key, torch.zeros_like(found[key])), rtol=1e-10, atol=1e-13)
    assert set(wanted) <= set(found)
    assert "bias" not in found
    assert (layer.counts.tolist(), layer.load.tolist(), layer.dropped) == (load, load, dropped)
    assert (dropped > 0) == (config.capacity is not None)


def one_rank(group, config, x, using=None):
    """This rank's share of the rows through its experts: output, gradients as a strategy would leave them, bytes."""
    layer = layer_of(config)
    expert.deal(layer, group.using(all_to_all=using) if using else group)
    mine = x.tensor_split(group.size)[group.rank].clone().requires_grad_()
    layer.rows = len(mine)
    y = layer(mine)
    y.square().mean().backward()
    sent = group.ledger.sent_bytes()
    grads = gradients(layer)
    for name, grad in grads.items():
        if not name.startswith("experts."):  # the mean over `data`; that of experts over `expert_dp` is here their own
            grads[name] = group.all_reduce(grad, op="mean")
    return y.detach(), mine.grad / group.size, grads, sent, layer.counts.tolist()


@cases("name", CONFIGS)
@cases("n", [1, 2, 3, 4])
def test_experts_on_any_number_of_ranks_give_the_values_and_gradients_of_one_process(name, n):
    """Would catch rows that come back in another order, gradients of experts that are sums for means, and an expert
    that lacks the tokens of other ranks; one process has all rows and all experts."""
    config, x = CONFIGS[name], rows(12)
    whole = layer_of(config)
    x0 = x.clone().requires_grad_()
    y0 = whole(x0)
    y0.square().mean().backward()
    want = gradients(whole)
    for using in (None, by_messages.all_to_all) if name == "k=2" else (None,):
        ranks = run_threads(one_rank, n, config, x, using)
        torch.testing.assert_close(torch.cat([y for y, *_ in ranks]), y0.detach(), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(torch.cat([dx for _, dx, *_ in ranks]), x0.grad, rtol=1e-11, atol=1e-15)
        found = {}
        for _, _, grads, _, _ in ranks:
            found |= grads
        assert found.keys() == want.keys()
        for key, grad in found.items():
            torch.testing.assert_close(grad, want[key], rtol=1e-10, atol=1e-15)


@cases("name", ["k=1", "k=2", "k=8"])
@cases("n", [1, 2, 3, 4])
def test_bytes_are_those_of_the_counts(name, n):
    """Would catch rows that travel although they stay, a gradient that is sent twice, and a law that forgets a way."""
    ranks = run_threads(one_rank, n, CONFIGS[name], rows(12))
    laws = expert_traffic([counts for *_, counts in ranks], n)
    for (*_, sent, _), (out, come) in zip(ranks, laws, strict=True):
        assert sent == 2 * (out + come) * 8 * 8 + 12 * 8 * (n - 1) // n


def test_an_expert_that_nobody_wants_and_a_rank_without_rows_hold_nobody_up():
    """Would catch ranks whose graphs differ, so that one waits in backward for a message that is never sent."""

    def lonely(group):
        layer = layer_of(CONFIGS["k=1"])
        with torch.no_grad():
            layer.router.weight.zero_()  # all alike: the first is taken
        expert.deal(layer, group)
        x = rows(4)[: group.rank].clone().requires_grad_()
        y = layer(x)
        y.sum().backward()
        return [p.grad is not None for p in layer.experts.parameters()]

    assert all(all(filled) and filled for filled in run_threads(lonely, 3))


def test_the_bias_evens_the_load_and_leaves_gradients_alone():
    """Would catch a step in the wrong direction, which makes the busiest expert busier, or one by the error's size."""
    layer, x = layer_of(replace(BASE, balance="bias", top_k=1)), rows(16)
    with torch.no_grad():
        layer.bias.zero_()
    layer(x)
    first = layer.counts.max().item()
    before = layer.bias.clone()
    for _ in range(150):
        layer(x).sum().backward()
        layer.balance_()
    layer(x)
    assert layer.counts.max().item() < first
    steps = (layer.bias - before) / BIAS_STEP
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-6)
    assert layer.bias.grad is None


def test_experts_that_do_not_divide_are_refused():
    """Would catch a rank with more experts than the counts that its peers sum up for it."""

    def refused(group):
        with pytest.raises(ValueError, match="12 experts have no 5 equal parts"):
            expert.deal(torch.nn.Sequential(layer_of(BASE)), group)

    run_threads(refused, 5)
