"""Ring, tree and star on the thread wire, against one process that sees all ranks' tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from labkit.comm import ring, star, tree
from labkit.comm.local import run_threads
from labkit.plan.machine import collectives
from tests.cases import cases

ALGORITHMS = {"ring": ring, "tree": tree, "star": star}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
WORLD = st.integers(1, 8)


def tensors(n: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n * 1009 + sum(shape))
    if dtype == torch.int64:
        return [torch.randint(-1000, 1000, shape, generator=generator) for _ in range(n)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(n)]


def assert_sum(found: torch.Tensor, xs: list[torch.Tensor]) -> None:
    """n-1 roundings of partial sums, each at most half an ulp of the sum of magnitudes."""
    exact = torch.stack([x.double() for x in xs]).sum(0)
    if xs[0].dtype == torch.int64:
        assert torch.equal(found, torch.stack(xs).sum(0))
        return
    bound = len(xs) * torch.finfo(xs[0].dtype).eps * torch.stack([x.double().abs() for x in xs]).sum(0)
    assert found.dtype == xs[0].dtype
    assert ((found.double() - exact).abs() <= bound + 1e-300).all()


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=40)
@given(n=WORLD, size=st.integers(0, 23), dtype=st.sampled_from(DTYPES))
def test_all_reduce_is_the_sum_with_the_same_bits_on_every_rank(name, n, size, dtype):
    """Would catch a chunk added twice or not at all, a lost remainder, and ranks that round differently."""
    xs = tensors(n, (size,), dtype)
    found = run_threads(lambda group: ALGORITHMS[name].all_reduce(xs[group.rank], group), n)
    assert_sum(found[0], xs)
    assert all(torch.equal(found[0], each) for each in found)


@cases("name", ALGORITHMS)
@cases("op", ["mean", "max", "min"])
@cases("n", [1, 2, 3, 4])
def test_all_reduce_knows_mean_max_and_min(name, op, n):
    """Would catch a mean that is a sum, or one that divides at every step."""
    xs = tensors(n, (3, 5), torch.float64)
    found = run_threads(lambda group: ALGORITHMS[name].all_reduce(xs[group.rank], group, op=op), n)
    stacked = torch.stack(xs)
    expected = {"mean": stacked.mean(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op]
    torch.testing.assert_close(found[-1], expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=30)
@given(n=WORLD, rows=st.integers(0, 17), columns=st.integers(1, 3), dtype=st.sampled_from(DTYPES))
def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(name, n, rows, columns, dtype):
    """Would catch parts that are swapped between ranks and ragged parts that lose a row."""
    xs = tensors(n, (rows, columns), dtype)
    found = run_threads(lambda group: ALGORITHMS[name].reduce_scatter(xs[group.rank], group), n)
    for rank, each in enumerate(found):
        assert_sum(each, [x.tensor_split(n)[rank] for x in xs])


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=8), dtype=st.sampled_from(DTYPES))
def test_all_gather_joins_parts_of_any_length_in_rank_order(name, sizes, dtype):
    """Would catch an assumption that all parts have the length of mine, and a wrong order."""
    xs = [tensors(1, (size, 2), dtype)[0] + rank for rank, size in enumerate(sizes)]
    found = run_threads(lambda group: ALGORITHMS[name].all_gather(xs[group.rank], group), len(sizes))
    assert all(torch.equal(each, torch.cat(xs)) for each in found)


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=30)
@given(n=WORLD, size=st.integers(0, 9), data=st.data())
def test_broadcast_copies_from_any_source(name, n, size, data):
    """Would catch a tree that only works with its root at rank 0."""
    source = data.draw(st.integers(0, n - 1))
    xs = tensors(n, (size,), torch.float32)
    found = run_threads(lambda group: ALGORITHMS[name].broadcast(xs[group.rank], group, source=source), n)
    assert all(torch.equal(each, xs[source]) for each in found)


@cases("name", ALGORITHMS)
@cases("verb", collectives.VERBS)
@cases("n", [1, 2, 3, 4, 5, 7, 8, 13])
@cases("size", [0, 3, 24, 25])
def test_every_rank_sends_exactly_the_bytes_of_the_law(name, verb, n, size):
    """Would catch a "ring" that moves whole tensors, and a law that forgets the ragged chunk."""

    def one(group):
        part = torch.ones(size).tensor_split(n)[group.rank]
        getattr(ALGORITHMS[name], verb)(part if verb == "all_gather" else torch.ones(size), group)
        return group.ledger.sent_bytes()

    expected = [collectives.sent_bytes(name, verb, n, 4 * size, rank, item_bytes=4) for rank in range(n)]
    assert run_threads(one, n) == expected


def test_a_ring_sends_two_n_minus_one_nths_when_n_divides():
    """Would catch a law and a ring that agree on something that is not the published number."""
    for n in (2, 3, 4, 8):
        sent = run_threads(
            lambda group: ring.all_reduce(torch.ones(24 * 5), group) is None or group.ledger.sent_bytes(), n
        )
        assert sent == [2 * (n - 1) * 480 // n] * n


def test_a_swapped_in_ring_is_counted_under_its_verb_and_once_in_the_total():
    """Would catch bytes that are counted twice, for the message and for the collective."""

    def one(group):
        group.using(all_reduce=ring.all_reduce).all_reduce(torch.ones(8))
        ledger = group.ledger
        return (
            ledger.sent_bytes(),
            ledger.sent_bytes("all_reduce"),
            ledger.sent_bytes("send"),
            ledger.calls("all_reduce"),
        )

    assert run_threads(one, 4) == [(48, 48, 48, 1)] * 4


def test_inputs_are_left_alone():
    """Would catch an algorithm that sums into the learner's tensor."""

    def one(group):
        x = torch.full((7,), float(group.rank))
        for module in ALGORITHMS.values():
            module.all_reduce(x, group)
            module.reduce_scatter(x, group)
            module.broadcast(x, group, source=1)
            module.all_gather(x, group)
        return x

    assert [each.tolist() for each in run_threads(one, 3)] == [[float(rank)] * 7 for rank in range(3)]


def test_a_rank_that_fails_ends_the_others_and_is_named():
    """Would catch a thread wire that waits for ever for a rank that has raised."""

    def one(group):
        if group.rank == 1:
            raise KeyError("boom")
        return ring.all_reduce(torch.ones(3), group)

    with pytest.raises(KeyError) as caught:
        run_threads(one, 3)
    assert "rank 1 of 3" in caught.value.__notes__[0]


def test_a_message_that_nobody_receives_is_an_error():
    """Would catch a collective that leaves something in the wire for the next one to find."""

    def one(group):
        if group.rank == 0:
            group.send(torch.ones(2), 1)

    with pytest.raises(RuntimeError, match="never received"):
        run_threads(one, 2)


def test_a_posted_receive_frees_the_sender_and_receives_match_in_order():
    """Would catch a thread wire that behaves unlike gloo: a ring of receive, send-and-wait, wait must not hang."""

    def one(group):
        n, me = group.size, group.rank
        first, second = group.recv_start((me - 1) % n), group.recv_start((me - 1) % n)
        group.send(torch.full((2,), 10.0 * me), (me + 1) % n).wait()
        group.send(torch.full((2,), 10.0 * me + 1), (me + 1) % n).wait()
        late, early = second.wait(), first.wait()
        return early[0].item(), late[0].item()

    assert run_threads(one, 3, timeout_s=60) == [(20.0, 21.0), (0.0, 1.0), (10.0, 11.0)]


@cases("size", (3, 5000))
def test_a_tensor_that_is_changed_while_it_is_on_its_way_is_named(size):
    """Would catch a thread wire that copies at the start: on a real one such a program sends garbage now and then."""

    def one(group):
        if group.rank:
            return group.recv(0)
        x = torch.zeros(size)
        work = group.send(x, 1)
        x.add_(1)
        return work.wait()

    with pytest.raises(ValueError, match="changed while it was on its way"):
        run_threads(one, 2, timeout_s=60)
