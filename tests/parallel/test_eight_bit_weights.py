"""Gathers of weights as 8-bit codes: the products of whole weights bit for bit, at half of bf16's bytes."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from labkit import run_threads
from labkit.assemble import assemble
from labkit.comm.mesh import Mesh
from labkit.parallel.eight_bit_weights import EightBits
from labkit.parallel.zero3 import ZeRO3
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.plan.step.bytes_sent import sent_per_step
from labkit.train.config import GPTConfig
from labkit.train.data import batch
from labkit.train.fp8 import encode, in_fp8_, unit_of
from tests.cases import cases

CONFIG = GPTConfig(n_layer=2, d_model=16, n_head=4, seq=8, tied=False)


def test_every_weight_finds_its_code_again():
    """Would catch a unit that is rounded on the way, and a code that bf16 cannot tell from its neighbour.

    All 65,280 finite numbers of bf16 stand in tensors of many sizes."""
    every = torch.arange(65_536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    for power in range(-40, 120, 7):
        x = every[every.abs().float() <= 1.37 * 2.0**power]
        unit = unit_of(x.abs().max().float())
        codes = encode(x, unit)
        again = codes.float().mul(unit).bfloat16()
        assert unit_of(again.abs().max().float()) == unit
        assert torch.equal(encode(again, unit).view(torch.uint8), codes.view(torch.uint8))


def net():
    """Three layers in bf16 of ragged sizes, the last one not in 8 bits."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8), nn.Linear(8, 3)).bfloat16()


def coded(group, origin, as_codes):
    """Losses' gradients of two steps, and the bytes of gathers in the second."""
    model = copy.deepcopy(origin)  # made in one thread: all draw from the same generator
    in_fp8_(model[0])
    in_fp8_(model[1])
    codec = EightBits(frozenset([model[0].weight, model[1].weight]), unit_of, encode) if as_codes else None
    sync = ZeRO3(model, group, partial(torch.optim.SGD, lr=0.05), codec=codec)
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    for _ in range(2):
        group.ledger.clear()
        sync.zero_grad()
        y = model(x)
        y.float().square().mean().backward()
        sync.finish()
        results.append(y.detach())
        sent = group.ledger.sent_bytes("all_gather")
        sync.step()
    return results, sent


@cases("n", [1, 2, 3, 4])
def test_products_are_those_of_whole_weights_bit_for_bit(n):
    """Would catch a unit of a rank's own part, codes of another weight, and a part that is decoded with a wrong unit.

    All ranks have the same rows, so that the mean of their gradients is what each has."""
    alone, _ = run_threads(coded, 1, net(), False)[0]
    for results, _ in run_threads(coded, n, net(), True):
        assert torch.equal(results[0], alone[0])
        # sums of n equal numbers are rounded n - 1 times on the way
        assert torch.equal(results[1], alone[1]) or (n == 3 and torch.allclose(results[1], alone[1], rtol=2**-5))


@cases("n", [2, 3, 4])
def test_codes_are_half_of_the_bytes_of_bf16(n):
    """Would catch codes that travel as 16 bits, and biases and other layers that travel as codes."""
    eight, half = 24 * 40 + 40 * 8, 40 + 8 + 3 * 9
    whole, parts = run_threads(coded, n, net(), False)[0][1], run_threads(coded, n, net(), True)[0][1]
    pads = 3 * 2 * 2 * n
    assert whole == pytest.approx(2 * (n - 1) / n * 2 * (eight + half), abs=pads)
    assert parts == pytest.approx(2 * (n - 1) / n * (eight + 2 * half), abs=2 * pads)


def trained(group, recipe, layout):
    """Losses of three steps, bytes by axis in the last one, the law, and how many weights travel as codes."""
    mesh = Mesh.connect(layout, group)
    step, seen = assemble(CONFIG, recipe, mesh), []
    for number in range(3):
        before = {axis: group.ledger.sent_bytes(axis=axis) for axis in recipe.axes}
        rows = mesh.dp.rank, mesh.dp.size, recipe.batch_size
        seen.append(step(*batch(0, number, *rows, CONFIG.seq), number))
    sent = {axis: group.ledger.sent_bytes(axis=axis) - was for axis, was in before.items()}
    blocks = sum(path.startswith("blocks") for stage in step.stages.values() for path in stage.paths)
    law = sent_per_step(
        layout, recipe, group.rank, parameter_bytes=step.parameter_bytes, n_layer=blocks, d_model=16, seq=8,
        coded_params=step.coded_params,
    )  # fmt: skip
    return seen, sent, dict(law), step.coded_params


@cases(
    ("sizes", "choices"),
    [
        ((2, 1, 1), {}),
        ((3, 1, 1), {"n_micro": 2}),
        ((2, 1, 2), {"recompute": "full"}),
        ((2, 2, 1), {"n_micro": 2, "reshard": False}),
        ((4, 1, 1), {"shard_ranks": 2}),
    ],
)
def test_steps_are_those_of_gathers_in_bf16_and_send_what_the_law_says(sizes, choices):
    """Would catch units that are not agreed on after a step, under HSDP, tensor or pipeline parallelism; and a law
    that counts codes of what is gathered whole."""
    layout = Layout(*sizes)
    recipe = Recipe("zero3", batch_size=12, precision="fp8", fp8_gathers=True, fp32_gradients=True, **choices)
    plain = Recipe("zero3", batch_size=12, precision="fp8", fp32_gradients=True, **choices)
    ours, theirs = run_threads(trained, layout.size, recipe, layout), run_threads(trained, layout.size, plain, layout)
    for (seen, sent, law, coded_params), (exact, whole, _, _) in zip(ours, theirs, strict=True):
        assert seen[0] == exact[0]
        assert seen == pytest.approx(exact, rel=1e-3)
        for axis in recipe.axes:
            # 4 bytes of each weight are agreed on, and each of two flat buffers is padded
            assert sent[axis] == pytest.approx(law[axis], rel=0.03), axis
        assert sent[recipe.axes[0]] < whole[recipe.axes[0]] or not coded_params  # a last stage may be a head alone
