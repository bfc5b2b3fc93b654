"""Experts whose linears multiply 8-bit numbers: dealt out to ranks they have the codes of one process, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from labkit.comm.local import run_threads
from labkit.comm.mesh import Mesh
from labkit.parallel import expert
from labkit.parallel.tensor_plan import split
from labkit.plan.partition.layout import Layout
from labkit.train.config import GPTConfig
from labkit.train.fp8 import SCALINGS, Delayed, in_8_bits, in_fp8_, in_sixteens, linear, product
from labkit.train.gpt import MLP, Block
from labkit.train.moe import MoE
from tests.cases import cases

CONFIG = GPTConfig(n_layer=1, d_model=144, n_head=2, n_expert=8, expert_ff=256, top_k=2, balance="none")
LENGTH = 7


class InParts(nn.Module):
    """An MLP whose hidden units lie in two parts, in one process: each part multiplies by itself, as on a rank of tp,
    and what they make is added up in bf16."""

    def __init__(self, config):
        super().__init__()
        self.parts = nn.ModuleList(MLP(replace(config, d_ff=config.hidden // 2)) for _ in range(2))
        self.parts[1].down.bias = None  # it is added once, after the sum

    def forward(self, x):
        first, second = self.parts
        bias, first.down.bias = first.down.bias, None
        y = first(x) + second(x) + bias
        first.down.bias = bias
        return y


def drawn(shape, seed, size=1.0):
    return (size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def tokens():
    x = drawn((8, LENGTH, CONFIG.d_model), 99)
    x[..., 0] = 1.0
    return x


def layer_of(mlp=MLP):
    """A mixture in bf16, the same in every thread, that sends no rows to its last expert."""
    layer = MoE(CONFIG, MLP).bfloat16()
    with torch.no_grad():
        for seed, p in enumerate(layer.parameters()):
            p.copy_(drawn(p.shape, seed, 0.1))
        layer.router.weight[-1, 0] = -50.0  # tokens begin with 1 (`tokens`): never among the two best
    if mlp is InParts:
        for number, whole in layer.experts.items():
            cut = InParts(replace(CONFIG, d_ff=CONFIG.expert_hidden)).bfloat16()
            for k, part in enumerate(cut.parts):
                part.up.weight.data, part.up.bias.data = (p.chunk(2)[k].clone() for p in whole.up.parameters())
                part.down.weight.data = whole.down.weight.chunk(2, 1)[k].clone()
            cut.parts[0].down.bias.data = whole.down.bias.data
            layer.experts[number] = cut
    return layer


def run(layer, x):
    """Output, gradient of the input, gradients of the experts by name: of a mean over the tokens at hand."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.float().square().mean().backward()
    return y.detach(), x.grad, {name: p.grad for name, p in layer.experts.named_parameters()}


def one_rank(group, layout, scaling, x):
    mesh = Mesh.connect(layout, group)
    layer = layer_of()
    if mesh.tp.size > 1:
        split(layer, {"experts.*.up": "column", "experts.*.down": "row"}, mesh.tp)
    expert.deal(layer, mesh.ep)
    in_fp8_(layer, scaling)
    y, gx, grads = run(layer, x.tensor_split(mesh.dp.size)[mesh.dp.rank])
    return y, gx / mesh.dp.size, grads  # as a mean over all tokens has it: exact, dp is a power of two


def same(found, want):
    """As many numbers that are equal; -0 is 0."""
    return found.shape == want.shape and bool((found == want).all())


FIRST = [("tensor", Layout(dp=2, ep=2))]
LAYOUTS = [Layout(), Layout(dp=2, ep=2), Layout(dp=4, ep=4), Layout(dp=2, ep=2, tp=2), Layout(tp=2)]
REST = [(scaling, layout) for scaling in ("tensor", "delayed", "tiles", "mx") for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("scaling", "layout"),
    [*FIRST, *(pytest.param(*case, marks=pytest.mark.rest) for case in REST if case not in FIRST)],
    ids=str,
)
def test_experts_that_are_dealt_out_multiply_the_codes_of_one_process(scaling, layout):
    """Would catch units of a rank's own rows where an expert has those of all ranks, rows in another order, a gradient
    that is rounded before it is scaled, and an expert without rows that has no codes at all.

    An expert that has the same rows in the same order has the same codes, and sums of fp32 in the same order. Of two
    ranks of tp each has units of its own part: the one process then multiplies in two parts, too."""
    x, tp = tokens(), layout.tp
    whole = layer_of(InParts if tp > 1 else MLP)
    in_fp8_(whole, scaling)
    y, gx, want = run(whole, x)
    ranks = run_threads(one_rank, layout.size, layout, scaling, x)
    shown = [ranks[layout.rank(dp=k)] for k in range(layout.dp)]
    assert same(torch.cat([y for y, _, _ in shown]), y)
    assert same(torch.cat([gx for _, gx, _ in shown]), gx)
    assert not want["7.up.weight" if tp == 1 else "7.parts.0.up.weight"].any()  # the expert without rows
    found = {(name, rank % tp): grad for rank, (_, _, grads) in enumerate(ranks) for name, grad in grads.items()}
    for (name, k), grad in found.items():
        number, matrix = name.split(".", 1)
        part = 0 if matrix == "down.bias" else k
        assert same(grad, want[name if tp == 1 else f"{number}.parts.{part}.{matrix}"]), (name, k)
    assert len(found) == 4 * CONFIG.n_expert * tp


def test_the_router_stays_wide_and_all_other_linears_of_a_block_do_not():
    """Would catch a router in 8 bits, whose codes ZeRO-3 would send, and shared experts that are forgotten."""
    block = Block(replace(CONFIG, n_expert=2, n_shared=1))
    in_fp8_(block)
    narrow = {id(part) for part in in_8_bits(block)}
    names = {name for name, part in block.named_modules() if id(part) in narrow}
    attention = {f"attention.{name}" for name in ("query", "key", "value", "out")}
    mlps = {f"mlp.{mlp}.{name}" for mlp in ("experts.0", "experts.1", "shared") for name in ("up", "down")}
    assert names == attention | mlps


@cases("scaling", [*SCALINGS])
def test_an_expert_without_rows_gives_zeros_and_waits(scaling):
    """Would catch the largest number of no numbers, and a gradient that is missing."""
    layer = nn.Linear(48, 32).bfloat16()
    in_fp8_(layer, scaling)
    x = drawn((0, 48), 1).requires_grad_()
    y = layer(x)
    assert y.shape == (0, 32)
    y.sum().backward()
    assert x.grad.shape == (0, 48)
    assert not layer.weight.grad.any()
    assert not layer.bias.grad.any()


def test_a_step_without_rows_leaves_the_history_of_an_expert_as_it_was():
    """Would catch zeros that take the places of what was seen: after 16 steps without rows an expert would begin anew,
    with units of whatever rows come then."""
    x, w, loud = drawn((6, 48), 1), drawn((32, 48), 2), drawn((6, 48), 3, 8.0)
    multiply = Delayed(x.device)
    run_one = partial(linear, weight=w, multiply=multiply)
    before = run_one(x)
    multiply.turn(multiply.seen)
    for _ in range(20):
        run_one(x[:0])
        assert multiply.seen[0] == 0
        assert multiply.seen[1] == w.abs().max()
        multiply.turn(multiply.seen)
    assert multiply.history[0, 0] == x.abs().max()
    assert not multiply.history[0, 1:].any()
    assert multiply.history[1].count_nonzero() == 16  # its weights were there in each step
    assert torch.equal(run_one(x), before)
    assert not torch.equal(run_one(loud), linear(loud, w))  # saturates at what was seen long ago


@pytest.mark.parametrize("rows", [1, 16, 33])
def test_rows_of_zeros_change_no_product_over_tokens(rows):
    """Would catch zeros between the rows, or a unit of other numbers: what a GPU multiplies, where 16 must divide the
    number of rows."""
    g, x = drawn((rows, 32), 1), drawn((rows, 48), 2)
    more = [in_sixteens(part) for part in (g, x)]
    assert all(len(part) % 16 == 0 for part in more)
    assert (more[0] is g) == (rows == 16)
    torch.testing.assert_close(product(more[0].t(), more[1].t()), product(g.t(), x.t()), rtol=2.0**-7, atol=1e-6)
