"""Blocks with experts, two halves of a batch in turns: against one process, the ledger, and simulated links."""

from __future__ import annotations

import copy
import time
from dataclasses import replace

import pytest
import torch

from labkit.comm.local import run_threads
from labkit.parallel import expert
from labkit.parallel.two_batch_overlap import in_two_batches
from labkit.plan.laws.two_batch_overlap import halves_s, overlap, whole_s
from labkit.plan.machine.topology import Links
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT
from tests.cases import cases
from tests.simulated import simulate

BASE = GPTConfig(n_layer=2, d_model=8, n_head=2, vocab=16, seq=6, n_expert=12, expert_ff=6, top_k=2, position="rotary")
CONFIGS = {
    "k=2": BASE,
    "shared, drops": replace(BASE, n_shared=1, top_k=1, capacity=0.75),
    "bias": replace(BASE, balance="bias"),
    "dense": replace(BASE, n_expert=0),
}
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-4}


def blocks_of(config, dtype):
    return GPT(config, seed=1).to(dtype).blocks


def batch(n_rows, dtype):
    return torch.randn(n_rows, 6, 8, generator=torch.Generator().manual_seed(5), dtype=dtype)


def spread(n):
    """Sequences of each rank: different numbers, one of them odd, and one rank with a single one."""
    return (4, 1, 5, 2)[:n]


def gradients(blocks):
    return {name: p.grad.clone() for name, p in blocks.named_parameters() if p.grad is not None}


def one_rank(group, config, x, halves, dtype):
    """A rank's share: output, gradient of it, gradients as a strategy would leave them, loads and bytes by collective.

    The loss is a sum, so that ranks with different numbers of sequences need no weights."""
    blocks = expert.deal(copy.deepcopy(blocks_of(config, dtype)), group)
    for _, layer in expert.layers_of(blocks):
        layer.rows = len(x)
    own = x.split(spread(group.size))[group.rank].clone().requires_grad_()
    y = own
    if halves:
        y = in_two_batches(blocks, y, halves)
    else:
        for block in blocks:
            y = block(y)
    y.square().sum().backward()
    sent = group.ledger.sent_bytes()
    loads = [layer.load for _, layer in expert.layers_of(blocks)]
    grads = gradients(blocks)
    for name, grad in grads.items():
        # experts have been given 1/n of what they would have alone: a strategy's mean over those who hold them
        grads[name] = grad * group.size if ".experts." in name else group.all_reduce(grad)
    return y.detach(), own.grad, grads, loads, sent


def one_process(config, x, dtype):
    blocks = blocks_of(config, dtype)
    for _, layer in expert.layers_of(blocks):
        layer.rows = len(x)
    own = x.clone().requires_grad_()
    y = own
    for block in blocks:
        y = block(y)
    y.square().sum().backward()
    return y.detach(), own.grad, gradients(blocks), [layer.load for _, layer in expert.layers_of(blocks)]


@cases(
    ("name", "n", "halves", "dtype"),
    [
        *(("k=2", n, 2, torch.float64) for n in (1, 2, 3, 4)),
        ("k=2", 2, 3, torch.float64), ("k=2", 2, 1, torch.float64),
        ("shared, drops", 4, 2, torch.float64), ("shared, drops", 2, 2, torch.float32), ("bias", 3, 2, torch.float64),
        ("dense", 2, 2, torch.float64),
    ],
)  # fmt: skip
def test_halves_give_the_values_and_gradients_of_one_process(name, n, halves, dtype):
    """Would catch rows that come home to the other half, a gradient that is waited for before it is sent, a balance
    loss over half of the sequences, and a half without sequences that nobody answers."""
    config, x = CONFIGS[name], batch(sum(spread(n)), dtype)
    y, dx, grads, loads = one_process(config, x, dtype)
    ranks = run_threads(one_rank, n, config, x, halves, dtype)
    near = {"rtol": DTYPES[dtype], "atol": DTYPES[dtype]}
    torch.testing.assert_close(torch.cat([out for out, *_ in ranks]), y, **near)
    torch.testing.assert_close(torch.cat([grad for _, grad, *_ in ranks]), dx, **near)
    together = {}
    for _, _, own, _, _ in ranks:
        together |= own
    assert together.keys() == grads.keys()
    for key, grad in together.items():
        torch.testing.assert_close(grad, grads[key], **near)
    for number, load in enumerate(loads):
        assert torch.equal(sum(own[number] for *_, own, _ in ranks), load)


@cases(("n", "name"), [(1, "k=2"), (2, "k=2"), (4, "shared, drops")])
def test_halves_send_the_bytes_of_the_whole_and_counts_once_more(n, name):
    """Would catch rows that are padded to equal parts, or a gradient that travels twice."""
    x = batch(sum(spread(n)), torch.float64)
    whole, halves = (run_threads(one_rank, n, CONFIGS[name], x, k, torch.float64) for k in (0, 2))
    counts = 2 * 12 * 8 * (n - 1) // n  # two layers
    for (*_, before), (*_, after) in zip(whole, halves, strict=True):
        assert after - before == counts
        assert before > counts or n == 1


def test_one_half_computes_while_the_rows_of_the_other_are_on_their_way():
    """Would catch halves one after the other: at each piece of work but the first, forward and backward, messages of
    the other half are under way."""

    def on_rank(group):
        blocks = expert.deal(blocks_of(replace(BASE, n_layer=3), torch.float64), group)
        seen = {"forward": [], "backward": []}

        def note(way):
            seen[way].append(len(group.ledger.under_way))

        for block in blocks:
            for part in (block.attention, block.mlp.experts):
                # before the module computes, and before its backward does
                call = part.forward
                part.forward = lambda *args, call=call: (note("forward"), call(*args))[1]

        class Noted(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, grad):
                note("backward")
                return grad

        for block in blocks:
            for part in (block.attention, block.mlp.experts):
                call = part.forward
                part.forward = lambda *args, call=call: Noted.apply(call(*args))
        y = in_two_batches(blocks, batch(4, torch.float64).requires_grad_())
        y.sum().backward()
        return seen["forward"], seen["backward"]

    for forward, backward in run_threads(on_rank, 2):
        assert len(forward) == len(backward) == 12
        # 2 messages, one each way, from the second piece of work on
        assert forward[0] == 0
        assert all(n >= 2 for n in forward[1:]), forward
        assert all(n >= 2 for n in backward[:-1]), backward


class Asleep(torch.autograd.Function):
    """x, after seconds on the simulated clock, forward and backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


SIZES = {"n_layer": 3, "d_model": 64, "n_head": 1, "vocab": 16, "seq": 16, "n_expert": 2, "expert_ff": 8, "top_k": 1}


def timed(group, attention_s, experts_s, halves):
    """Seconds of forward, and of backward, of three paced blocks whose two experts get half of each half's rows."""
    blocks = expert.deal(GPT(GPTConfig(**SIZES, balance="none"), seed=0).double().blocks, group)
    for block in blocks:
        mixture = block.mlp

        # every second token to each expert: what is measured is time, not a choice
        def route(x, rows=None):
            chosen = torch.arange(x.shape[1]).remainder(2).expand(len(x), -1)[..., None]
            return chosen, torch.ones_like(chosen, dtype=x.dtype), x.new_zeros(())

        mixture.route = route
        for part, seconds in ((block.attention, attention_s), (mixture.experts, experts_s)):
            call = part.forward
            share = 2 / halves  # of a batch of 2 halves
            part.forward = lambda *args, call=call, s=share * seconds: Asleep.apply(call(*args), s)
    x = torch.ones(2, 16, 64, dtype=torch.float64, requires_grad=True)
    group.barrier()
    started = time.perf_counter()
    y = in_two_batches(blocks, x, halves)
    turned = time.perf_counter()
    y.sum().backward()
    return turned - started, time.perf_counter() - turned


@cases(("attention_s", "experts_s"), [(0.01, 0.01), (0.05, 0.05), (0.05, 0.01), (0.01, 0.05), (0.2, 0.1), (0.0, 0.0)])
def test_seconds_on_simulated_links_are_those_of_the_law(attention_s, experts_s):
    """Would catch a message that leaves after the work beside it, a link that carries two at the full speed of one, and
    a law that hides more than there is to hide behind."""
    # a half has 16 rows of 64 numbers of 8 bytes, of which half leave: 4096 bytes take 40 ms
    message_s, links = 0.04, Links.uniform(2, alpha_s=0.0, bytes_per_s=16 * 64 * 8 / 2 / 0.04)
    counts_s = 8 / (4096 / 0.04)  # each half tells its counts before, 8 bytes to the other rank
    for halves in (1, 2):
        law = whole_s(3, attention_s, experts_s, message_s)
        if halves == 2:
            law = halves_s(3, attention_s, experts_s, message_s)
        slowest = [max(times) for times in zip(*simulate(timed, links, attention_s, experts_s, halves), strict=True)]
        assert slowest[0] == pytest.approx(law, abs=3 * 2 * 2 * counts_s + 1e-4), ("forward", halves)
        assert slowest[1] == pytest.approx(law, abs=1e-4), ("backward", halves)


@cases(("a", "e", "c"), [(3.0, 2.0, 1.0), (1.0, 1.0, 2.0), (0.0, 0.0, 1.0), (2.0, 2.0, 2.0)])
@cases("n_blocks", (1, 2, 5))
def test_the_closed_forms_are_those_of_the_recurrence(a, e, c, n_blocks):
    """Would catch a docstring whose two ends the recurrence does not meet."""
    if c <= min(a, e):
        assert halves_s(n_blocks, a, e, c) == pytest.approx(n_blocks * (2 * a + 2 * e) + c)
    if c >= max(a, e):
        assert halves_s(n_blocks, a, e, c) == pytest.approx(a + 4 * n_blocks * c)
    assert halves_s(n_blocks, a, e, c) <= whole_s(n_blocks, a, e, c)
    assert overlap(n_blocks, a, e, c).total == pytest.approx(halves_s(n_blocks, a, e, c))
    assert halves_s(n_blocks, a, e, c, parts=1) == pytest.approx(whole_s(n_blocks, a, e, c, parts=1))


def test_what_cannot_be_run_in_halves_is_refused():
    """Would catch a block that is run past what wraps it, and a batch in no parts."""
    blocks = blocks_of(BASE, torch.float64)
    with pytest.raises(ValueError, match="1 part or more, got halves=0"):
        in_two_batches(blocks, batch(2, torch.float64), 0)
    with pytest.raises(ValueError, match="block 0 is no block of a GPT"):
        in_two_batches([torch.nn.Linear(2, 2)], batch(2, torch.float64))
    blocks[1].forward = lambda x: x
    with pytest.raises(ValueError, match="block 1 is wrapped"):
        in_two_batches(blocks, batch(2, torch.float64))
    with pytest.raises(ValueError, match="0 or more, got"):
        halves_s(1, -1.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="at least 1, got 0 and 2"):
        whole_s(0, 1.0, 0.0, 0.0)
