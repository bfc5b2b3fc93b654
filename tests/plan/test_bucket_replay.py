"""The replay of a backward pass with other buckets: against a wire that is simulated in small steps of time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from labkit.plan.machine.collectives import Line
from labkit.plan.pocket.bucket_replay import Ready, best_bytes, replay, sizes_of

KIB = 1024
BLOCKS = [Ready(f"block{k}", 64 * KIB, 0.008 * (12 - k)) for k in range(12)]
WIRE = Line(0.010, 1.2e-7)


def test_one_bucket_for_all_leaves_at_the_end_and_hides_nothing():
    """Would catch a bucket that leaves before its last gradient is ready."""
    now = replay(BLOCKS, 768 * KIB, WIRE)
    assert len(now.flights) == 1
    assert now.flights[0].start_s == now.backward_s == pytest.approx(0.096)
    assert now.exposed_s == pytest.approx(WIRE.seconds(768 * KIB))
    assert now.hidden == pytest.approx(0)


def test_one_bucket_a_parameter_pays_the_latency_each_time():
    """Would catch buckets that travel side by side on one wire."""
    now = replay(BLOCKS, 1, WIRE)
    assert [each.names for each in now.flights] == [(f"block{k}",) for k in reversed(range(12))]
    assert now.wire_s == pytest.approx(12 * WIRE.seconds(64 * KIB))
    assert all(a.end_s <= b.start_s for a, b in zip(now.flights, now.flights[1:], strict=False))
    assert now.end_s == pytest.approx(0.008 + 12 * WIRE.seconds(64 * KIB))


def test_a_fast_link_leaves_only_the_last_bucket_exposed():
    """Would catch exposed time that counts what backward covers."""
    fast = Line(1e-4, 1e-9)
    now = replay(BLOCKS, 128 * KIB, fast)
    assert now.exposed_s == pytest.approx(fast.seconds(128 * KIB))
    assert now.hidden == pytest.approx(5 / 6)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 1)), min_size=1, max_size=12),
    st.integers(1, 20_000),
    st.floats(0, 0.1),
    st.floats(0, 1e-4),
    st.floats(0, 2),
)
def test_every_bucket_waits_for_its_gradients_and_its_turn(gradients, size, alpha, beta, backward_s):
    """Would catch a bucket out of turn, a gradient that is lost or sent twice, and an end before the last flight."""
    ready = [Ready(f"p{k}", n_bytes, at) for k, (n_bytes, at) in enumerate(gradients)]
    now = replay(ready, size, Line(alpha, beta), backward_s)
    sent = [name for each in now.flights for name in each.names]
    assert sorted(sent) == sorted(each.name for each in ready)
    at, free = {each.name: each.at_s for each in ready}, 0.0
    for each in now.flights:
        assert each.full_s == max(at[name] for name in each.names)
        assert each.start_s == max(each.full_s, free)
        assert each.end_s == pytest.approx(each.start_s + alpha + beta * each.n_bytes)
        assert each.n_bytes <= size or len(each.names) == 1
        free = each.end_s
    assert now.end_s == max(free, backward_s, *at.values())
    assert 0 <= now.exposed_s <= now.end_s
    assert -1e-9 <= now.hidden <= 1 + 1e-9


def test_the_best_size_is_the_earliest_end():
    """Would catch a latest end, and one bucket for all where the latency is nothing."""
    ends = {size: replay(BLOCKS, size, WIRE).end_s for size in sizes_of(BLOCKS)}
    assert list(ends) == [64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 768 * KIB]
    assert best_bytes(BLOCKS, WIRE) == min(ends, key=ends.get) == 256 * KIB
    assert best_bytes(BLOCKS, Line(0, 1.2e-7)) == 64 * KIB
    assert best_bytes(BLOCKS, Line(1.0, 0)) == 768 * KIB
    assert sizes_of([Ready("one", 4, 0.0)]) == [4]


def test_what_makes_no_sense_is_refused():
    """Would catch a picture of nothing."""
    with pytest.raises(ValueError, match="needs gradients"):
        replay([], 1, WIRE)
    with pytest.raises(ValueError, match="needs gradients"):
        replay([Ready("p", 4, math.nan)], 1, WIRE)
    for size in (0, math.inf, math.nan):
        with pytest.raises(ValueError, match="a bucket holds 1 byte or more"):
            replay(BLOCKS, size, WIRE)
