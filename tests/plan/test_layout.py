"""The grid of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from labkit import Layout

SIZE = st.integers(1, 5)


@given(SIZE, SIZE, SIZE)
def test_rank_and_coordinates_are_inverse_and_groups_cover_the_world(dp, pp, tp):
    """Would catch two ranks in one place, and a rank that is in no group or in two."""
    layout = Layout(dp, pp, tp)
    assert [layout.rank(**layout.coords(rank)) for rank in range(layout.size)] == list(range(layout.size))
    for axis in ("dp", "pp", "tp"):
        groups = {layout.ranks(axis, rank) for rank in range(layout.size)}
        assert sorted(rank for group in groups for rank in group) == list(range(layout.size))
        assert all(len(group) == getattr(layout, axis) for group in groups)


def test_neighbours_in_rank_are_neighbours_in_tp():
    """Would catch the axis that talks most being spread over nodes."""
    assert Layout(dp=2, pp=2, tp=2).ranks("tp", 5) == (4, 5)
    assert Layout(dp=2, pp=2, tp=2).ranks("dp", 5) == (1, 5)


@pytest.mark.parametrize("use", [lambda: Layout(dp=0), lambda: Layout(tp=True), lambda: Layout(dp=2).coords(2)])
def test_impossible_positions_are_refused(use):
    """Would catch a rank that wraps around silently."""
    with pytest.raises(ValueError, match="at least 1|0 to 1"):
        use()
