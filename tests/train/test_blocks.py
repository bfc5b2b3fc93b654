"""Quantization by blocks against its definition in float64, number by number, and against torch's own casts.

(Whole steps: tests/test_compose.py; bytes held: tests/plan/test_memory_measured.py.)"""

from __future__ import annotations

import math

import pytest
import torch

from labkit import run_threads
from labkit.assemble import assemble
from labkit.comm.mesh import Mesh
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.train.blocks import FP4_BLOCK, TILE, InMX, InNVFP4, InTiles, hadamard, mx, nvfp4, product, tiles, to_e2m1
from labkit.train.config import GPTConfig
from labkit.train.data import batch
from labkit.train.formats import E2M1, E4M3, E8M0, round_to
from labkit.train.fp8 import Delayed, in_fp8_, linear
from labkit.train.gpt import GPT
from tests.cases import cases

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def drawn(*shape, seed=0, spread=2.0):
    """bf16 numbers of many sizes, a block of zeros among them."""
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=stream) * torch.exp(spread * torch.randn(shape, generator=stream))
    x[: shape[0] // 3, : shape[1] // 3] = 0
    return x.bfloat16()


def blocks_of(x, rows, columns):
    """(slice of rows, slice of columns) of every block; those at the edges are smaller."""
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            yield slice(i, i + rows), slice(j, j + columns)


def single(x):
    """Rounded to fp32, in float64."""
    return x.float().double()


def test_formats_of_blocks_are_those_of_torch_and_of_the_specification():
    """Would catch a NaN among e2m1's codes, a tie that goes the wrong way, and a power of two of a wrong bias."""
    assert E2M1.decode(torch.arange(16)).tolist() == [*FP4, *(-x for x in FP4)]
    x = torch.arange(-800, 801) / 100.0
    nearest = torch.tensor([*FP4, *(-value for value in FP4[1:])], dtype=torch.float64)
    off = (x.double()[:, None] - nearest).abs()
    held = round_to(x, E2M1)
    assert torch.equal((x.double() - held.double()).abs(), off.min(1).values)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert round_to(ties, E2M1).tolist() == to_e2m1(ties).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert torch.equal(to_e2m1(x), held)
    with pytest.raises(ValueError, match="fp4_e2m1fn has no NaN"):
        round_to(math.nan, E2M1)
    wide = torch.randn(20_000) * torch.exp(25 * torch.randn(20_000))
    wide = torch.cat([wide[wide.abs() >= 2.0**-126], torch.tensor([1.5, 3.0, 2.0**127, 1.5 * 2.0**127, math.inf])])
    cast = wide.to(torch.float8_e8m0fnu)
    assert torch.equal(E8M0.encode(wide).to(torch.uint8), cast.view(torch.uint8))
    codes = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(E8M0.decode(codes), codes.view(torch.float8_e8m0fnu).double())
    assert E8M0.decode(torch.tensor(255)).isnan()


@cases(("rows", "columns"), [(1, TILE), (TILE, TILE), (1, 16)])
def test_tiles_are_what_their_definition_says_bit_by_bit(rows, columns):
    """Would catch a unit of another block, blocks along the wrong dim, and edges that are cut off."""
    x = drawn(150, 300, seed=rows)
    q = tiles(x, rows, columns)
    for k, (i, j) in enumerate(blocks_of(x, rows, columns)):
        block = x[i, j].double()
        unit = single(single(block.abs().max().clamp(min=2.0**-126)) / 448)
        assert q.units.flatten()[k] == unit
        assert torch.equal(q.codes[i, j].double(), round_to(single(block / unit), E4M3))


def test_mx_is_what_the_specification_says_bit_by_bit():
    """Would catch an exponent that is rounded and not cut, e4m3's top exponent forgotten, NaN for what saturates."""
    x = drawn(40, 100, seed=3)
    x[0, :32] = torch.tensor(2.0**-20)
    x[0, 3] = 496.0  # 2^8 * 1.94: the unit is 1, and 496 saturates
    q = mx(x)
    assert q.units.dtype == torch.float8_e8m0fnu
    for k, (i, j) in enumerate(blocks_of(x, 1, 32)):
        block = x[i, j].double()
        most = block.abs().max().item()
        exponent = max(math.floor(math.log2(most)) - 8, -127) if most else -127
        assert q.units.flatten()[k].double() == 2.0**exponent
        assert torch.equal(q.codes[i, j].double(), round_to(block / 2.0**exponent, E4M3))
    assert q.codes[0, 3].item() == 448


@cases("rows", [1, FP4_BLOCK])
def test_nvfp4_has_two_levels_of_units_bit_by_bit(rows):
    """Would catch a block's unit that is not rounded to e4m3 before it divides, and a tensor's that overflows it."""
    x = drawn(35, 70, seed=rows, spread=1.0)
    q = nvfp4(x, rows)
    whole = single(x.double().abs().max() / (6 * 448))
    assert q.whole == whole
    for k, (i, j) in enumerate(blocks_of(x, rows, FP4_BLOCK)):
        block = x[i, j].double()
        unit = round_to(single(single(single(block.abs().max()) / 6) / whole), E4M3)
        assert q.units.flatten()[k].double() == unit
        quotient = single(single(block / whole) / (unit if unit > 0 else 1.0))
        assert torch.equal(q.codes[i, j].double(), round_to(quotient, E2M1))


def test_stochastic_rounding_has_no_bias():
    """Would catch rounding up by half, noise that is used twice in one number, and a number on the grid that moves.

    The mean of n roundings of x on steps of s has a variance of at most s^2 / 4n; 6 standard deviations are passed once
    in 5 * 10^8 numbers, and rand's grid of 2^-24 adds 2^-24 s."""
    n, noise = 4000, torch.Generator().manual_seed(1)
    x = torch.linspace(-6, 6, 97)
    held = to_e2m1(x.expand(n, -1).contiguous(), noise)
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    bound = 6 * step / (2 * n**0.5) + 2.0**-24 * step
    assert ((held.double().mean(0) - x).abs() <= bound).all()
    assert ((to_e2m1(x) - x).abs() > bound).any()  # which rounding to nearest does not
    assert set(held.abs().unique().tolist()) == set(FP4)
    on_grid = torch.tensor(FP4)
    assert torch.equal(to_e2m1(on_grid, noise), on_grid)


def test_a_hadamard_transform_keeps_products_and_spreads_outliers():
    """Would catch a matrix whose rows are not orthonormal, and signs that the two operands do not share."""
    signs = torch.tensor([1.0, -1, -1, 1] * 4)
    a, b = drawn(5, 40, seed=1), drawn(7, 40, seed=2)
    left, right = hadamard(a, signs).double(), hadamard(b, signs).double()
    exact = a.double() @ b.double().t()
    off = 2.0**-18 * (a.double().abs() @ b.double().abs().t() * 16)
    assert ((left @ right.t() - exact).abs() <= off).all()
    alone = torch.zeros(1, 16)
    alone[0, 5] = 16.0
    assert hadamard(alone, signs).abs().unique().tolist() == [4.0]


@pytest.mark.parametrize("name", ["tiles", "mx", "nvfp4"])
@cases(("tokens", "inside", "out"), [(7, 40, 24), (33, 260, 130)])
def test_products_are_those_of_what_the_codes_stand_for(name, tokens, inside, out):
    """Would catch units that are multiplied in for the wrong run, or along the wrong dim; ragged edges; a bias twice.

    Each of K terms is rounded when it is added, each unit multiplied in rounds once more, and the result to bf16."""
    x, w, b = drawn(tokens, inside, seed=1), drawn(out, inside, seed=2), drawn(out, 3, seed=3)[:, 0].contiguous()
    multiply = {"tiles": InTiles, "mx": InMX, "nvfp4": lambda: InNVFP4(0, x.device)}[name]()
    quantized = {
        "tiles": lambda: (tiles(x), tiles(w, TILE)), "mx": lambda: (mx(x), mx(w)),
        "nvfp4": lambda: (nvfp4(x), nvfp4(w, FP4_BLOCK)),
    }[name]()  # fmt: skip
    left, right = (q.codes.double() * q.spread.double() * (1.0 if q.whole is None else q.whole) for q in quantized)
    exact, size = left @ right.t() + b.double(), left.abs() @ right.abs().t() + b.double().abs()
    off = (inside + 8) * 2.0**-24 * size
    y = multiply("y", x, w, b)
    assert y.dtype == torch.bfloat16
    assert (y >= (exact - off).float().bfloat16()).all()
    assert (y <= (exact + off).float().bfloat16()).all()
    assert ((product(*quantized).double() - left @ right.t()).abs() <= off).all()


@pytest.mark.parametrize("name", ["tiles", "mx", "nvfp4"])
def test_zeros_stay_zeros_and_what_is_not_finite_is_seen(name):
    """Would catch 0 / 0 in a block of zeros, and an infinity that ends as the largest number."""
    multiply = {"tiles": InTiles, "mx": InMX, "nvfp4": lambda: InNVFP4(0, torch.device("cpu"))}[name]()
    w = drawn(8, 32, seed=1)
    assert torch.equal(linear(torch.zeros(4, 32).bfloat16(), w, None, multiply), torch.zeros(4, 8).bfloat16())
    for bad in (math.inf, -math.inf, math.nan):
        x = drawn(4, 32, seed=2)
        x[3, 30] = bad
        assert linear(x, w, None, multiply)[3].isnan().all()


def test_gradients_of_nvfp4_are_right_in_the_mean():
    """Would catch a transform of one operand only, and gradients that are rounded to nearest.

    The mean over many noises approaches g W of quantized W, as 1 / sqrt(n) of the spread of one."""
    x, w = drawn(32, 64, seed=1, spread=0.3), drawn(48, 64, seed=2, spread=0.3)
    g = drawn(32, 48, seed=3, spread=0.3)
    n, multiply = 400, InNVFP4(5, x.device)
    many = torch.stack([multiply("gx", g, w.t()).double() for _ in range(n)])
    exact = g.double() @ nvfp4(w, FP4_BLOCK).dequantized().double()
    # saturation and bf16 add a bias of their own, below 1% of the terms' size
    size = g.double().abs() @ w.double().abs()
    assert ((many.mean(0) - exact).abs() <= 6 * many.std(0) / n**0.5 + 0.01 * size).all()
    weights = torch.stack([multiply("gw", g.t(), x.t()).double() for _ in range(n)])
    reach = g.double().abs().t() @ x.double().abs()
    assert ((weights.mean(0) - g.double().t() @ x.double()).abs() <= 0.15 * reach + 6 * weights.std(0) / n**0.5).all()


def test_delayed_units_come_from_the_steps_before_and_saturate():
    """Would catch a unit of the tensor at hand, a history that grows or forgets too early, and NaN for what exceeds."""
    x, w = drawn(6, 16, seed=1), drawn(8, 16, seed=2)
    multiply = Delayed(x.device)
    first = multiply("y", x, w)
    assert torch.equal(first, linear(x, w))  # no history: current units
    assert multiply.seen[:2].tolist() == [x.abs().max().item(), w.abs().max().item()]
    multiply.turn(multiply.seen)
    loud = (8 * x.double()).bfloat16()
    limit = multiply.history[0, 0].double()
    clipped = multiply("y", loud, w)
    by_hand = linear(loud.double().clamp(-limit, limit).bfloat16(), w)
    assert torch.equal(clipped, by_hand)
    assert not torch.equal(clipped, linear(loud, w))
    multiply.turn(multiply.seen)
    assert torch.equal(multiply("y", loud, w), linear(loud, w))
    tiny = torch.full((3,), 2.0**-20)
    for _ in range(15):
        multiply.turn(tiny)
    assert torch.equal(multiply("y", x, w), multiply("y", x, w))
    assert multiply.history[0].amax() == loud.abs().max()
    multiply.turn(tiny)
    assert multiply.history[:2].amax() == tiny[0]


ONE = Layout()
CONFIG = GPTConfig(n_layer=2, d_model=32, n_head=4, seq=32, tied=False)


def losses(group, recipe, layout=ONE, steps=12):
    """The losses of a small GPT, and the histories of delayed scaling."""
    mesh = Mesh.connect(layout, group)
    step = assemble(CONFIG, recipe, mesh)
    rows = mesh.dp.rank, mesh.dp.size, recipe.batch_size
    seen = [step(*batch(0, number, *rows, CONFIG.seq), number) for number in range(steps)]
    return seen, [linear.history for _, linears in step.delayed for linear in linears]


SCALINGS = {"delayed": {"precision": "fp8", "scaling": "delayed"}, "tiles": {"precision": "fp8", "scaling": "tiles"},
            "mx": {"precision": "fp8", "scaling": "mx"}, "nvfp4": {"precision": "nvfp4"}}  # fmt: skip


@pytest.fixture(scope="module")
def exact_and_half():
    """The losses in fp32 and in bf16, trained once."""
    precisions = ({}, {"precision": "bf16"})
    return [run_threads(losses, 1, Recipe(batch_size=4, lr=3e-3, **choices))[0][0] for choices in precisions]


@pytest.mark.parametrize("name", SCALINGS)
def test_losses_follow_those_of_bf16(name, exact_and_half):
    """Would catch gradients that vanish or drift. bf16 is off by 2^-8 of a number at most, e4m3 by 2^-4 (e5m2 2^-3),
    e2m1 by 2^-1: as long as errors only add up, the loss is off by as many times as much."""
    exact, half = exact_and_half
    narrow = run_threads(losses, 1, Recipe(batch_size=4, lr=3e-3, **SCALINGS[name]))[0][0]
    natural = max(abs(a - b) for a, b in zip(exact, half, strict=True))
    off = max(abs(a - b) for a, b in zip(exact, narrow, strict=True))
    assert off <= 2 ** (7 if name == "nvfp4" else 5) * natural
    assert narrow != half
    assert narrow[-1] < narrow[0] - 0.5


@cases("sizes", [(2, 1, 1), (1, 1, 2), (2, 1, 2)])
def test_histories_are_the_same_on_all_ranks_that_share_the_layers(sizes):
    """Would catch a history of a rank's own rows, which would depend on how a run was laid out."""
    recipe, layout = Recipe(batch_size=4, precision="fp8", scaling="delayed"), Layout(*sizes)
    first, *others = (histories for _, histories in run_threads(losses, layout.size, recipe, layout, 2))
    assert len(first) == 12
    assert all(map(torch.equal, first * len(others), [history for other in others for history in other]))


def test_an_unknown_scaling_is_refused():
    """Would catch a misspelt scaling that trains in another one."""
    with pytest.raises(ValueError, match="a scaling is one of tensor, delayed, tiles, mx, nvfp4, got 'tile'"):
        in_fp8_(GPT(CONFIG), "tile")
