"""Which edges an axis crosses, and how long a step keeps the wires busy."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from labkit import GPTConfig, Layout, Links, Recipe
from labkit.plan.step.bytes_sent import sent_per_step
from labkit.plan.step.wire_time import Demand, apart, call_s, crosses, hops, layouts_of, on_wires, together

CONFIG = GPTConfig(n_layer=4, d_model=64, n_head=4, vocab=128, seq=64, tied=False)
RECIPE = Recipe(batch_size=16, n_micro=2)
SLOW = Links.placed(together(4), (1e-3, 1e6), (4e-3, 1e5))
ROUND = Links.placed(apart(4), (1e-3, 1e6), (4e-3, 1e5))
sizes = st.integers(1, 4)


@given(sizes, sizes, sizes)
def test_every_rank_sends_to_the_next_of_its_group_and_to_nobody_else(dp, pp, tp):
    """Would catch a ring through ranks of two groups, and a pipeline that closes."""
    layout = Layout(dp, pp, tp)
    for axis in ("dp", "tp"):
        for a, b in hops(layout, axis)[0]:
            group = layout.ranks(axis, a)
            assert group[(group.index(a) + 1) % len(group)] == b
        senders = [a for a, _ in hops(layout, axis)[0]]
        assert sorted(senders) == (list(range(layout.size)) if getattr(layout, axis) > 1 else [])
    assert len(hops(layout, "pp")) == pp - 1
    for stage, pairs in enumerate(hops(layout, "pp")):
        assert len(pairs) == dp * tp
        assert all(layout.coords(a)["pp"] == stage == layout.coords(b)["pp"] - 1 for a, b in pairs)


def test_neighbours_together_keep_tp_inside_and_apart_let_it_cross():
    """Would catch a placing that is the other one."""
    layout = Layout(dp=2, tp=2)
    assert together(4) == [[0, 1], [2, 3]]
    assert apart(4) == [[0, 2], [1, 3]]
    assert [crosses(layout, axis, SLOW) for axis in ("tp", "pp", "dp")] == [0, 0, 4]
    assert [crosses(layout, axis, ROUND) for axis in ("tp", "pp", "dp")] == [4, 0, 0]


@pytest.mark.parametrize(("make", "sizes"), [(together, (3, 2)), (apart, (5, 2)), (together, (1, 2)), (apart, (4, 0))])
def test_nodes_that_would_not_be_alike_are_refused(make, sizes):
    """Would catch a rank that lies nowhere."""
    with pytest.raises(ValueError, match=f"{sizes[0]} ranks do not lie evenly on {sizes[1]} nodes"):
        make(*sizes)


def test_one_call_takes_latency_and_its_share_of_the_card():
    """Would catch a card that two rings have to themselves each, and a step that is forgotten."""
    layout = Layout(dp=2, tp=2)
    inside = 2 * (1e-3 + 5_000 / 1e6)
    between = 2 * (4e-3 + 5_000 / (1e5 / 2))  # two rings share the card
    assert call_s(layout, "tp", 10_000, SLOW) == pytest.approx(inside)
    assert call_s(layout, "dp", 10_000, SLOW) == pytest.approx(between)
    assert call_s(layout, "tp", 10_000, ROUND) == pytest.approx(between)
    assert call_s(Layout(dp=4), "dp", 10_000, SLOW) == pytest.approx(6 * (4e-3 + 2_500 / 1e5))
    assert call_s(Layout(pp=4), "pp", 10_000, SLOW) == pytest.approx(2 * (2 * (1e-3 + 1e-2) + 4e-3 + 1e-1))
    assert call_s(layout, "pp", 10_000, SLOW) == 0


@pytest.mark.parametrize("layout", layouts_of(4))
def test_the_demand_is_the_bytes_that_the_laws_of_the_wire_know(layout):
    """Would catch a demand of other sums than the training step makes (the loss' few numbers and padding apart)."""
    demand = Demand.of(CONFIG, layout, RECIPE)
    n = {axis: getattr(layout, axis) for axis in ("dp", "pp", "tp")}
    most = dict.fromkeys(n, 0.0)
    for rank in range(layout.size):
        law = sent_per_step(
            layout, RECIPE, rank, parameter_bytes=int(demand.dp[1]), n_layer=4 // layout.pp, d_model=64, seq=64
        )
        most = {axis: max(most[axis], law[axis]) for axis in n}
    for axis in ("tp", "dp"):
        count, n_bytes = demand[axis]
        assert count * n_bytes * 2 * (n[axis] - 1) / n[axis] == pytest.approx(most[axis], rel=0.02)
    assert demand.pp[0] * demand.pp[1] * min(2, layout.pp - 1) == most["pp"]


def test_where_tp_crosses_the_step_is_slower_and_one_rank_needs_no_wire():
    """Would catch the golden rule the wrong way round."""
    layout = Layout(dp=2, tp=2)
    demand = Demand.of(CONFIG, layout, RECIPE)
    good, bad = on_wires(layout, demand, SLOW), on_wires(layout, demand, ROUND)
    assert bad.total > 3 * good.total
    assert bad["dp"] < good["dp"]
    assert bad["tp"] > good["tp"]
    assert on_wires(Layout(), Demand.of(CONFIG, Layout(), RECIPE), Links.placed([[0]])).total == 0


def test_links_of_other_ranks_are_refused_and_what_cannot_be_cut():
    """Would catch a law of a cluster that is not there."""
    with pytest.raises(ValueError, match="these links join 4 ranks"):
        on_wires(Layout(dp=2), Demand.of(CONFIG, Layout(dp=2), RECIPE), SLOW)
    with pytest.raises(ValueError, match="4 blocks cannot fill 8 stages"):
        Demand.of(CONFIG, Layout(pp=8), RECIPE)


@given(st.integers(1, 64))
def test_all_layouts_of_a_number_of_ranks_are_there_once(n_ranks):
    """Would catch one that is missing or twice."""
    found = layouts_of(n_ranks)
    assert len(set(found)) == len(found)
    assert all(each.size == n_ranks for each in found)
    assert {Layout(dp=n_ranks), Layout(pp=n_ranks), Layout(tp=n_ranks)} <= set(found)
