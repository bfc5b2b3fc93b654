"""The laws of rounding hold of what float32 and bf16 really do, and refuse what they cannot say."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from labkit.plan.pocket.rounding import PRECISION_BITS, beyond, cancellation, likely, piled_up, roundoff, worst

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("name", PRECISION_BITS)
def test_the_roundoff_is_half_the_gap_behind_one(name):
    """Would catch the gap itself, and bits that do not count the one before the point."""
    if name in DTYPES:
        assert roundoff(name) == torch.finfo(DTYPES[name]).eps / 2
    if name in ("e4m3", "e5m2"):
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
        assert roundoff(name) == torch.finfo(dtype).eps / 2


@pytest.mark.parametrize(("name", "n"), [("fp32", 1000), ("bf16", 60), ("fp16", 300)])
def test_no_order_of_a_sum_errs_by_more_than_the_worst_and_hardly_one_by_more_than_the_likely(name, n):
    """Would catch a bound that is none: exact sums are fractions, and no float takes part in them."""
    dtype, u = DTYPES[name], roundoff(name)
    stream = torch.Generator().manual_seed(n)
    terms = torch.randn(n, generator=stream, dtype=torch.float64).to(dtype)
    exact, sizes = (sum(map(Fraction, values.double().tolist())) for values in (terms, terms.abs()))
    for order in (torch.arange(n), torch.arange(n).flip(0), terms.argsort(), torch.randperm(n, generator=stream)):
        total = torch.zeros((), dtype=dtype)
        for term in terms[order]:
            total = total + term
        off = abs(Fraction(float(total)) - exact) / sizes
        assert off <= worst(n, u)
        assert off <= likely(n, u)


def test_the_worst_case_is_above_the_likely_one_from_lambda_squared_terms_on():
    """Would catch a lambda that is forgotten, and an n in place of its root."""
    u = roundoff("fp32")
    for lam in (2.0, 6.0):
        n = int(lam**2)
        assert likely(n, u, lam) == pytest.approx(worst(n, u), rel=1e-4)
        assert likely(4 * n, u, lam) == pytest.approx(2 * likely(n, u, lam))
        assert worst(4 * n, u) == pytest.approx(4 * worst(n, u), rel=1e-3)
    assert beyond(6) == pytest.approx(3.05e-8, rel=0.01)
    assert beyond(0.1) == 1.0


def test_independent_errors_pile_up_like_a_root():
    """Would catch errors that are added, and layers that are counted from 1."""
    errors = torch.randn(20_000, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(errors.sum(1).std()) == pytest.approx(piled_up(1.0, 32), rel=0.03)
    assert piled_up(0.5, 0) == 0.0


def test_cancellation_is_what_is_lost_of_the_sizes():
    """Would catch a ratio that is upside down, and a division by 0."""
    assert cancellation(10.0, 0.1) == pytest.approx(100)
    assert cancellation(3.0, 0.0) == math.inf


def test_what_has_no_bound_is_refused_with_its_numbers():
    """Would catch a bound below 0, and an unknown format that is a KeyError."""
    with pytest.raises(ValueError, match="no format 'fp12' here; there are fp64"):
        roundoff("fp12")
    with pytest.raises(ValueError, match="a sum of 256 terms .* has no bound"):
        worst(256, roundoff("bf16"))
    with pytest.raises(ValueError, match="at least one term .* got 0"):
        likely(0, 1e-3)
    with pytest.raises(ValueError, match="standard deviations"):
        likely(4, 1e-3, 0)
    with pytest.raises(ValueError, match="got -1"):
        piled_up(1.0, -1)
    with pytest.raises(ValueError, match="sizes are not below 0"):
        cancellation(-1.0, 1.0)
