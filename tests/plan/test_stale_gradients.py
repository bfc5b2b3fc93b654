"""The laws of stale gradients: against the roots of the recursion, and against a long simulation."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from labkit.plan.pocket.stale_gradients import best, distances, limit, momentum, verdict


def growth(staleness, rate):
    """The largest root of z^(s+1) - z^s + rate: how much of the distance one step keeps, in the long run."""
    return max(abs(numpy.roots([1, -1, *[0] * (staleness - 1), rate] if staleness else [1, rate - 1])))


@pytest.mark.parametrize("staleness", [0, 1, 2, 3, 7, 16])
def test_the_limit_is_where_the_largest_root_leaves_the_circle(staleness):
    """Would catch a wrong angle: the run grows just above and shrinks just below."""
    edge = limit(staleness)
    assert growth(staleness, edge) == pytest.approx(1)
    assert growth(staleness, 0.99 * edge) < 1 < growth(staleness, 1.01 * edge)
    assert verdict(staleness, edge) == "diverges"
    assert verdict(staleness, 0.999 * edge) == "swings"


@pytest.mark.parametrize("staleness", [1, 2, 3, 7, 16])
def test_the_best_rate_keeps_least_and_is_the_last_that_does_not_swing(staleness):
    """Would catch (s+1)^s for s^s."""
    rate = best(staleness)
    assert growth(staleness, rate) == pytest.approx(staleness / (staleness + 1), rel=1e-3)
    assert growth(staleness, 0.9 * rate) > growth(staleness, rate) * 1.001
    assert growth(staleness, 1.1 * rate) > growth(staleness, rate) * 1.001
    assert verdict(staleness, rate) == "creeps"


def test_fresh_gradients_have_the_numbers_everybody_knows():
    """Would catch a law that is off by one step."""
    assert limit(0) == pytest.approx(2)
    assert best(0) == 1
    assert distances(0, 1.0, 3) == [1, 0, 0, 0]
    assert distances(0, 0.5, 3) == [1, 0.5, 0.25, 0.125]
    assert distances(1, 0.5, 3) == [1, 0.5, 0, 0.25]
    assert momentum(0) == 0
    assert momentum(2) == pytest.approx(2 / 3)


def test_a_run_that_diverges_ends_at_inf_and_not_in_an_error():
    """Would catch an overflow in the picture."""
    assert distances(3, 4.0, 400)[-1] == math.inf


def test_geometric_staleness_is_momentum_with_dampening():
    """Would catch another momentum than that of Mitliagkas: torch's own SGD does the same steps."""
    mu, rate, mean = momentum(3), 0.4, [1.0]
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=rate, momentum=mu, dampening=mu)
    for t in range(60):
        old = sum((1 - mu) * mu**age * mean[max(0, t - age)] for age in range(4000))
        mean.append(mean[-1] - rate * old)
        w.grad = w.detach().clone()
        optimizer.step()
        assert w.item() == pytest.approx(mean[-1], abs=1e-12)


def test_what_makes_no_sense_is_refused():
    """Would catch half a step."""
    for odd in (-1, 1.5, True):
        with pytest.raises(ValueError, match="whole number of steps"):
            limit(odd)
    for odd in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="0 or more"):
            distances(1, odd, 3)
        with pytest.raises(ValueError, match="0 or more"):
            momentum(odd)
