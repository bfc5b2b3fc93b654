"""Experts cut along tp against the whole mixture in one process, in float64: outputs, all gradients, bytes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from labkit.assemble import plan_of
from labkit.comm.local import run_threads
from labkit.parallel.tensor_plan import split
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT
from tests.cases import cases

CONFIG = GPTConfig(
    n_layer=1, d_model=12, n_head=12, vocab=12, seq=12, n_expert=5, expert_ff=12, tied=False, top_k=2, n_shared=1
)
CONFIGS = {
    "loss": CONFIG,
    "one": replace(CONFIG, top_k=1, n_shared=0, balance="none"),
    "all": replace(CONFIG, top_k=5, balance="bias", bias=False),
    "drops": replace(CONFIG, capacity=0.7),
}
ROWS = 3


def model_of(config):
    """A model whose biases of experts count, and with a bias between experts that changes choices."""
    model = GPT(config, seed=3).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.copy_(torch.linspace(-0.3, 0.3, p.numel()).view(p.shape))
    return model


def inputs(config):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, ROWS, config.seq, config.d_model, generator=generator, dtype=torch.float64)


def mixture_of(config, group=None, in_sequence=False):
    """The mixture of a model's block, whole or cut."""
    model = model_of(config)
    if group is not None:
        split(model, plan_of(config, in_sequence), group)
    return model.blocks[0].mlp


def backward(mixture, x, gradient):
    """Output, and the gradients of x and of all parameters."""
    x = x.clone().requires_grad_()
    y = mixture(x)
    y.backward(gradient)
    return y.detach(), x.grad, {name: p.grad for name, p in mixture.named_parameters() if p.requires_grad}


def one_rank(group, config, in_sequence):
    mixture = mixture_of(config, group, in_sequence)
    x, gradient = inputs(config)
    if in_sequence:
        x, gradient = (tensor.tensor_split(group.size, 1)[group.rank] for tensor in (x, gradient))
    group.ledger.clear()
    y, gx, grads = backward(mixture, x, gradient)
    cuts = {name: getattr(p, "shard_dim", None) for name, p in mixture.named_parameters()}
    sent = group.ledger.sent_bytes()
    wholes = {}
    for name, grad in grads.items():
        if cuts[name] is None:
            wholes[name] = grad
        else:
            wholes[name] = torch.cat(list(group.all_gather(grad[None])), cuts[name])
    return y, gx, wholes, sent


def far(mine, theirs):
    return float((mine - theirs).abs().max())


EVERY = [(name, n, in_sequence) for name in CONFIGS for n in (1, 2, 3, 4) for in_sequence in (False, True)]
FIRST = [("loss", 2, True), ("drops", 3, False)]


@pytest.mark.parametrize(
    ("name", "n", "in_sequence"),
    [*FIRST, *(pytest.param(*case, marks=pytest.mark.rest) for case in EVERY if case not in FIRST)],
)
def test_a_cut_mixture_is_the_whole_one_with_the_bytes_of_an_mlp(name, n, in_sequence):
    """Would catch a bias or a balance loss that counts n times, a router with a term of its gradient or n of them, a
    capacity that is counted by parts of a row, and a sum behind each expert, which sends k times as much."""
    config = CONFIGS[name]
    want = backward(mixture_of(config), *inputs(config))
    ranks = run_threads(one_rank, n, config, in_sequence)
    parts = [torch.cat([rank[which] for rank in ranks], 1) for which in (0, 1)] if in_sequence else None
    for y, gx, grads, sent in ranks:
        y, gx = parts or (y, gx)
        assert far(y, want[0]) < 1e-12
        assert far(gx, want[1]) < 1e-12
        assert grads.keys() == want[2].keys()
        for key, grad in want[2].items():
            assert far(grads[key], grad) < 1e-12, key
        tokens = ROWS * config.seq
        assert sent == 2 * (n - 1) / n * 8 * tokens * (2 * config.d_model + config.top_k)


@cases(
    ("left_out", "in_sequence", "words"),
    [
        ("blocks.*.mlp.shared.down", False, "blocks.0.mlp.shared.down.weight would be whole in a mixture"),
        ("blocks.*.mlp.router", False, "or as 'whole' if it is the router"),
        ("blocks.*.norm*", True, "keep 1/n of its gradient"),
    ],
)
def test_a_plan_that_leaves_a_part_of_a_mixture_out_is_refused(left_out, in_sequence, words):
    """Would catch a whole layer among terms, which would count n times in their sum without a word."""
    plan = {name: style for name, style in plan_of(CONFIG, in_sequence).items() if name != left_out}

    def refused(group):
        model = copy.deepcopy(model_of(CONFIG))
        with pytest.raises(ValueError, match=words):
            split(model, plan, group)

    run_threads(refused, 2)
