"""Published schedules: torch's orders, the papers' bubbles and memory, and stages that have copies."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from labkit.plan.schedules.published_schedules import (
    dualpipe,
    dualpipe_v,
    stretch,
    v_half,
    v_min,
    waits_in_calls,
    zb_h1,
    zb_h2,
    zb_v,
)
from labkit.plan.schedules.schedule import Action, Schedule, bubble, in_flight, one_f_one_b, simulate, validate
from tests.cases import cases
from tests.plan.test_schedule import ours

SIZES = [(p, m) for p in (1, 2, 3, 4, 6, 8) for m in (p, p + 1, 2 * p, 3 * p)]
LONG = [(p, m) for p, m in SIZES if m >= 2 * p]
IN_V = (zb_v, v_half, v_min, dualpipe_v)


def took(spans) -> float:
    return max(span.end for span in spans)


@given(st.integers(1, 9), st.integers(1, 24), st.sampled_from((zb_h1, zb_h2, *IN_V, dualpipe)))
@settings(max_examples=150)
def test_every_schedule_validates_for_all_numbers_of_ranks_and_micro_batches(p, m, make):
    """Would catch a phase that is right for the sizes of the paper's picture only, and another's placement."""
    p, m = (p + p % 2, m + 1) if make is dualpipe else (p, m)
    made = validate(make(p, m))
    assert (made.n_ranks, made.n_micro) == (p, m)
    assert made.splits
    if make in IN_V:
        assert [made.stages_of(rank) for rank in range(p)] == [(rank, 2 * p - 1 - rank) for rank in range(p)]


def theirs(actions) -> list[str]:
    """torch's program action by action: a whole backward is B and W, a call of two actions is one after the other."""
    names = []
    for action in actions:
        for part in () if action is None else action.sub_actions or (action,):
            kinds = {"F": "F", "I": "B", "W": "W", "B": "BW"}[part.computation_type.value]
            names += [f"{part.stage_index}{letter}{part.microbatch_index}" for letter in kinds]
    return names


@cases(("p", "m"), SIZES)
def test_zb_v_is_in_torchs_order(p, m):
    """Would catch a W that comes a place too early or too late: torch's own table, made in another way."""
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    asked = SimpleNamespace(pp_group_size=p, _n_microbatches=m, n_local_stages=2, num_stages=2 * p)
    order = [ScheduleZBVZeroBubble._calculate_single_rank_operations(asked, rank) for rank in range(p)]
    assert [ours(program) for program in zb_v(p, m).programs] == [theirs(row) for row in order]


@cases(("p", "m"), LONG)
def test_dualpipe_v_is_in_torchs_order(p, m):
    """Would catch a phase that is one round too long, and the wrong half of the last backwards cut in two."""
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV

    asked = SimpleNamespace(pp_group_size=p, _n_microbatches=m, n_local_stages=2, num_stages=2 * p)
    order = [ScheduleDualPipeV._calculate_single_rank_operations(asked, rank) for rank in range(p)]
    assert [ours(program) for program in dualpipe_v(p, m).programs] == [theirs(row) for row in order]


@cases(("p", "m"), LONG)
def test_each_rank_holds_what_the_papers_say(p, m):
    """Would catch a schedule that buys its bubble with memory which the paper does not spend. In micro-batches of a
    rank's part; in a V, where a rank has two thin stages, twice the number."""
    assert max(in_flight(zb_h1(p, m))) == p
    assert in_flight(zb_h2(p, m)) == [2 * p - 1] * p
    assert max(in_flight(zb_v(p, m))) == 2 * p
    assert max(in_flight(v_half(p, m))) == 2 * ((p + 2) // 2)
    assert max(in_flight(v_min(p, m))) == 2 * ((p + 4) // 3)
    assert set(in_flight(dualpipe_v(p, m))) == {2 * p + 1}
    if p % 2 == 0:
        assert set(in_flight(dualpipe(p, 2 * m))) == {p + 1}


@cases(("p", "m"), LONG)
@cases("cost", [(1.0, 2.0, 0.5), (1.0, 1.9, 0.4)])
def test_zero_bubbles_of_the_first_paper_wait_as_it_says(p, m, cost):
    """Would catch a bubble that is zero only because W and B are taken to be equal: (p-1)(F + B - W) in ZB-H1, where B
    and W need not be equal, in ZB-H2 and ZB-V none where F = B = W. The ramp counts in `bubble` alone."""
    forward, backward, share = cost
    spans = simulate(zb_h1(p, m), forward, backward, weights=share)
    assert stretch(spans) - m * (forward + backward) == pytest.approx((p - 1) * (forward + backward * (1 - 2 * share)))
    if share == 0.5:
        for made, whole in ((zb_h2(p, m), 1), (zb_v(p, m), 2)):
            spans = simulate(made, forward / whole, backward / whole)
            assert stretch(spans) == pytest.approx(m * (forward + backward))
            assert took(spans) - stretch(spans) == pytest.approx((p - 1) * forward / whole)
            assert bubble(spans) > 0 or p == 1


@cases("p", [2, 3, 4, 6, 8])
def test_v_half_and_v_min_wait_about_a_half_and_two_thirds_as_long_as_1f1b(p):
    """Would catch turns that are longer than they must be. The papers' p/2m and 2p/3m are for many ranks, and round."""
    m = 4 * p
    of_1f1b = took(simulate(one_f_one_b(p, m))) - 3 * m
    half, least = (took(simulate(make(p, m), 0.5, 1.0)) - 3 * m for make in (v_half, v_min))
    assert half == pytest.approx(3 * (p - 1) / 2, abs=0.5)
    assert 0.4 * of_1f1b <= half <= 0.7 * of_1f1b
    assert 0.5 * of_1f1b <= least <= 0.75 * of_1f1b


@cases("p", [2, 4, 6, 8])
@cases("cost", [(1.0, 2.0, 0.5), (1.0, 1.7, 0.5), (0.8, 1.8, 0.4)])
def test_dualpipes_two_forms_are_one_number_and_the_simulation_of_calls_finds_it(p, cost):
    """Would catch B whole and B halved mixed up in a formula, and a published number that is quoted for what labkit
    runs: action by action the same programs wait half as long."""
    forward, backward, share = cost
    w, b, m = share * backward, (1 - share) * backward, 3 * p
    pair = forward + backward
    whole = (p / 2 - 1) * (pair + backward - 3 * w)
    halved = (p / 2 - 1) * (pair + b - 2 * w)
    assert whole == pytest.approx(halved)
    for made, pp in ((dualpipe(p, m), p), (dualpipe_v(p, m), 2 * p)):
        law = (pp / 2 - 1) * (pair + backward - 3 * w)
        waits = waits_in_calls(made, forward, backward, share)
        alone = took(simulate(made, forward, backward, weights=share)) - sum(cost[:2]) * m * (pp // p)
        if forward == b == w:
            assert waits == pytest.approx([law] * p)
            assert alone == pytest.approx((pp / 2 - 1) * (forward + b - w))
        else:  # the slowest rank waits at most what the law says and two forwards a rank
            assert abs(max(waits) - law) <= (pp / 2 - 1) * 0.5


def test_a_pair_in_one_call_that_takes_less_time_shortens_the_wait():
    """Would catch the time of a pair that is looked up nowhere: F&B of five sixths of F + B, on the turning rank."""
    law = 3 * (5 + 4 - 3 * 2) / 2
    assert max(waits_in_calls(dualpipe_v(4, 12), together=5 / 6)) == pytest.approx(law)


# -- copies of a stage

TWO = ((0, 1), (1, 0))


def both_ways() -> Schedule:
    """Two ranks, a micro-batch in each direction."""
    programs = tuple(
        tuple(Action(kind, stage, micro) for kind, stage, micro in row)
        for row in (
            [("F", 0, 0), ("F", 1, 1), ("B", 1, 1), ("B", 0, 0)],
            [("F", 0, 1), ("F", 1, 0), ("B", 1, 0), ("B", 0, 1)],
        )
    )
    return Schedule("both ways", 2, 2, 2, programs, TWO)


def test_a_stage_with_copies_is_where_the_micro_batch_goes_through_it():
    """Would catch a copy that is taken for the stage of all micro-batches, and a message that is charged at home."""
    made = validate(both_ways())
    assert [made.rank_of(0, micro) for micro in (0, 1)] == [0, 1]
    assert made.ranks_of(1) == (1, 0)
    assert made.stages_of(0) == made.stages_of(1) == (0, 1)
    assert took(simulate(made)) == 6
    assert took(simulate(made, send=0.5)) == 7
    with pytest.raises(ValueError, match=r"stage 0 of both ways has copies on ranks \(0, 1\)"):
        made.rank_of(0)
    placed = dualpipe(4, 8)
    assert [placed.ranks_of(stage) for stage in range(4)] == [(0, 3), (1, 2), (2, 1), (3, 0)]


def test_what_is_wrong_with_copies_is_named():
    """Would catch a backward on the rank that did not run the forward, a copy that nobody uses, and dualpipe for ranks
    that have no partner."""
    first, second = both_ways().programs
    torn = replace(both_ways(), programs=((*first[:3], Action("B", 0, 1)), (*second[:3], Action("B", 0, 0))))
    with pytest.raises(ValueError, match="has 0B1 on rank 0, but the forward on rank 1: keep both on one rank"):
        validate(torn)
    with pytest.raises(ValueError, match="places stage 1 on rank 0, which runs no action of it: leave it out"):
        validate(replace(one_f_one_b(2, 2), placement=(0, (1, 0))))
    for p, m in ((3, 4), (2, 1)):
        with pytest.raises(ValueError, match=f"n_ranks={p}, n_micro={m}: dualpipe_v"):
            dualpipe(p, m)
    with pytest.raises(ValueError, match="weights is W's share of a backward that is cut, 0 to 1, got 2"):
        simulate(zb_v(2, 2), weights=2)
