"""The laws against what they must be; that the real algorithms obey them is in tests/comm."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given, strategies as st

from labkit.plan.machine.collectives import Line, crossover_bytes, fit, part_bytes, seconds, sent_bytes, steps
from tests.cases import cases

LINK = Line(3e-5, 2e-9)


def programs(algorithm: str, n: int) -> list[list[tuple[str, int, int]]]:
    """What each rank does in an all_reduce, written down from the textbook: ("send" | "recv", peer, parts of n)."""
    out: list[list[tuple[str, int, int]]] = [[] for _ in range(n)]

    def message(source: int, to: int, parts: int) -> None:
        out[source].append(("send", to, parts))
        out[to].append(("recv", source, parts))

    if algorithm == "ring":
        for _ in range(2 * (n - 1)):
            for rank in range(n):
                out[rank].append(("send", (rank + 1) % n, 1))
            for rank in range(n):
                out[rank].append(("recv", (rank - 1) % n, 1))
        return out
    up = [(rank, 0) for rank in range(1, n)]
    if algorithm == "tree":  # a rank hangs below the one whose number lacks its lowest set bit
        up = sorted(((rank, rank & (rank - 1)) for rank in range(1, n)), key=lambda pair: pair[0] - pair[1])
    for child, parent in up:
        message(child, parent, n)
    for child, parent in reversed(up) if algorithm == "tree" else up:
        message(parent, child, n)
    return out


def simulate(algorithm: str, n: int, n_bytes: float, link: Line) -> tuple[float, list[float]]:
    """Play the programs on links that carry one message at a time: (when the last rank is done, bytes sent by rank)."""
    todo = programs(algorithm, n)
    at, ready, out_busy, in_busy, sent = [0] * n, [0.0] * n, [0.0] * n, [0.0] * n, [0.0] * n
    on_the_way: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    while any(at[rank] < len(todo[rank]) for rank in range(n)):
        for rank in range(n):
            while at[rank] < len(todo[rank]):
                kind, peer, parts = todo[rank][at[rank]]
                size = n_bytes * parts / n
                if kind == "send":
                    begin = max(ready[rank], out_busy[rank])
                    out_busy[rank] = begin + link.seconds(size)
                    on_the_way[rank, peer].append((begin, size))
                    sent[rank] += size
                elif on_the_way[peer, rank]:
                    begin, size = on_the_way[peer, rank].pop(0)
                    begin = max(begin, in_busy[rank])
                    in_busy[rank] = ready[rank] = begin + link.seconds(size)
                    out_busy[peer] = max(out_busy[peer], in_busy[rank])
                else:
                    break
                at[rank] += 1
    return max(ready), sent


@cases("algorithm", ["ring", "tree", "star"])
@cases("n", range(1, 9))
def test_steps_bytes_and_seconds_are_those_of_a_played_textbook(algorithm, n):
    """Would catch a law that is wrong by a factor, or right for powers of two only."""
    n_bytes = 840 * 1000  # every n up to 8 divides it
    finished, sent = simulate(algorithm, n, n_bytes, LINK)
    assert [sent_bytes(algorithm, "all_reduce", n, n_bytes, rank) for rank in range(n)] == pytest.approx(sent)
    assert seconds(algorithm, "all_reduce", n, n_bytes, LINK) == pytest.approx(finished)
    assert steps(algorithm, "all_reduce", n) == pytest.approx(simulate(algorithm, n, 0, Line(1.0, 0.0))[0])


@given(st.integers(1, 16), st.integers(0, 500), st.sampled_from([1, 2, 4, 8]))
def test_parts_are_cut_like_tensor_split(n, items, item_bytes):
    """Would catch a remainder that goes to the last rank, or into nothing."""
    parts = [len(part) * item_bytes for part in torch.empty(items).tensor_split(n)]
    assert [part_bytes(items * item_bytes, n, k, item_bytes) for k in range(n)] == parts


@given(st.integers(1, 12), st.integers(0, 99), st.sampled_from(["ring", "tree", "star"]))
def test_an_all_reduce_by_a_ring_is_a_reduce_scatter_and_an_all_gather(n, n_bytes, algorithm):
    """Would catch verbs that do not add up, and ragged bytes that are lost: all ranks together move 2(n-1) N."""
    total = sum(sent_bytes(algorithm, "all_reduce", n, n_bytes, rank) for rank in range(n))
    assert total == 2 * (n - 1) * n_bytes
    halves = [sent_bytes("ring", v, n, n_bytes, n - 1) for v in ("all_reduce", "reduce_scatter", "all_gather")]
    assert halves[0] == halves[1] + halves[2]


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
    with pytest.raises(ValueError, match="0 to 3, got rank 4"):
        sent_bytes("ring", "all_reduce", 4, 8, rank=4)
    with pytest.raises(ValueError, match="10 bytes are not a whole number of items of 4"):
        sent_bytes("ring", "all_reduce", 2, 10, item_bytes=4)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        steps("ring", "all_reduce", 0)


@given(st.floats(1e-6, 1e-3), st.floats(2e4, 2e5), st.integers(1, 5), st.floats(2, 50))
def test_one_disturbed_measurement_does_not_bend_the_line(alpha, half_bytes, which, factor):
    """Would catch a plain least squares, which a pause of the machine in one sample pulls away."""
    line = Line(alpha, alpha / half_bytes)
    assert line.half_bytes == pytest.approx(half_bytes)
    sizes = (64, 1024, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
    samples = [(size, line.seconds(size) * (factor if k == which else 1)) for k, size in enumerate(sizes)]
    found = fit(samples)
    for k, size in enumerate(sizes):
        if k != which:
            assert found.seconds(size) == pytest.approx(line.seconds(size), rel=0.02)


def test_two_laws_meet_at_the_same_size_from_either_side_or_not_at_all():
    """Would catch a crossover that depends on which law is named first."""
    assert crossover_bytes(8, LINK, "tree", "ring") == pytest.approx(crossover_bytes(8, LINK, "ring", "tree"))
    assert crossover_bytes(2, LINK) == 0.0  # two ranks: as many steps, half the bytes
    assert crossover_bytes(8, LINK, "star", "tree") == math.inf
    assert crossover_bytes(8, LINK, "tree", "star") == 0.0
    assert crossover_bytes(8, Line(1e-5, 0.0)) == math.inf  # bytes cost nothing: fewer steps always win
