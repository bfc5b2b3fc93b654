"""Placements of a DTensor and units of fully_shard as arithmetic; tests/comm/test_stock_laws.py measures them."""

from __future__ import annotations

import pytest
import torch

from labkit.plan.pocket.redistribution import Redistribution, chunk, redistribution
from labkit.plan.pocket.sharded_units import ShardedUnit, unit_traffic
from tests.cases import cases


@cases("size", (0, 1, 3, 5, 8, 12))
@cases("n", (1, 2, 3, 4, 7))
def test_chunks_are_those_of_torch(size, n):
    """Would catch chunks that are cut as evenly as possible, as labkit's own are."""
    theirs = [list(piece) for piece in torch.arange(size).chunk(n)] if size else []
    for rank in range(n):
        first, length = chunk(size, n, rank)
        assert list(range(first, first + length)) == (theirs[rank] if rank < len(theirs) else [])


def test_an_exchange_of_chunks_sends_n_times_less_than_gathering_everything():
    """Would catch a law that charges the detour of CPUs to a mesh of GPUs."""
    straight = redistribution("S(0)", "S(1)", (8, 12), 4, 2)
    detour = redistribution("S(0)", "S(1)", (8, 12), 4, 2, on_cpu=True)
    assert (straight.verb, detour.verb) == ("all_to_all", "all_gather")
    assert detour.sent_bytes == 4 * straight.sent_bytes == 3 * 8 * 12 * 2 // 4


@cases("placements", (("S(0)", "S(0)"), ("R", "S(1)"), ("R", "R"), ("P(sum)", "P(sum)")))
def test_what_a_rank_has_already_is_not_sent(placements):
    """Would catch bytes for a cut."""
    assert redistribution(*placements, (5, 6), 3, 4) == Redistribution("", 0)


@cases(("arguments", "words"), (
    (("S(2)", "R", (4, 4), 2, 4), "has 2"),
    (("S(0)", "P(sum)", (4, 4), 2, 4), "cannot become"),
    (("shard", "R", (4, 4), 2, 4), "a placement is"),
    (("S(0)", "R", (4, 4), 0, 4), "at least 1"),
))  # fmt: skip
def test_what_no_redistribution_is_is_refused_with_a_sentence(arguments, words):
    """Would catch an IndexError, and bytes for a redistribution that torch refuses."""
    with pytest.raises(ValueError, match=words):
        redistribution(*arguments)


def test_copies_of_shards_cost_a_sum_of_the_shards_alone():
    """Would catch an all_reduce of all gradients in HSDP, and a padding that is forgotten."""
    unit = ShardedUnit(((5, 4), (3,)))
    assert unit.chunk_elements(2) == 3 * 4 + 2
    assert [unit.held_elements(2, rank) for rank in range(2)] == [3 * 4 + 2, 2 * 4 + 1]
    assert unit_traffic([unit], 2, 2, 4, copies=4)[0].copies == 2 * 3 / 4 * 14 * 4
    with pytest.raises(ValueError, match="n_micro"):
        unit_traffic([unit], 2, n_micro=0)
    with pytest.raises(ValueError, match="no dim"):
        ShardedUnit(((),))
