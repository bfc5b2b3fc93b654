"""Schedules: the orders of torch, the laws of waiting and holding, and what is refused and how."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from labkit.plan.schedules.program import play
from labkit.plan.schedules.schedule import (
    Action,
    Schedule,
    Span,
    bubble,
    gpipe,
    in_flight,
    interleaved,
    naive,
    needs,
    one_f_one_b,
    simulate,
    validate,
    zero_bubble,
)
from tests.cases import cases
from tests.counting import lines

SIZES = [(p, m) for p in range(1, 7) for m in (1, 2, 3, 4, 5, 8, 12, 13)]


@st.composite
def any_schedule(draw, most=6):
    p, m = draw(st.integers(1, most)), draw(st.integers(1, 2 * most))
    v = draw(st.integers(1, 4))
    placement = draw(st.lists(st.integers(0, p - 1), min_size=1, max_size=2 * p))
    made = (gpipe(p, m), gpipe(p, m, placement), naive(p), one_f_one_b(p, m), interleaved(p, m, v), zero_bubble(p, m))
    return draw(st.sampled_from(made))


def shuffled(schedule: Schedule, seed: int, swaps: int) -> Schedule:
    """The same actions with neighbours swapped here and there: some of these orders deadlock, some do not."""
    dice, programs = random.Random(seed), [list(program) for program in schedule.programs]
    for _ in range(swaps):
        program = dice.choice(programs)
        if len(program) > 1:
            k = dice.randrange(len(program) - 1)
            program[k], program[k + 1] = program[k + 1], program[k]
    return replace(schedule, name="shuffled", programs=tuple(map(tuple, programs)))


# -- the orders


def theirs(actions) -> list[str]:
    """torch's program without its idle slots and its gradient reduction: `["0F0", "0B0"]`."""
    kinds = {"F": "F", "B": "B", "I": "B", "W": "W"}
    named = [(kinds.get(a.computation_type.value), a.stage_index, a.microbatch_index) for a in actions if a is not None]
    return [f"{stage}{kind}{micro}" for kind, stage, micro in named if kind]


def ours(program) -> list[str]:
    return [str(action) for action in program]


@cases(("p", "m"), [(p, m) for p, m in SIZES if m >= p])
def test_gpipe_and_1f1b_are_in_torchs_order(p, m):
    """Would catch one forward too many or too few before the first backward. (torch's own table of 1f1b numbers the
    forwards of the last rank from 1 instead of 0; what it runs there is checked on real processes.)"""
    from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

    asked = SimpleNamespace(_num_stages=p, _n_microbatches=m)
    order = ScheduleGPipe._get_pipeline_order(asked)
    assert [ours(program) for program in gpipe(p, m).programs] == [theirs(order[rank]) for rank in range(p)]
    order = Schedule1F1B._get_pipeline_order(asked)
    found = one_f_one_b(p, m).programs
    assert [ours(program) for program in found[:-1]] == [theirs(order[rank]) for rank in range(p - 1)]
    assert ours(found[-1]) == [f"{p - 1}{kind}{i}" for i in range(m) for kind in "FB"]


@cases("v", [1, 2, 3])
@cases(("p", "m"), SIZES)
def test_interleaved_is_in_torchs_order_wherever_torch_has_one(p, m, v):
    """Would catch chunks in the wrong order, a wrong warm-up, and rounds of another length than torch's."""
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    rounds = max(1, m // p)
    if m % rounds:
        validate(interleaved(p, m, v))  # torch refuses these; ours take uneven rounds
        return
    asked = SimpleNamespace(
        n_local_stages=v, microbatches_per_round=m // rounds, pp_group_size=p, _n_microbatches=m
    )  # fmt: skip
    order = [ScheduleInterleaved1F1B._calculate_single_rank_operations(asked, rank) for rank in range(p)]
    assert [ours(program) for program in interleaved(p, m, v).programs] == [theirs(each) for each in order]


def test_zero_bubble_keeps_the_order_of_1f1b_and_puts_each_w_rank_micro_batches_later():
    """Would catch W's that come before somebody who waits, and a lag that is the same on every rank."""
    assert [" ".join(ours(program)) for program in zero_bubble(3, 4).programs] == [
        "0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3",
        "1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3",
    ]
    for p, m in SIZES:
        without = [[a for a in program if a.kind != "W"] for program in zero_bubble(p, m).programs]
        assert without == [list(program) for program in one_f_one_b(p, m).programs]


def test_actions_and_schedules_say_what_they_are():
    """Would catch a stage and a micro-batch that change places, and a placement that is not looked at."""
    assert str(Action("F", 1, 0)) == "1F0"
    assert [interleaved(2, 2, 2).rank_of(stage) for stage in range(4)] == [0, 1, 0, 1]
    made = gpipe(2, 1, placement=(0, 1, 1, 0, 0))
    assert [made.rank_of(stage) for stage in range(5)] == [0, 1, 1, 0, 0]
    assert made.stages_of(0) == (0, 3, 4)
    assert (zero_bubble(2, 2).splits, one_f_one_b(2, 2).splits) == (True, False)
    with pytest.raises(ValueError, match="stages of 1f1b are 0 to 1, got 2"):
        one_f_one_b(2, 2).rank_of(2)


def test_needs_says_happens_before():
    """Would catch a backward that does not wait for its own forward, or a first stage that waits for nobody's."""
    assert needs(Action("F", 0, 3), 4) == []
    assert needs(Action("F", 2, 3), 4) == [Action("F", 1, 3)]
    assert needs(Action("B", 3, 3), 4) == [Action("F", 3, 3)]
    assert set(needs(Action("B", 2, 3), 4)) == {Action("F", 2, 3), Action("B", 3, 3)}
    assert needs(Action("W", 2, 3), 4) == [Action("B", 2, 3)]


# -- what is allowed


@given(any_schedule())
@settings(max_examples=150)
def test_every_schedule_made_validates_and_runs_each_action_after_what_it_needs(schedule):
    """Would catch a builder that deadlocks for some sizes, and an order of play that runs ahead of a need."""
    assert validate(schedule) is schedule
    done = set()
    for rank, action, before in play(schedule):
        assert done >= set(before) == set(needs(action, schedule.n_stages))
        assert schedule.rank_of(action.stage) == rank
        done.add(action)
    assert len(done) == sum(map(len, schedule.programs))


def waits_for_itself(schedule: Schedule) -> bool:
    """Whether "comes before" has a circle, found in another way: by taking away actions that wait for nobody."""
    before = {a: set(needs(a, schedule.n_stages)) for program in schedule.programs for a in program}
    for program in schedule.programs:
        for first, second in zip(program, program[1:], strict=False):
            before[second].add(first)
    while free := {action for action, waits in before.items() if not waits}:
        before = {action: waits - free for action, waits in before.items() if action not in free}
    return bool(before)


@given(any_schedule(most=4), st.integers(0, 10**6), st.integers(1, 12))
@settings(max_examples=200)
def test_a_reordered_schedule_is_refused_exactly_if_its_ranks_wait_in_a_circle(schedule, seed, swaps):
    """Would catch a deadlock that slips through, and a good order that is refused."""
    made = shuffled(schedule, seed, swaps)
    if waits_for_itself(made):
        with pytest.raises(ValueError, match="deadlocks"):
            validate(made)
    else:
        assert validate(made) is made


def test_a_deadlock_names_the_stuck_action_of_each_rank():
    """Would catch a message that says only that something is wrong."""
    programs = (
        [("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)],
        [("F", 1, 1), ("B", 1, 1), ("F", 1, 0), ("B", 1, 0)],
    )
    assert validate(Schedule("mine", 2, 2, 2, programs)).programs[0][0] == Action("F", 0, 0)
    early = ([("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)], programs[1])
    with pytest.raises(ValueError, match=r"'mine' deadlocks: rank 0 at 0B0 needs 1B0; rank 1 at 1F1 needs 0F1"):
        validate(Schedule("mine", 2, 2, 2, early))
    with pytest.raises(ValueError, match="rank 0 at 0B0 needs 1B0; rank 1 at 1F1 needs 0F1"):
        simulate(Schedule("mine", 2, 2, 2, early))


def without(schedule, *gone):
    kept = tuple(tuple(a for a in program if a not in gone) for program in schedule.programs)
    return replace(schedule, programs=kept)


def plus(schedule, rank, *more):
    programs = list(schedule.programs)
    programs[rank] = (*programs[rank], *more)
    return replace(schedule, programs=tuple(programs))


GOOD = one_f_one_b(2, 2)
BAD = [
    (without(GOOD, Action("B", 1, 1)), r"lacks 1B1: each of F, B once"),
    (without(GOOD, *GOOD.programs[0], *GOOD.programs[1]), r"lacks 0B0, 0B1, .* and 2 more"),
    (without(zero_bubble(2, 2), Action("W", 0, 1)), r"lacks 0W1: each of F, B, W once"),
    (plus(GOOD, 0, Action("B", 0, 1)), "does twice 0B1"),
    (plus(GOOD, 0, Action("F", 0, 2)), "knows no 0F2"),
    (plus(GOOD, 0, Action("F", 2, 0)), "knows no 2F0"),
    (plus(GOOD, 0, Action("X", 0, 0)), "knows no 0X0"),
    (replace(GOOD, programs=GOOD.programs[::-1]), "1F0.* on rank 0, but stage 1 lives on rank 1"),
    (replace(GOOD, placement=(1, 0)), "0F0.* on rank 0, but stage 0 lives on rank 1"),
    (replace(GOOD, placement=(0,)), "places for 1 of 2 stages"),
    (replace(GOOD, n_ranks=3), "2 programs for 3 ranks"),
    (replace(GOOD, n_micro=0), "n_micro must be a whole number, at least 1, got 0"),
]


@cases(("schedule", "message"), BAD)
def test_what_is_missing_doubled_or_misplaced_is_named(schedule, message):
    """Would catch a check that lets one of these through, or does not say which action it is about."""
    with pytest.raises(ValueError, match=message):
        validate(schedule)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gpipe(0, 4), "n_ranks must be .* got 0"),
        (lambda: one_f_one_b(2, 0), "n_micro must be .* got 0"),
        (lambda: one_f_one_b(2, 2.0), "n_micro must be a whole number, at least 1, got 2.0"),
        (lambda: interleaved(2, 2, 0), "stages_per_rank must be .* got 0"),
        (lambda: gpipe(2, 1, (0, 2)), r"ranks 0 to 1, got 2 in \(0, 2\)"),
        (lambda: simulate(gpipe(2, 1), forward=[1, 1, 1]), "forward is .* 2 of them, one for each stage"),
        (lambda: simulate(gpipe(2, 1), backward=-1), "backward is a number of seconds, 0 or more"),
        (lambda: simulate(gpipe(2, 1), send=-1), "send is a number of seconds, 0 or more, got -1"),
        (lambda: bubble([]), "0 spans"),
    ],
)
def test_counts_and_costs_that_make_no_sense_are_refused(make, message):
    """Would catch a schedule of nothing, and costs that are silently cut or repeated."""
    with pytest.raises(ValueError, match=message):
        make()


# -- how long it takes, and what it holds


@cases(("p", "m"), SIZES)
def test_bubbles_follow_the_law(p, m):
    """Would catch a bubble of gpipe or 1f1b other than (p-1)/(m+p-1), or of interleaved other than (p-1)/(vm+p-1)."""
    law = (p - 1) / (m + p - 1)
    assert bubble(simulate(gpipe(p, m))) == pytest.approx(law)
    assert bubble(simulate(gpipe(p, m), 0.3, 0.5)) == pytest.approx(law)
    if m >= p:
        assert bubble(simulate(one_f_one_b(p, m))) == pytest.approx(law)
        assert bubble(simulate(one_f_one_b(p, m), 3.0, 1.0)) == pytest.approx(law)
    for v in (1, 2, 3, 4):
        if m % p == 0:
            spans = simulate(interleaved(p, m, v), 1 / v, 2 / v)
            assert bubble(spans) == pytest.approx((p - 1) / (v * m + p - 1))
            assert max(span.end for span in spans) == pytest.approx(3 * (m + (p - 1) / v))
    assert bubble(simulate(naive(p))) == pytest.approx((p - 1) / p)


@cases(("p", "m"), [(p, m) for p, m in SIZES if m >= p])
def test_zero_bubble_loses_f_plus_b_minus_w(p, m):
    """Would catch W's that delay a neighbour: each rank waits (p-1)(F + B - W), a third of 1f1b's if all are equal."""
    end = max(span.end for span in simulate(zero_bubble(p, m), forward=1.0, backward=2.0))
    assert end == pytest.approx(3 * m + (p - 1))
    assert end < max(span.end for span in simulate(one_f_one_b(p, m))) or p == 1


@cases(("p", "m"), SIZES)
def test_activations_held_follow_the_law(p, m):
    """Would catch a schedule that holds more than it must: m for gpipe, min(m, p - r) for 1f1b, min(m, p) for ZB-H1."""
    assert in_flight(gpipe(p, m)) == [m] * p
    assert in_flight(one_f_one_b(p, m)) == [min(m, p - rank) for rank in range(p)]
    assert in_flight(zero_bubble(p, m)) == [min(m, p)] * p
    for v in (1, 2, 3):
        if m % p == 0:
            law = [min(v * m, (v - 1) * p + 2 * (p - 1 - rank) + 1) for rank in range(p)]
            assert in_flight(interleaved(p, m, v)) == law


@given(any_schedule(), st.floats(0.0, 2.0), st.integers(0, 10**6))
@settings(max_examples=80)
def test_simulated_ranks_do_one_thing_at_a_time_wait_for_messages_and_never_dawdle(schedule, send, seed):
    """Would catch overlap on a rank, an action before its message is there, and an action later than it could be."""
    dice = random.Random(seed)
    forward, backward = ([dice.uniform(0.1, 3.0) for _ in range(schedule.n_stages)] for _ in range(2))
    spans = simulate(schedule, forward, backward, send)
    at = {span.action: span for span in spans}
    free = [0.0] * schedule.n_ranks
    for rank, program in enumerate(schedule.programs):
        for action in program:
            span, stage = at[action], action.stage
            far = [send * (schedule.rank_of(each.stage) != rank) for each in needs(action, schedule.n_stages)]
            come = [at[each].end + d for each, d in zip(needs(action, schedule.n_stages), far, strict=True)]
            assert span.start == pytest.approx(max([free[rank], *come]))
            cost = forward[stage] if action.kind == "F" else backward[stage] / (2 if schedule.splits else 1)
            assert span.end - span.start == pytest.approx(cost)
            free[rank] = span.end
    assert [span.start for span in spans] == sorted(span.start for span in spans)


def test_a_slow_stage_sets_the_pace():
    """Would catch costs that are looked up by rank or micro-batch instead of by stage."""
    spans = simulate(one_f_one_b(2, 10), forward=[1, 3], backward=[2, 6])
    assert max(span.end for span in spans) == pytest.approx(1 + 10 * 9 + 2)
    assert simulate(naive(2), send=0.5)[-1] == Span(0, Action("B", 0, 0), 5.0, 7.0)


@pytest.mark.parametrize("make", [lambda k: one_f_one_b(8 * k, 64 * k), lambda k: interleaved(4 * k, 64 * k, 2)])
def test_a_simulation_takes_work_in_proportion_to_its_actions(make):
    """Would catch a simulation that looks at all ranks for each action: 64 stages and 512 micro-batches would take
    minutes (benchmarks/planner.py says what they take). Lines of Python are counted, not seconds."""
    small, large = make(1), make(2)
    assert len(simulate(large)) == 4 * len(simulate(small))
    assert lines(lambda: simulate(large)) < 4.5 * lines(lambda: simulate(small))
