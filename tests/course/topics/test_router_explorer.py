"""The router explorer: its rows are those of a real router and of real ranks, and its picture says what they cost."""

from __future__ import annotations

from functools import partial

import pytest

from labkit.comm.local import run_threads
from labkit.course.topics.dispatch_film import record
from labkit.course.topics.router_explorer import RouterExplorer
from labkit.course.topics.router_picture import router
from labkit.course.topics.unfair_router import SEQ, choose
from tests.cases import cases
from tests.view import page


@cases("skew", [0.0, 3.0])
@cases(("top_k", "capacity"), [(1, None), (2, 1.0), (8, 1.25)])
@cases("n_ranks", [1, 2, 4, 8])
def test_the_picture_is_whole_for_any_routing(skew, top_k, capacity, n_ranks):
    """Would catch words on each other where a rank has no rows, and a division by nobody."""
    page.check(router(choose(skew, 16, top_k, capacity, n_ranks)))


@cases("n", [1, 2, 3, 4])
@cases("capacity", [None, 1.0])
def test_rows_and_bytes_are_those_of_ranks_that_really_dispatch(n, capacity):
    """Would catch a picture whose rows are made up, and a law of bytes that forgets a way or the counts."""
    routing = choose(1.0, 12, 2, capacity, n, n_tokens=SEQ, seed=3)
    ranks = run_threads(partial(record, skew=1.0, n_expert=12, n_tokens=SEQ, capacity=capacity, seed=3), n)
    assert [count for each in ranks for count in each.counts] == routing.by_expert
    assert [len(each.ordered) for each in ranks] == routing.by_rank
    row_bytes = ranks[0].tokens[0].numel() * 4
    told = 8 * 12 * (n - 1) // n
    assert [(sent - told) // 2 + told for sent in routing.sent(row_bytes)] == [each.n_bytes for each in ranks]
    assert routing.dropped == sum(int((~each.kept).sum()) for each in ranks)


def test_no_expert_takes_more_than_its_room_and_dropless_drops_nothing():
    """Would catch a capacity line that is drawn somewhere else than where rows are dropped."""
    full = choose(3.0, capacity=1.0)
    assert max(full.by_expert) == full.room
    over = sum(max(0, asked - full.room) for asked in map(sum, zip(*full.wanted, strict=True)))
    assert over <= full.dropped < 1.1 * over  # room that one sequence leaves is no use to another
    free = choose(3.0)
    assert (free.dropped, free.room, free.wanted) == (0, None, free.kept)


def test_a_fair_router_waits_little_and_an_unfair_one_waits_for_the_rank_of_its_favourites():
    """Would catch a skew that likes the last experts, and a wait that is told of the wrong rank."""
    fair, unfair = choose(0.0), choose(3.0)
    assert fair.imbalance < 1.15 < 3.5 < unfair.imbalance <= 4
    assert "rank 3 waits 100% of it for rank 0" in page.words(router(unfair))
    assert f"rank 0 has {unfair.imbalance:.2f} times the mean" in router(unfair).label


def test_the_controls_move_the_picture_and_what_cannot_be_is_refused():
    """Would catch a slider without a picture, and a menu whose choice is forgotten."""
    explorer = RouterExplorer()
    assert explorer.capacity.label == "dropless"
    assert "dropless" in explorer.static().label
    explorer.capacity.value, explorer.top_k.value = 1.25, 4
    assert "4 a token, capacity 1.25" in explorer.static().label
    before = explorer.static().label
    explorer.skew.value = 0.0
    assert explorer.static().label != before
    explorer.ranks.value = 1
    assert "one rank has all" in explorer.shown.value
    with pytest.raises(ValueError, match="capacity is one of dropless, 1.0, 1.25, 1.5, 2.0 .None is dropless., got 9"):
        RouterExplorer(capacity=9)
    with pytest.raises(ValueError, match="16 experts have no 3 equal parts"):
        choose(0.0, n_ranks=3)
    with pytest.raises(ValueError, match="64 experts are too many"):
        router(choose(0.0, 64))
