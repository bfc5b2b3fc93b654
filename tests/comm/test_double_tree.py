"""The all_reduce over two trees: against torch's, against one process, and against its laws of bytes and seconds."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st

from labkit import Cluster
from labkit.comm import double_tree
from labkit.comm.local import run_threads
from labkit.plan.machine import double_tree as law
from labkit.plan.machine.topology import Line, Links
from labkit.probe.links import sweep
from tests.cases import cases
from tests.comm.test_algorithms import DTYPES, assert_sum, tensors
from tests.simulated import simulate

SIZES = (0, 1, 2, 3, 7, 64, 1001)
PIECES = (None, 1, 2, 5, 16)


def beside_torchs(group):
    """The cases in which the sum is not torch's, up to the rounding of another order, or not the same on all ranks."""
    import torch.distributed as dist

    wrong = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for size in SIZES:
            for pieces in PIECES:
                xs = tensors(group.size, (size,), dtype)
                theirs = xs[group.rank].clone()
                dist.all_reduce(theirs)
                ours = double_tree.all_reduce(xs[group.rank], group, pieces=pieces)
                bound = torch.stack([x.double().abs() for x in xs]).sum(0) * 2 * group.size
                bound *= 0 if dtype == torch.int64 else torch.finfo(dtype).eps
                close = ((ours.double() - theirs.double()).abs() <= bound).all()
                alike = group.all_gather(ours.double()).view(group.size, -1)
                if not close or ours.dtype != dtype or not torch.equal(alike[0], alike[-1]):
                    wrong.append((dtype, size, pieces))
    return wrong


def test_the_sum_is_torchs_on_real_processes():
    """Would catch a half that is summed twice, a piece that is lost, and ranks whose bits differ."""
    with Cluster(3, device="cpu", quiet=True) as cluster:
        assert [reply.value for reply in cluster.run(beside_torchs)] == [[]] * 3


@settings(max_examples=60)
@given(
    n=st.integers(1, 13),
    size=st.integers(0, 23),
    dtype=st.sampled_from(DTYPES),
    pieces=st.sampled_from(PIECES),
)
def test_the_sum_is_that_of_one_process_with_the_same_bits_on_every_rank(n, size, dtype, pieces):
    """Would catch trees that are right for powers of two only, ragged halves, and fewer numbers than pieces."""
    xs = tensors(n, (size,), dtype)
    sums = run_threads(lambda group: double_tree.all_reduce(xs[group.rank], group, pieces=pieces), n)
    assert_sum(sums[0], xs)
    assert all(torch.equal(sums[0], other) for other in sums)


@cases("op", ["mean", "max", "min"])
@cases("n", [1, 2, 3, 4, 5, 8])
def test_mean_max_and_min_keep_shape_and_inputs(op, n):
    """Would catch a mean that only one half of the tensor gets, and a sum into the caller's tensor."""
    xs = tensors(n, (3, 5), torch.float64)
    before = [x.clone() for x in xs]
    got = run_threads(lambda group: double_tree.all_reduce(xs[group.rank].T, group, op=op, pieces=3), n)
    stacked = torch.stack(before)
    expected = {"mean": stacked.mean(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op].T
    for own in got:
        torch.testing.assert_close(own, expected, rtol=1e-14, atol=1e-14)
    assert all(torch.equal(x, old) for x, old in zip(xs, before, strict=True))


@cases("n", range(1, 34))
def test_each_tree_spans_all_ranks_and_no_rank_is_an_inner_one_of_both(n):
    """Would catch one tree twice (its inner ranks would do all the work), and a tree that is too high."""
    places = [[double_tree.place(rank, n, tree) for rank in range(n)] for tree in (0, 1)]
    assert not [rank for rank in range(n) if places[0][rank].children and places[1][rank].children]
    for tree in places:
        level, reached, levels = [rank for rank in range(n) if tree[rank].parent is None], [], -1
        assert len(level) == 1
        while level:
            reached, levels = [*reached, *level], levels + 1
            assert all(tree[child].parent == rank for rank in level for child in tree[rank].children)
            level = [child for rank in level for child in tree[rank].children]
        assert sorted(reached) == list(range(n)), "each rank once"
        assert levels == law.height(n)
        assert max(len(at.children) for at in tree) <= 2


@cases("n", [1, 2, 3, 4, 5, 6, 7, 8, 13])
@cases("size", [0, 1, 2, 24, 25])
@cases("pieces", [1, 3])
def test_every_rank_sends_exactly_the_bytes_of_the_law(n, size, pieces):
    """Would catch whole tensors in each tree, and a law that forgets who has one child only."""

    def one(group):
        double_tree.all_reduce(torch.ones(size), group, pieces=pieces)
        assert all(sent.t1 > sent.t0 for sent in group.ledger.transfers), "a message that nobody waited for"
        return group.ledger.sent_bytes()

    sent = run_threads(one, n)
    assert sent == [law.sent_bytes(n, 4 * size, rank, item_bytes=4) for rank in range(n)]
    assert sum(sent) == 2 * (n - 1) * 4 * size, "as every all_reduce that adds on the way"
    assert max(sent) <= 2 * 4 * size + 4


def took(group, size, pieces):
    summed = partial(double_tree.all_reduce, group=group, pieces=pieces)
    return sweep(lambda x: summed(x), [size], group, 1)[0][1]


@cases(("n", "pieces"), [(2, 4), (3, 1), (7, 4), (15, 2)])
def test_the_law_of_seconds_is_exact_where_all_levels_are_full(n, pieces):
    """Would catch pieces that wait for the whole half, and a leaf's piece that stands behind one that waits."""
    line, n_bytes = Line(15e-3, 1 / 20e6), 1 << 20
    links = Links.uniform(n, alpha_s=line.alpha_s, bytes_per_s=line.bandwidth)
    assert simulate(took, links, n_bytes, pieces)[0] == pytest.approx(law.seconds(n, n_bytes, line, pieces), rel=0.01)


@cases(("n", "pieces"), [(4, 1), (5, 3), (8, 3), (9, 1)])
def test_between_full_levels_the_law_of_seconds_is_an_upper_bound_within_a_third(n, pieces):
    """Would catch a law that promises too little time, or one that is no use as a bound."""
    line, n_bytes = Line(15e-3, 1 / 20e6), 1 << 20
    links = Links.uniform(n, alpha_s=line.alpha_s, bytes_per_s=line.bandwidth)
    seconds, bound = simulate(took, links, n_bytes, pieces)[0], law.seconds(n, n_bytes, line, pieces)
    assert seconds <= bound * 1.001
    assert bound <= seconds * 1.34


@cases("n", [2, 3, 4, 6, 8])
@cases("pieces", [1, 4])
def test_it_waits_for_the_latencies_of_a_tree(n, pieces):
    """Would catch pieces that wait for each other's round trip: with k of them they would wait k times as long."""
    alpha_s = 15e-3
    links = Links.uniform(n, alpha_s=alpha_s, bytes_per_s=1e12)
    waited = simulate(took, links, 4 * n * pieces, pieces)[0] / alpha_s
    assert waited == pytest.approx(law.latencies(n), rel=0.01)


def test_no_message_is_without_a_number():
    """Would catch empty messages where there are fewer numbers than pieces: each costs every rank its latency."""

    def messages(group, pieces):
        double_tree.all_reduce(torch.ones(3), group, pieces=pieces)
        return group.ledger.calls("send")

    assert run_threads(lambda group: messages(group, 99), 6) == run_threads(lambda group: messages(group, 2), 6)


def test_what_cannot_be_is_refused():
    """Would catch zero pieces, which would send nothing and return each rank's own tensor."""
    with pytest.raises(ValueError, match="1 piece or more, got pieces=0"):
        run_threads(lambda group: double_tree.all_reduce(torch.ones(3), group, pieces=0), 2)
    with pytest.raises(ValueError, match="1 piece or more, got pieces=0"):
        law.seconds(4, 100, Line(0, 1), 0)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        law.height(0)
    with pytest.raises(ValueError, match="numbered 0 to 3, got rank 4"):
        law.sent_bytes(4, 8, 4)
    with pytest.raises(ValueError, match="no whole number|not a whole number"):
        law.sent_bytes(4, 9, 0, item_bytes=4)
