"""The laws against what they must be; that the real algorithms obey them is in tests/comm."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.plan.collectives import Line, crossover_bytes, fit, seconds, sent_bytes, steps


@given(st.integers(2, 40), st.integers(1, 1000))
def test_a_ring_sends_less_than_twice_the_tensor_however_many_ranks(n, k):
    """Would catch a law in which the bytes grow with the ranks."""
    assert sent_bytes("ring", "all_reduce", n, n * k) == 2 * (n - 1) * k < 2 * n * k


def test_440_mb_take_the_published_times():
    """Would catch a unit that is wrong by 8 or by 1024 (claims c16: 0.73 ms at 600 GB/s, 10 ms at 44 GB/s)."""
    assert Line(0, 1 / 600e9).seconds(440e6) == pytest.approx(0.73e-3, rel=0.01)
    assert Line(0, 1 / 44e9).seconds(440e6) == pytest.approx(10e-3, rel=0.01)


def test_a_ring_has_linear_latency_and_a_tree_logarithmic():
    """Would catch the common claim that a ring's latency is O(log n) (claims c14)."""
    assert [steps("ring", "all_reduce", n) for n in (2, 4, 64)] == [2, 6, 126]
    assert [steps("tree", "all_reduce", n) for n in (2, 4, 64)] == [2, 4, 12]


@given(st.integers(4, 64), st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-8))
def test_ring_and_tree_meet_at_the_crossover(n, alpha, beta):
    """Would catch a formula that holds for powers of two only."""
    link = Line(alpha, beta)
    size = crossover_bytes(n, link)
    assert 0 < size < math.inf
    ring, tree = (seconds(name, "all_reduce", n, size, link) for name in ("ring", "tree"))
    assert ring == pytest.approx(tree, rel=1e-6)
    assert seconds("ring", "all_reduce", n, 2 * size, link) < seconds("tree", "all_reduce", n, 2 * size, link)


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7))
def test_a_line_is_found_again(alpha, beta):
    """Would catch a fit in which the largest message decides alone."""
    line = Line(alpha, beta)
    found = fit([(size, line.seconds(size)) for size in (64, 4096, 1 << 16, 1 << 20, 1 << 24)])
    assert found.alpha_s == pytest.approx(alpha, rel=1e-3)
    assert found.beta_s_per_byte == pytest.approx(beta, rel=1e-3)


def test_nonsense_is_refused_and_nothing_is_negative():
    """Would catch a negative latency from noise."""
    assert fit([(100, 1e-6), (1000, 2e-5)]).alpha_s == 0.0
    assert fit([(100, 2e-5), (1000, 1e-5)]).beta_s_per_byte == 0.0
    for bad in ([], [(1, 1.0)], [(1, 1.0), (1, 2.0)], [(1, 0.0), (2, 1.0)]):
        with pytest.raises(ValueError, match="two different sizes"):
            fit(bad)
    with pytest.raises(ValueError, match="ring, tree, star"):
        sent_bytes("mesh", "all_reduce", 2, 8)
