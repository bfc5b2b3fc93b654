"""The grid of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from labkit import Layout
from labkit.plan.partition.layout import GROUPS

SIZE = st.integers(1, 5)


@given(SIZE, SIZE, SIZE, st.integers(1, 3), st.integers(1, 3))
def test_rank_and_coordinates_are_inverse_and_groups_cover_the_world(dp, pp, tp, cp, ep):
    """Would catch two ranks in one place, and a rank that is in no group or in two."""
    layout = Layout(dp * ep, pp, tp, cp, ep)
    assert [layout.rank(**layout.coords(rank)) for rank in range(layout.size)] == list(range(layout.size))
    sizes = {"data": dp * ep * cp, "expert_dp": dp * cp}
    for axis in GROUPS:
        groups = {layout.ranks(axis, rank) for rank in range(layout.size)}
        assert sorted(rank for group in groups for rank in group) == list(range(layout.size))
        assert all(len(group) == sizes.get(axis, getattr(layout, axis, 0)) for group in groups)


def test_neighbours_in_rank_are_neighbours_in_tp():
    """Would catch the axis that talks most being spread over nodes."""
    assert Layout(dp=2, pp=2, tp=2).ranks("tp", 5) == (4, 5)
    assert Layout(dp=2, pp=2, tp=2).ranks("dp", 5) == (1, 5)


def test_experts_are_dealt_out_between_neighbours_along_dp():
    """Would catch experts dealt out over far ranks, and their gradients added up over ranks that hold others."""
    layout = Layout(dp=4, tp=2, cp=2, ep=2)
    assert layout.ranks("ep", 5) == (1, 5)
    assert layout.ranks("expert_dp", 5) == (5, 7, 13, 15)
    with pytest.raises(ValueError, match="divisor of 4"):
        Layout(dp=4, ep=3)


@pytest.mark.parametrize(
    "use",
    [lambda: Layout(dp=0), lambda: Layout(tp=True), lambda: Layout(dp=2).coords(2), lambda: Layout(dp=2).coords(0.5)],
)
def test_impossible_positions_are_refused(use):
    """Would catch a rank that wraps around silently."""
    with pytest.raises(ValueError, match="at least 1|0 to 1"):
        use()
