"""Budgets: days, devices and money follow from the best plan's own speed, and what cannot be had is said."""

from __future__ import annotations

import math

import pytest

from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.search.budget import DAY_S, Budget, count_words, days_of, devices_of
from labkit.plan.search.search import plans
from labkit.plan.typed import parsed
from tests.cases import cases

SMALL = ModelShape.gpt(8, 1024, 8, 8192, 1024, tied=False, name="small")
H100 = Hardware.preset("h100")


def test_days_and_cost_follow_from_the_best_plan():
    """Would catch a speed of one device taken for that of all, hours for days, and a price of a node."""
    best = plans(SMALL, H100, 8, 64)[0]
    budget = days_of(SMALL, H100, 8, 1e9, 64, price=2.0)
    assert budget.plan == best
    assert budget.tokens_per_s == pytest.approx(64 * 1024 / best.step_s)
    assert budget.days * DAY_S == pytest.approx(1e9 / (64 * 1024 / best.step_s))
    assert budget.device_hours == pytest.approx(8 * 24 * budget.days)
    assert budget.cost == pytest.approx(2 * budget.device_hours)
    assert days_of(SMALL, H100, 8, 1e9, 64).cost is None
    assert days_of(SMALL, H100, 8, 2e9, 64).days == pytest.approx(2 * budget.days)


def test_the_answer_is_the_fewest_nodes_that_are_in_time():
    """Would catch a guess in the place of the plan's speed, and an answer that is twice as large as it must be."""
    eight, sixteen = (days_of(SMALL, H100, n, 1e10, 512).days for n in (8, 16))
    assert sixteen < eight
    budget = devices_of(SMALL, H100, 0.99 * eight, 1e10, 512)
    assert (budget.n_ranks, budget.days) == (16, sixteen)
    assert budget.enough == 16
    assert [n for n, _ in budget.sizes] == [8, 16]
    assert devices_of(SMALL, H100, 1.01 * eight, 1e10, 512).n_ranks == 8
    assert f"8 devices: {eight:,.3g} days" in str(budget)
    assert "2.5 each" in str(devices_of(SMALL, H100, 2 * eight, 1e10, 512, price=2.5))
    one = Hardware.preset("h100").changed(node_size=1)
    assert devices_of(SMALL, one, 8.5 * eight, 1e10, 512).n_ranks == 1


def test_sizes_at_which_nothing_fits_are_no_answer():
    """Would catch "4 devices would do" for a model that needs 256 of them."""
    little = H100.changed(memory_bytes=0.25e9)
    budget = devices_of(SMALL, little, 1e3, 1e9, 64)
    assert budget.sizes[0] == (8, math.inf)
    assert budget.enough == budget.n_ranks > 8
    assert "8 devices: nothing fits" in str(budget)


def test_whole_nodes_between_two_sizes_are_told():
    """Would catch 40 devices that are rounded up to 64 without a word."""
    plan = plans(SMALL, H100, 64, 512)[0]
    budget = Budget(plan, 1e10, 16.6, asked=30.0, sizes=((32, 33.0), (64, 16.6)))
    assert budget.enough == 40
    assert "40 devices in whole nodes would do" in str(budget)


BAD = [
    (lambda: days_of(SMALL, H100, 8, 0, 64), "tokens must be above 0, got 0"),
    (lambda: days_of(SMALL, H100, 8, 1e9, 64, price=-1.0), "price must be above 0, got -1.0"),
    (lambda: devices_of(SMALL, H100, 0.0, 1e9, 64), "days must be above 0, got 0.0"),
    (lambda: days_of("llama-7b", "rtx-4090", 1, 1e9, 8), "nothing fits on 1 devices.* of a device"),
    (lambda: devices_of(SMALL, H100, 1e-3, 1e9, 8), "the fastest is .* more rows let more devices work"),
    (lambda: devices_of(SMALL, H100, 1e-4, 1e15, 8), "65,536 nothing runs with 8 rows a step: give it more days"),
    (lambda: devices_of("llama3-405b", "laptop", 1e9, 1e6, 1), "nothing runs with 1 rows a step; one way has"),
]


@cases(("ask", "told"), BAD)
def test_budgets_that_cannot_be_had_are_refused_with_the_numbers(ask, told):
    """Would catch an endless search, and a division by zero."""
    with pytest.raises(ValueError, match=told):
        ask()


def test_a_count_is_written_as_people_write_it():
    """A bug: "1e+12 tokens"."""
    for words in ("1T", "300B", "1.5T", "2M", "1,000T", "512", "15.6T"):
        assert count_words(parsed(words, "tokens")) == words
