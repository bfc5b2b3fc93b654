"""How blocks fall on stages: against every cut there is."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings, strategies as st

from labkit.plan.job.stages import cut
from labkit.plan.laws.schedules import LAWS


def slowest(counts, head):
    return max(*counts[:-1], counts[-1] + head) if len(counts) > 1 else counts[0] + head


@settings(max_examples=200)
@given(st.integers(1, 14), st.integers(1, 6), st.floats(0, 8))
def test_no_cut_has_a_faster_slowest_stage(n_layer, n_stages, head):
    """Against all cuts there are. Would catch a head that nobody counts: the last stage then works alone."""
    n_stages = min(n_stages, n_layer)
    bounds = combinations_with_replacement(range(n_layer + 1), n_stages - 1)
    every = [[b - a for a, b in pairwise((0, *ends, n_layer))] for ends in bounds]
    counts = cut(n_layer, n_stages, head)
    assert sum(counts) == n_layer
    assert slowest(counts, head) == pytest.approx(min(slowest(other, head) for other in every))


def test_a_light_head_leaves_the_cut_even():
    """Would catch a cut that moves blocks for nothing: an even one is what everybody expects."""
    assert cut(12, 5, 0.0) == (2, 2, 3, 2, 3)
    assert cut(8, 4, 0.9) == (2, 2, 2, 2)


@pytest.mark.parametrize("law", [law for law in LAWS.values() if law.searched], ids=lambda law: law.name)
def test_the_program_of_a_rank_alone_is_the_one_that_it_has_beside_the_others(law):
    """Would catch a search that weighs the micro-batches of another rank, or looks for a stage on one."""
    v = law.stages or 2
    for p, m in ((1, 1), (2, 4), (3, 3), (4, 12)):
        schedule = law.make(p, m, v)
        assert [law.program(p, m, v, place) for place in range(p)] == list(schedule.programs)
        assert [schedule.rank_of(stage) for stage in range(p * v)] == [stage % p for stage in range(p * v)]
