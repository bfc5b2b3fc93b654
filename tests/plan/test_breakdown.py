"""Breakdowns: they add up, they refuse what cannot be added, and they say how far a prediction is off."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given, strategies as st

from labkit.plan.breakdown import KINDS, Breakdown, ComparedItem, Comparison, Item

NUMBERS = st.integers(0, 1 << 50)


@given(st.dictionaries(st.text(min_size=1), NUMBERS))
def test_a_breakdown_is_the_numbers_it_was_made_of(values):
    """Would catch an item that is lost, counted twice, or put under another's name."""
    made = Breakdown.of(values)
    assert dict(made) == values
    assert made.total == sum(values.values())
    assert list(made) == [item.name for item in made.items] == list(values)
    assert all(name in made and made[name] == value for name, value in values.items())
    assert pickle.loads(pickle.dumps(made)) == made


@given(st.dictionaries(st.sampled_from(KINDS), NUMBERS), st.dictionaries(st.sampled_from(KINDS), NUMBERS))
def test_a_comparison_adds_up_to_both_totals(predicted, measured):
    """Would catch a name that only one side has and that the comparison forgets."""
    both = Breakdown.of(predicted).against(measured)
    assert (both.total.predicted, both.total.measured) == (sum(predicted.values()), sum(measured.values()))
    assert {row.name for row in both.rows} == {*predicted, *measured}
    assert all((both[name].predicted, both[name].measured) == (predicted.get(name, 0), measured.get(name, 0))
               for name in {*predicted, *measured})  # fmt: skip
    if both.rows:
        far = abs(both.worst.predicted - both.worst.measured)
        assert all(abs(row.predicted - row.measured) <= far for row in both.rows)


@pytest.mark.parametrize(
    ("predicted", "measured", "apart"),
    [(102, 100, 0.02), (98, 100, -0.02), (0, 0, 0.0), (0, 5, -1.0), (5, 0, math.inf), (7, 7, 0.0)],
)
def test_how_far_a_prediction_is_off_is_a_share_of_the_measurement(predicted, measured, apart):
    """Would catch a share of the prediction, a lost sign, and a division by a measurement of nothing."""
    assert ComparedItem("x", predicted, measured).apart == pytest.approx(apart)


def test_what_cannot_be_added_is_refused_with_its_names():
    """Would catch seconds that are added to bytes, and a second item that hides the first."""
    with pytest.raises(ValueError, match="B, s"):
        Breakdown([Item("a", 1, "B"), Item("b", 1, "s")])
    with pytest.raises(ValueError, match="a stands there more than once"):
        Breakdown([Item("a", 1), Item("a", 2)])
    with pytest.raises(ValueError, match="a is not a number"):
        Breakdown([Item("a", math.nan)])
    with pytest.raises(ValueError, match="in s, the measurement in B"):
        Breakdown([Item("a", 1, "s")]).against(Breakdown([Item("a", 1, "B")]))


def test_a_wrong_name_is_answered_with_the_nearest():
    """Would catch a bare KeyError for `activation`."""
    made = Breakdown.of(dict.fromkeys(KINDS, 1))
    with pytest.raises(KeyError, match="did you mean 'activations'"):
        made["activation"]
    with pytest.raises(KeyError, match="no row 'x'"):
        made.against(made)["x"]


def test_a_printed_breakdown_holds_every_number_its_formula_and_its_source():
    """Would catch a table that rounds a number away or drops why it is that number."""
    made = Breakdown([Item("optimizer", 12_345_678, "B", "8 N", "arXiv:1412.6980"), Item("other", 0.25, "B")])
    for words in ("optimizer", "12,345,678 B", "= 8 N", "[arXiv:1412.6980]", "0.25 B", "total"):
        assert words in repr(made)
    told = repr(made.against({"optimizer": 10_000_000}))
    assert "10,000,000" in told
    assert "+23.5%" in told
    assert "exact" in repr(made.against(made))


def test_a_bare_number_is_held_against_the_total():
    """Would catch a measured total that is compared with the first item."""
    both = Breakdown([Item("m", 4), Item("v", 4)]).against(10)
    assert both.total == ComparedItem("total", 8, 10)
    assert both.total.apart == pytest.approx(-0.2)


def test_nothing_adds_up_to_nothing():
    """Would catch a maximum over no rows."""
    assert Breakdown([]).total == 0
    assert Breakdown([]).unit == ""
    assert "total" in repr(Breakdown([]))
    assert Comparison(()).worst == Comparison(()).total
