"""Bars of breakdowns: item by item on one scale, with formulas, and how far each is off, in words."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from labkit import Breakdown, Item, Layout, Recipe, compare
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.step.memory import predict_memory
from labkit.plan.step.time import predict_step

from . import page
from .page import check, texts, words

LAW = Breakdown([Item("parameters", 40_000, "B", "4 N", "arXiv:1910.02054, 3"), Item("optimizer", 80_000, "B", "8 N")])
GUESS = Breakdown.of({"parameters": 20_000, "optimizer": 80_000})
SEEN = Breakdown.of({"parameters": 40_000, "optimizer": 100_000, "other": 30_000})


def bars(chart) -> dict[str, tuple[float, float]]:
    """ "parameters, law" -> (from, to), in the unit of the breakdown."""
    found = page.boxes(chart)
    return {hover.split(":")[0]: (bar.get_x(), bar.get_x() + bar.get_width()) for hover, bar in found.items()}


def test_items_stand_one_below_the_other_with_law_prediction_measurement_and_total():
    """Would catch an item that only one side has, a total that is left out, and a formula that nobody sees."""
    picture = compare(law=LAW, prediction=GUESS, measured=SEEN, title="AdamW")
    check(picture)
    said = texts(picture)
    for part in ("parameters", "optimizer", "other", "total", "AdamW", "= 4 N  [arXiv:1910.02054, 3]", "= 8 N"):
        assert part in said
    assert "40,000 B = 39.1 KiB (exact)" in said
    assert "20,000 B = 19.5 KiB (50% below the measurement)" in said
    assert "80,000 B = 78.1 KiB (20% below the measurement)" in said
    assert said.count("0 B (100% below the measurement)") == 2
    assert "120,000 B = 117 KiB (29.4% below the measurement)" in said
    assert len(bars(picture)) == 12


def test_all_bars_have_one_scale():
    """Would catch an item that looks as large as the total."""
    found = bars(compare(prediction=LAW, measured=SEEN))
    for name, value in (
        ("optimizer, prediction", 80_000),
        ("total, measured", 170_000),
        ("total, prediction", 120_000),
    ):
        assert found[name] == (0, value)


def test_what_is_saved_goes_to_the_left():
    """Would catch overlap drawn as time that is spent."""
    step = Breakdown([Item("compute", 0.08, "s"), Item("overlap", -0.02, "s")])
    picture = compare(prediction=step, measured=Breakdown.of({"compute": 0.08, "overlap": -0.01}, "s"))
    check(picture)
    found = bars(picture)
    assert found["compute, measured"] == (0, 0.08)
    assert found["overlap, prediction"] == (0, -0.02)
    assert "-20 ms (100% above the measurement)" in texts(picture)
    assert "60 ms (14.3% below the measurement)" in texts(picture)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-1e15, 1e15)] * 3), min_size=1, max_size=8))
def test_any_numbers_fit_the_page(rows):
    """Would catch a number that runs over the edge behind a long bar."""
    sides = [Breakdown.of({f"item {k}": row[side] for k, row in enumerate(rows)}) for side in range(3)]
    check(compare(*sides, title="anything"))


def test_the_planners_own_breakdowns_can_be_drawn():
    """Would catch a name or a formula that is too long for the page."""
    shape, layout, recipe = ModelShape.preset("llama-70b"), Layout(8, 4, 8), Recipe(batch_size=64, n_micro=8)
    for each in (predict_memory(shape, layout, recipe), predict_step(shape, layout, recipe, Hardware.preset("h100"))):
        picture = compare(law=each, measured=each, title="a plan")
        check(picture)
        assert words(picture).count("(exact)") >= len(each)


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        ({"law": LAW, "measured": 3.0}, "no bare numbers"),
        ({"law": LAW, "measured": Breakdown.of({"parameters": 1.0}, "s")}, "one unit"),
        ({"law": Breakdown([])}, "at least one item"),
        ({"law": Breakdown.of({"a": math.inf})}, "finite"),
    ],
)
def test_what_cannot_be_compared_is_refused(sides, message):
    """Would catch bytes beside seconds, a total beside an item, and an empty page."""
    with pytest.raises(ValueError, match=message):
        compare(**sides)


def test_names_are_shown_as_text():
    """Would catch an item's name or formula that becomes part of the page."""
    picture = compare(law=Breakdown([Item("<a>", 1, "B", "x < y & z")]))
    check(picture)
    assert "<a>" in texts(picture)
    assert "= x < y & z" in texts(picture)
