"""The rule that names a slow rank: what it must name, and what it must be silent about."""

from __future__ import annotations

import random

import pytest

from labkit.comm.slow_rank import CollectiveArrivals, Noise, chance

QUIET = Noise({0: 0.0, 1: 0.0, 2: 0.0}, crowded=False)


def arrivals_of(late_s, n_ranks=2, apart_s=0.1):
    """Collectives `apart_s` apart; `late_s` has (rank, seconds) of the last to come to each."""
    arrivals = CollectiveArrivals()
    for number, (last, seconds) in enumerate(late_s):
        at = int(number * apart_s * 1e9)
        arrivals.add({rank: at + (int(seconds * 1e9) if rank == last else 0) for rank in range(n_ranks)})
    return arrivals


def test_a_rank_that_is_always_late_is_named_with_its_seconds():
    """Would catch a rule that is never satisfied, and seconds of others that are charged to the rank."""
    slow = arrivals_of([(1, 0.05)] * 20 + [(0, 0.001)] * 5 + [(1, 0.05)] * 20).slow(2, 4.5, QUIET)
    assert (slow.rank, slow.times, slow.of) == (1, 40, 40)
    assert slow.seconds == pytest.approx(2.0)
    assert slow.median_s == pytest.approx(0.05)
    assert slow.chance < 1e-3


@pytest.mark.parametrize(
    ("what", "late_s", "noise"),
    [
        ("half the time is chance with two ranks", [(k % 2, 0.05) for k in range(40)], QUIET),
        ("the same rank each time, by less than a scheduler's slice", [(1, 0.002)] * 66, QUIET),
        ("only in the first half", [(1, 0.09)] * 20 + [(0, 0.0)] * 20, QUIET),
        ("three times", [(1, 0.5)] * 3 + [(0, 0.0)] * 3, QUIET),
        ("late while it had no core", [(1, 0.05)] * 40, Noise({1: 1.2}, crowded=False)),
        ("nothing is known of cores, and the machine is full", [(1, 0.05)] * 40, Noise({}, crowded=True)),
    ],
)
def test_what_may_be_noise_accuses_nobody(what, late_s, noise):
    """Would catch a rule without one of its conditions: each case breaks one of them alone."""
    assert arrivals_of(late_s).slow(2, 4.0, noise) is None, what


def test_equal_ranks_on_a_noisy_machine_are_never_accused():
    """Would catch a rule that takes one of 200 runs of equal ranks, with long pauses at random, for a slow rank."""
    dice = random.Random(0)
    for _ in range(200):
        late_s = [(dice.randrange(3), dice.expovariate(20)) for _ in range(60)]
        assert arrivals_of(late_s, 3).slow(3, 6.0, QUIET) is None


def test_the_bound_of_a_chance_is_above_the_binomial_tail():
    """Would catch a bound that promises more than it holds; the reference is the sum of the binomial's terms."""
    from math import comb

    for times in range(5, 11):
        tail = sum(comb(10, k) * 0.5**10 for k in range(times, 11))
        assert chance(times, 10, 2) >= min(1.0, 2 * tail) or times == 5
    assert chance(10, 10, 2) == pytest.approx(2 * 0.5**10)
    assert chance(5, 10, 2) == 1.0
