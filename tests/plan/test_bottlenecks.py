"""Where a step's seconds went, and what is won if some shrink."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from labkit.plan.breakdown import Breakdown
from labkit.plan.pocket.scaling import amdahl
from labkit.plan.step.bottlenecks import (
    RankTime,
    culprit,
    fed,
    gain,
    gustafson,
    outside,
    scaled,
    shrunk,
    split,
    starved_s,
)
from tests.cases import cases

PARTS = Breakdown.of({"compute": 0.04, "communication": 0.03, "bubble": 0.01, "data": 0.02}, "s")


def rank(compute=(), communication=(), bubble=(), data=()):
    """One rank's time from lists of (begin, end)."""
    return RankTime(compute, communication, bubble, data)


def test_a_split_is_that_of_the_average_rank_and_adds_up():
    """Would catch ranks that are summed, and a part that is lost."""
    parts = split(
        [
            rank(compute=[(0, 4)], communication=[(5, 6)], bubble=[(4, 5)]),
            rank(compute=[(1, 5)], communication=[(5, 6)], data=[(0, 1)]),
        ]
    )
    assert dict(parts) == {"compute": 4, "communication": 1, "bubble": 0.5, "data": 0.5}
    assert parts.total == 6
    assert parts.unit == "s"


def test_waiting_for_a_rank_that_reads_is_data_and_not_a_bubble():
    """Would catch one starved rank that is called an imbalance: nobody works while it reads, and all wait."""
    ranks = [
        rank(compute=[(0, 2)], bubble=[(2, 7)], communication=[(7, 8)]),
        rank(data=[(0, 5)], compute=[(5, 7)], communication=[(7, 8)]),
    ]
    assert starved_s(ranks) == 3  # from 2, when nobody works any more, to 5
    assert dict(split(ranks)) == {"compute": 2, "communication": 1, "bubble": 1, "data": 4}


def test_waiting_beside_somebody_who_works_is_a_bubble():
    """Would catch data that is blamed although a third rank is at work."""
    ranks = [
        rank(bubble=[(0, 4)], compute=[(4, 5)]),
        rank(data=[(0, 2)], bubble=[(2, 4)], compute=[(4, 5)]),
        rank(compute=[(0, 5)]),
    ]
    assert starved_s(ranks) == 0
    assert starved_s([rank(bubble=[(0, 1)]), rank(bubble=[(0, 1)])]) == 0  # nobody reads


def test_flops_tell_what_is_useful_of_compute():
    """Would catch an MFU that counts one rank's peak, or more use than there was compute."""
    ranks = [rank(compute=[(0, 3)], bubble=[(3, 4)]), rank(compute=[(0, 4)])]
    parts = split(ranks, flops=16, peak_flops=4)
    assert parts["useful"] == 2
    assert parts["underutilisation"] == 1.5
    assert parts["useful"] / parts.total == 16 / (4 * 2 * 4)  # the MFU
    assert split(ranks, flops=1e9, peak_flops=1)["useful"] == 3.5
    assert split(ranks, flops=1e9, peak_flops=1)["underutilisation"] == 0


@given(
    st.lists(st.floats(0.001, 1e3), min_size=4, max_size=4),
    st.sampled_from([*PARTS]),
    st.floats(1, 1e6) | st.just(math.inf),
)
def test_what_a_repair_is_worth_is_amdahls_law(values, name, times):
    """Would catch a gain beyond 1 / (1 - p), and a factor that is taken of the whole."""
    parts = Breakdown.of(dict(zip(PARTS, values, strict=True)), "s")
    share = parts[name] / parts.total
    won = gain(parts, name, times)
    assert won == pytest.approx(amdahl(times, 1 - share) if times < math.inf else 1 / (1 - share))
    assert won == pytest.approx(parts.total / shrunk(parts, {name: times}).total)


def test_shrinking_leaves_the_rest_and_its_reasons():
    """Would catch a shrunk step without its other parts."""
    left = shrunk(PARTS, {"communication": 3, "data": math.inf})
    assert dict(left) == pytest.approx({"compute": 0.04, "communication": 0.01, "bubble": 0.01, "data": 0})
    assert left.item("communication").formula == "0.03 s / 3"
    assert shrunk(PARTS, {}) == PARTS
    assert gain(Breakdown.of({"data": 1.0}, "s"), "data") == math.inf


def test_the_culprit_is_the_largest_loss_and_never_the_work():
    """Would catch compute that is accused of taking time."""
    assert culprit(PARTS) == "communication"
    assert culprit(shrunk(PARTS, {"communication": 2})) == "data"
    assert culprit(Breakdown.of({"useful": 9.0, "underutilisation": 1.0, "data": 0.5}, "s")) == "underutilisation"


def test_a_measured_curve_is_against_its_first_point():
    """Would catch weak scaling that is judged as strong, and a curve that begins at two ranks with 100% too much."""
    strong = scaled({4: 30.0, 1: 100.0, 2: 60.0})
    assert [each.n_ranks for each in strong] == [1, 2, 4]
    assert [each.speed_up for each in strong] == pytest.approx([1, 100 / 60, 100 / 30])
    assert strong[-1].efficiency == pytest.approx(100 / 120)
    weak = scaled({1: 100.0, 4: 125.0}, weak=True)
    assert weak[-1].speed_up == pytest.approx(3.2)
    assert weak[-1].efficiency == pytest.approx(0.8)
    later = scaled({2: 60.0, 4: 30.0})
    assert [(each.speed_up, each.efficiency) for each in later] == [(2, 1), (4, 1)]


def test_gustafsons_law_has_no_end():
    """Would catch Amdahl's law under another name."""
    assert gustafson(1, 0.3) == 1
    assert gustafson(256, 0.05) == pytest.approx(256 - 0.05 * 255)
    assert gustafson(64, 0) == 64
    assert gustafson(64, 1) == 1


def test_a_worker_hides_what_the_step_can_hide():
    """Would catch prefetching that makes loading free."""
    assert fed(50, 70) == 120
    assert fed(50, 70, 1) == 70
    assert fed(50, 70, 2) == 50
    assert fed(50, 0) == 50


def test_values_outside_their_limits_are_found_and_so_is_what_is_no_number():
    """Would catch a NaN that passes every limit."""
    assert outside([1, 5, 9, math.nan, math.inf], 2, 8) == [0, 2, 3, 4]
    assert outside([1, 2], high=3) == []


BAD = [
    (lambda: split([]), "got 0 ranks"),
    (lambda: split([rank()]), "no time to split"),
    (lambda: split([rank(compute=[(0, 1)])], flops=3), "flops with a peak"),
    (lambda: shrunk(PARTS, {"wire": 2}), "wire 2 times as fast: the parts are compute, communication"),
    (lambda: gain(PARTS, "data", 0), "data 0 times as fast"),
    (lambda: gain(PARTS, "data", math.nan), "nan times"),
    (lambda: culprit(Breakdown.of({"compute": 1.0, "data": 0.0}, "s")), "nothing is lost"),
    (lambda: scaled({}), "seconds above 0"),
    (lambda: scaled({1: 0.0}), "seconds above 0"),
    (lambda: scaled({0: 1.0}), "seconds above 0"),
    (lambda: gustafson(0, 0.1), "got 0 and 0.1"),
    (lambda: gustafson(2, 1.1), "got 2 and 1.1"),
    (lambda: fed(-1, 1), "0 or more, got -1"),
]


@cases(("ask", "said"), BAD)
def test_questions_that_make_no_sense_are_refused_with_the_numbers(ask, said):
    """Would catch a division by zero."""
    with pytest.raises(ValueError, match=said):
        ask()
