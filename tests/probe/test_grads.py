"""Gradient statistics against torch's own casts and norms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from labkit.probe.grads import GradientRow, LimitsOf, gradient_statistics
from labkit.train.formats import E4M3, E5M2, FP16

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2]


def spread(n: int = 20_000, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers of every size from 2^-60 to 2^40, some zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    x = x * 2.0 ** torch.randint(-60, 40, (n,), generator=generator)
    x[torch.rand(n, generator=generator) < 0.1] = 0.0
    return x.to(dtype)


def row(x: torch.Tensor | None, *args, **kwargs) -> GradientRow:
    return gradient_statistics({"w": x}, *args, **kwargs)["w"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_and_largest_are_torchs(dtype):
    """Would catch a norm summed in the gradient's own dtype, and a largest with its sign."""
    x = spread(dtype=dtype).view(100, 200)
    found = row(-x)
    assert found.norm == pytest.approx(torch.linalg.vector_norm(x.double()).item(), rel=1e-12)
    assert found.largest == x.double().abs().max().item()
    assert found.n == x.numel()
    assert found.zeros == (x == 0).double().mean().item() > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_counted_as_lost_is_what_a_cast_loses(dtype):
    """Would catch limits of another format, and shares of what is not zero instead of all."""
    x = spread(dtype=torch.float32)
    found, narrow = row(x, dtype), x.to(dtype).float()
    becomes_zero = ((x != 0) & (narrow == 0)).double().mean().item()
    subnormal = LimitsOf.dtype(dtype).smallest_subnormal
    rounded_up = ((x.abs() > subnormal / 2) & (x.abs() < subnormal)).double().mean().item()
    assert found.under == pytest.approx(becomes_zero + rounded_up, abs=1e-12)
    overflows = (narrow.isinf() & x.isfinite()).double().mean().item()
    top = torch.finfo(dtype).max
    kept = ((x.abs() > top) & ~narrow.isinf()).double().mean().item()  # just above the largest, rounded back to it
    assert found.over == pytest.approx(overflows + kept, abs=1e-12)
    tiny = torch.finfo(dtype).tiny
    assert found.low == pytest.approx(((x != 0) & (x.double().abs() < tiny)).double().mean().item(), abs=1e-12)
    if dtype != torch.float32 and dtype != torch.bfloat16:
        assert min(found.under, found.over, found.low - found.under) > 0


def test_limits_are_limits_however_they_are_given():
    """Would catch numbers, a dtype and its finfo that mean different things."""
    x = spread()
    numbers = LimitsOf("mine", 65504.0, 2.0**-14, 2.0**-24)
    assert row(x, torch.float16) == row(x, torch.finfo(torch.float16)) == row(x, numbers) == row(x)
    assert row(x, FP16) == row(x)  # a Format of labkit.train has the same properties
    assert row(x, E4M3).over > row(x, E5M2).over
    assert gradient_statistics({"w": x}, numbers).format == "mine"
    assert gradient_statistics({"w": x}, torch.float16).format == "float16"
    with pytest.raises(ValueError, match="no smallest number above zero"):
        LimitsOf.dtype(torch.int8)


def test_the_smallest_number_itself_is_not_under_and_the_largest_not_over():
    """Would catch < in the place of <=."""
    low, high = 2.0**-24, 65504.0
    found = row(torch.tensor([low, math.nextafter(low, 0), high, math.nextafter(high, math.inf)], dtype=torch.float64))
    assert (found.under, found.over) == (0.25, 0.25)


def test_the_histogram_counts_powers_of_two():
    """Would catch a bin off by one at an exact power, and zeros or infinities in a bin."""
    x = torch.tensor([1.0, 1.99, 2.0, -3.0, 0.5, 0.0, math.inf, math.nan, 2.0**-149], dtype=torch.float32)
    found = row(x)
    assert found.histogram == ((-149, 1), (-1, 1), (0, 2), (1, 2))
    assert found.not_finite == pytest.approx(2 / 9)
    assert found.over == 0.0  # infinite already: no format is to blame
    assert found.zeros == pytest.approx(1 / 9)
    y = spread()
    exponents = torch.frexp(y[y != 0]).exponent - 1
    assert row(y).histogram == tuple((e, int((exponents == e).sum())) for e in sorted(set(exponents.tolist())))


@pytest.mark.parametrize("power", [4, 16])
def test_a_loss_scale_moves_the_histogram_and_rescues_what_was_under(power):
    """Would catch a scale that changes the counts but not the limits' shares, or the gradients themselves."""
    x = spread()
    before = x.clone()
    plain, scaled = row(x), row(x, scale=2.0**power)
    assert scaled.histogram == tuple((e + power, count) for e, count in plain.histogram)
    assert scaled.under < plain.under
    assert scaled.over > plain.over
    assert scaled == row(x * 2.0**power)
    assert torch.equal(x, before)


def test_odd_gradients_have_rows():
    """Would catch a crash on what models do have: nothing, unused, all zero, sparse, not finite, scalar."""
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    found = gradient_statistics(
        [
            ("unused", None),
            ("empty", torch.zeros(0)),
            ("zero", torch.zeros(3)),
            ("table", table.weight.grad),
            ("nan", torch.tensor([math.nan, 1.0])),
            ("scalar", torch.tensor(-2.0, requires_grad=True)),
        ]
    )
    assert [each.n for each in found] == [0, 0, 3, 10, 2, 1]
    assert found["zero"].zeros == 1.0
    assert found["table"].zeros == 0.6
    assert found["table"].largest == 2.0
    assert found["nan"].not_finite == 0.5
    assert math.isnan(found["nan"].norm)
    assert found["scalar"].histogram == ((1, 1),)
    assert gradient_statistics({}).span == (0, 0)
    for each in (found, gradient_statistics({}), gradient_statistics({"zero": torch.zeros(2)})):
        assert repr(each)
        assert each._repr_html_()


def test_a_model_reads_as_a_table():
    """Would catch rows out of order, a total that is not the global norm, and a table that hides a layer."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    found = gradient_statistics((name, p.grad) for name, p in model.named_parameters())
    assert [each.name for each in found] == [name for name, _ in model.named_parameters()]
    assert found.norm == pytest.approx(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item(), rel=1e-6)
    lines = repr(found).splitlines()
    assert len(lines) == 2 + len(found)
    low, high = found.span
    assert lines[1].endswith(f"log2 |g|, {low} .. {high}")
    for line, each in zip(lines[2:], found, strict=True):
        assert line.startswith(each.name)
        assert f"{each.norm:.2e}" in line
        assert f"<td style='white-space:pre'>{each.name}</td>" in found._repr_html_()
    with pytest.raises(KeyError, match="no layer '5.weight'; there are 0.weight"):
        found["5.weight"]


def test_all_shares_are_weighted_by_the_size_of_the_layer():
    """Would catch a mean over layers."""
    found = gradient_statistics({"small": torch.full((1,), 1e-9), "large": torch.ones(99)})
    assert found.under == pytest.approx(0.01)


def test_names_come_once_and_gradients_are_floating():
    """Would catch a row that hides another, and counts that are taken for gradients."""
    with pytest.raises(ValueError, match="each layer once, please: w"):
        gradient_statistics([("w", torch.ones(1)), ("w", torch.ones(1))])
    with pytest.raises(ValueError, match="w: gradients are floating tensors, got torch.int64"):
        gradient_statistics({"w": torch.ones(2, dtype=torch.int64)})
