"""Selective recomputation: the same gradients from fewer bytes. (In whole steps: tests/test_compose.py, predicted:
tests/test_rehearsal.py.)"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from labkit.probe.memory import MemoryProbe
from labkit.probe.owners import held_bytes
from labkit.train.checkpoint import checkpoint
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT
from labkit.train.recompute import recompute_selectively_

CONFIG = GPTConfig(n_layer=1, d_model=32, n_head=4, vocab=16, seq=16, dropout=0.1)
EXPERTS = replace(CONFIG, n_expert=5, expert_ff=24, n_shared=1, dropout=0.0)
ROWS = 3
WAYS = {
    "fp32": (torch.float32, nullcontext),
    "fp64": (torch.float64, nullcontext),
    "bf16": (torch.bfloat16, nullcontext),
    "autocast": (torch.float32, lambda: torch.autocast("cpu", torch.bfloat16)),
}


def block_and_input(config, dtype):
    block = GPT(config, seed=0).blocks[0].to(dtype)
    x = torch.randn(ROWS, config.seq, config.d_model, generator=torch.Generator().manual_seed(1)).to(dtype)
    return block, x.requires_grad_()


def gradients(block, x, way, times=1):
    torch.manual_seed(2)
    with WAYS[way][1]():
        y = block(x)
    for k in range(times):
        y.float().square().mean().backward(retain_graph=k + 1 < times)
    return [y.detach(), x.grad, *(p.grad for p in block.parameters() if p.requires_grad)]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "config",
    [CONFIG, replace(CONFIG, position="rotary", bias=False), EXPERTS],
    ids=["learned", "rotary, no bias", "experts"],
)
def test_gradients_are_those_of_a_plain_block_bit_by_bit(config, way, times):
    """Would catch a tensor that is made again of other inputs, in another precision or shape, or another one that came
    to lie where it lay; and one that a second backward does not find."""
    plain = gradients(*block_and_input(config, WAYS[way][0]), way, times)
    block, x = block_and_input(config, WAYS[way][0])
    recompute_selectively_(block)
    assert all(map(torch.equal, gradients(block, x, way, times), plain))


def kept(recompute, way, config=CONFIG):
    """Bytes of activations that autograd holds of one block, and all that is alive when its backward is over."""
    block, x = block_and_input(replace(config, dropout=0.0), WAYS[way][0])
    run = block
    if recompute == "full":
        run = lambda x: checkpoint(block, x)  # noqa: E731
    elif recompute == "selective":
        recompute_selectively_(block)
    with MemoryProbe(block) as probe:
        with WAYS[way][1]():
            y = run(x)
        held = held_bytes(tensor for tensor in probe.saved if tensor.kind != "parameters")
        y.float().sum().backward()
        del y
        left = probe.now["activations"]
    return held, left


@pytest.mark.parametrize("way", WAYS)
def test_inputs_of_products_that_a_norm_or_an_activation_made_are_not_kept(way):
    """Would catch a norm's result that somebody keeps all the same, and memory that only a collector of garbage frees.

    Kept are 6 D + F numbers of 8 D + 2 F; under autocast a product keeps its own copy of a norm's result."""
    tokens, d, hidden = ROWS * CONFIG.seq, CONFIG.d_model, CONFIG.hidden
    held = {recompute: kept(recompute, way) for recompute in ("none", "selective", "full")}
    assert held["full"][0] < held["selective"][0] < held["none"][0]
    width = 2 if way == "autocast" else WAYS[way][0].itemsize
    saved = hidden if way == "autocast" else 2 * d + hidden
    assert held["none"][0] - held["selective"][0] == tokens * saved * width
    assert held["selective"][1] == held["none"][1]


def test_of_an_expert_only_the_input_of_its_activation_is_kept():
    """Would catch an expert whose activation is kept, and copies of tokens that are made again, for which they would
    have to travel once more. In fp32 the router has no copy of its own, and of norms 2 D numbers are gone, too."""
    tokens, d, met = ROWS * EXPERTS.seq, EXPERTS.d_model, EXPERTS.top_k + EXPERTS.n_shared
    held = {recompute: kept(recompute, "fp32", EXPERTS) for recompute in ("none", "selective")}
    assert held["none"][0] - held["selective"][0] == tokens * (2 * d + met * EXPERTS.expert_ff) * 4
    assert held["selective"][1] == held["none"][1]


def test_without_gradients_it_is_the_plain_block():
    """Would catch notes of results that nobody will ever open, which hold their inputs."""
    block, x = block_and_input(replace(CONFIG, dropout=0.0), torch.float32)
    with torch.no_grad():
        plain = block(x)
        recompute_selectively_(block)
        with MemoryProbe(block) as probe:
            assert torch.equal(block(x), plain)
            assert probe.now["activations"] == 0


def test_a_block_whose_backward_never_comes_is_freed_with_its_result():
    """Would catch a node that holds its own result, which only a collector of garbage would find."""
    block, x = block_and_input(replace(CONFIG, dropout=0.0), torch.float32)
    recompute_selectively_(block)
    gc.disable()
    try:
        with MemoryProbe(block) as probe:
            y = block(x)
            assert probe.now["activations"] > 0
            del y
            assert probe.now["activations"] == 0
    finally:
        gc.enable()
