"""Scaling laws, and curves that obey them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.pocket.scaling import MOST_RANKS, amdahl, amdahl_items, bottlenecks, fit_serial, scaling, serial_share
from labkit.plan.step.time import mfu, predict_step

H100 = Hardware.preset("h100")
SHAPE = ModelShape.preset("llama3-8b")


@pytest.mark.parametrize(
    ("n", "serial", "speed"),
    [(8, 0.05, 5.93), (64, 0.05, 15.42), (256, 0.05, 18.62), (256, 0.02, 41.97), (1, 0.3, 1.0)],
)
def test_amdahls_law_gives_the_numbers_that_everybody_quotes(n, serial, speed):
    """Would catch a law that is turned around: 5% serial work makes 8 devices 5.93 times as fast."""
    assert amdahl(n, serial) == pytest.approx(speed, abs=0.005)
    gain, efficiency, limit = amdahl_items(n, serial)
    assert (gain.value, efficiency.value, limit.value) == (amdahl(n, serial), amdahl(n, serial) / n, 1 / serial)
    assert all(item.formula and item.source for item in (gain, efficiency, limit))


@given(st.integers(2, 1 << 20), st.floats(1e-6, 1))
def test_the_serial_share_is_found_again_from_the_speed_up(n, serial):
    """Would catch Karp and Flatt's formula with a sign lost."""
    assert serial_share(n, amdahl(n, serial)) == pytest.approx(serial, rel=1e-6)
    assert fit_serial([(n, amdahl(n, serial)), (3 * n, amdahl(3 * n, serial))]) == pytest.approx(serial, rel=1e-6)


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_no_speed_up_is_above_the_limit_or_below_one(n, serial):
    """Would catch more devices that make it slower, or faster than n times."""
    assert amdahl(n, serial) * (1 + 1e-12) >= 1
    assert amdahl(n, serial) <= min(n, 1 / serial if serial else math.inf) * (1 + 1e-9)


def test_the_bottlenecks_and_what_is_useful_are_the_step():
    """Would catch lost time that nobody is charged with, or that is charged twice."""
    for layout in (Layout(dp=64), Layout(dp=8, pp=2, tp=4)):
        recipe = Recipe("zero1", batch_size=256, n_micro=4, precision="bf16", recompute="full")
        lost = bottlenecks(SHAPE, layout, recipe, H100)
        assert lost.total == pytest.approx(predict_step(SHAPE, layout, recipe, H100).total)
        assert lost["useful"] / lost.total == pytest.approx(mfu(SHAPE, layout, recipe, H100))
        assert lost.keys() == ["useful", "communication", "bubble", "underutilisation", "data"]
        assert all(item.formula and item.source for item in lost.items)
        assert lost["data"] == 0
        assert (lost["bubble"] > 0) == (layout.pp > 1)


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("communication", {"hardware": H100.changed(intra=H100.inter.slower(1e-3), inter=H100.inter.slower(1e-3))}),
        ("bubble", {"layout": Layout(pp=32), "recipe": Recipe(batch_size=2, n_micro=2, precision="bf16")}),
        ("data", {"data_bytes_per_s": 10.0}),
        ("underutilisation", {"hardware": H100.changed(bytes_per_s=1e9)}),
    ],
)
def test_each_bottleneck_is_found_where_it_was_made(why, change):
    """Would catch a slow link that is called a bubble, or starved devices that are called small products."""
    given_ = {
        "layout": Layout(dp=32), "recipe": Recipe(batch_size=64, precision="bf16"), "hardware": H100, **change,
    }  # fmt: skip
    lost = bottlenecks(SHAPE, **given_)
    assert max((name for name in lost if name != "useful"), key=lambda name: lost[name]) == why


def test_weak_scaling_to_16384_ranks_loses_what_communication_costs():
    """Would catch a curve that rises for ever, one that stops at 1,024, and latency that is forgotten."""
    recipe = Recipe("ddp", batch_size=64, n_micro=1, precision="bf16", recompute="full")
    curve = scaling(SHAPE, Layout(dp=8), recipe, H100, MOST_RANKS[3:])
    assert [point.n_ranks for point in curve] == list(MOST_RANKS[3:])
    assert curve[-1].n_ranks == 16384
    assert curve[0].efficiency == curve[0].speed_up == 1
    efficiencies = [point.efficiency for point in curve[1:]]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert 0.2 < efficiencies[-1] < 1
    for point in curve:
        assert point.recipe.batch_size == 8 * point.n_ranks
        assert point.speed_up == pytest.approx(point.efficiency * point.n_ranks / 8)


def test_strong_scaling_stops_where_no_rank_has_a_row():
    """Would catch a batch that is silently made larger, and an efficiency that does not fall as products shrink."""
    recipe = Recipe("zero1", batch_size=64, n_micro=8, precision="bf16", recompute="full")
    curve = scaling(SHAPE, Layout(dp=8), recipe, H100, MOST_RANKS[3:], weak=False)
    assert [point.n_ranks for point in curve] == [8, 16, 32, 64]
    assert all(point.recipe.batch_size == 64 for point in curve)
    assert curve[-1].efficiency < curve[0].efficiency
    serial = [serial_share(point.n_ranks / 8, point.speed_up) for point in curve[1:]]
    assert all(share > 0 for share in serial)


BAD = [
    (lambda: amdahl(0, 0.1), "got 0 and 0.1"),
    (lambda: amdahl(4, 1.1), "got 4 and 1.1"),
    (lambda: serial_share(1, 1.0), "more than one rank"),
    (lambda: fit_serial([(1, 1.0)]), "more than one rank"),
    (lambda: bottlenecks(SHAPE, Layout(), Recipe(), H100, data_bytes_per_s=0), "more than 0 bytes/s, got 0"),
    (lambda: scaling(SHAPE, Layout(pp=2), Recipe(batch_size=2), H100, [3]), "no multiple of pp x tp = 2 x 1"),
    (lambda: scaling(SHAPE, Layout(pp=8), Recipe(batch_size=2), H100, [1, 2, 4]), "none of .* holds pp x tp = 8"),
]


@pytest.mark.parametrize(("ask", "said"), BAD)
def test_questions_that_make_no_sense_are_refused_with_the_numbers(ask, said):
    """Would catch a division by zero."""
    with pytest.raises(ValueError, match=said):
        ask()
