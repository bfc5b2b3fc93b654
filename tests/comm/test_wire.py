"""What goes wrong between two ranks, and algorithms that are swapped in, on real processes, over each wire."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from labkit import Cluster, WorkerError, ring, star, tree
from labkit.comm.local import run_threads
from labkit.comm.native import Native
from labkit.launch import call
from labkit.plan.machine import collectives


@pytest.fixture(
    scope="module",
    params=[
        (3, "gloo"),
        (3, "shared"),
        pytest.param((2, "gloo"), marks=pytest.mark.rest),
        pytest.param((4, "shared"), marks=pytest.mark.rest),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def cluster(request):
    """Three ranks: each has two neighbours, who are not the same."""
    n_ranks, wire = request.param
    with Cluster(n_ranks, device="cpu", quiet=True, wire=wire) as made:
        yield made


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    """A refused rank is the only one that fails here: nobody need wait for what the others have to say."""
    monkeypatch.setattr(call, "GRACE_S", 0.02)


def values(cluster, fn, *args):
    return [reply.value for reply in cluster.run(fn, *args)]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 2), torch.float32), ((4,), torch.int64), ((5_000,), torch.float32), ((2_000_000,), torch.int64)],
    ids=str,
)
def test_a_message_that_does_not_fit_into_names_both_shapes(cluster, shape, dtype):
    """Would catch bytes of one shape or dtype poured silently into another, for small messages and large ones."""

    def pour(group, shape, dtype):
        if group.rank == 0:
            group.send(torch.zeros(shape, dtype=dtype), 1).wait()
        elif group.rank == 1:
            group.recv(0, into=torch.zeros(4, dtype=torch.float32))

    with pytest.raises(WorkerError, match="expected shape") as caught:
        cluster.run(pour, shape, dtype)
    words = str(caught.value.__cause__)
    assert f"sent shape {shape} {str(dtype)[6:]}" in words
    assert "(4,) float32" in words
    assert values(cluster, lambda g: g.all_reduce(torch.ones(1)).item()) == [cluster.n_ranks] * cluster.n_ranks


def test_into_must_be_contiguous(cluster):
    """Would catch a message that lands in a copy of a transposed tensor and is lost."""
    with pytest.raises(WorkerError, match=r"into= needs a contiguous tensor, got strides \(1, 4\)"):
        cluster.run(lambda g: g.recv((g.rank + 1) % g.size, into=torch.zeros(4, 4).T))


def test_tags_keep_streams_apart(cluster):
    """Would catch a wire that gives a receive the oldest message, whatever its tag; large and small ones cross."""

    def crossed(group):
        n, me = group.size, group.rank
        sent = [
            group.send(torch.full((size,), 1.0 * tag), (me + 1) % n, tag=tag) for tag, size in ((1, 1_500_000), (2, 3))
        ]
        second, first = group.recv((me - 1) % n, tag=2), group.recv((me - 1) % n, tag=1)
        for work in sent:
            work.wait()
        return second.tolist(), first.numel(), first.unique().tolist()

    assert values(cluster, crossed) == [([2.0] * 3, 1_500_000, [1.0])] * cluster.n_ranks


@pytest.mark.parametrize("module", [ring, tree, star])
def test_a_swapped_in_algorithm_gives_all_ranks_the_same_bits_and_sends_the_bytes_of_its_law(cluster, module):
    """Would catch ranks that round differently over gloo, and a `using` that still runs the native verb."""

    def swapped(group, f, sizes):
        results = []
        for size in sizes:
            group.ledger.clear()
            x = torch.randn(size, generator=torch.Generator().manual_seed(group.rank))
            total = group.using(all_reduce=f).all_reduce(x)
            results.append((total, group.ledger.sent_bytes("all_reduce"), x))
        return results

    sizes, n, name = (0, 1, 1021, 100_001), cluster.n_ranks, module.__name__.rpartition(".")[2]
    for size, *results in zip(sizes, *values(cluster, swapped, module.all_reduce, sizes), strict=True):
        totals, sent, xs = zip(*results, strict=True)
        assert all(torch.equal(total, totals[0]) for total in totals)
        xs = torch.stack(xs).double()
        bound = n * torch.finfo(torch.float32).eps * xs.abs().sum(0)  # n - 1 roundings of partial sums
        assert ((totals[0].double() - xs.sum(0)).abs() <= bound).all()
        law = [collectives.sent_bytes(name, "all_reduce", n, 4 * size, rank, item_bytes=4) for rank in range(n)]
        assert list(sent) == law


@pytest.mark.parametrize("module", [ring, tree, star])
def test_thirteen_ranks_agree(module):
    """Would catch arithmetic that holds for powers of two, or for small worlds, alone."""
    for size in (0, 5, 13, 40):
        totals = run_threads(lambda g, n=size: module.all_reduce(torch.arange(n) * 7 + g.rank, g), 13)
        assert all(torch.equal(total, torch.arange(size) * 91 + 78) for total in totals)
        sources = run_threads(lambda g, n=size: module.broadcast(torch.full((n,), g.rank), g, source=11), 13)
        assert all(torch.equal(source, torch.full((size,), 11)) for source in sources)


@pytest.mark.parametrize(("sent", "expected"), [(2_000_000, 1_000_000), (1_000_000, 2_000_000), (5_000, 2_000_000)])
def test_a_large_message_that_does_not_fit_a_large_into_is_refused_and_nobody_dies(cluster, sent, expected):
    """Would catch a payload that was asked for in advance and meets a buffer of another size: gloo then aborts."""
    pids = cluster.pids

    def pour(group, sent, expected):
        if group.rank == 0:
            group.send(torch.zeros(sent), 1).wait()
        elif group.rank == 1:
            group.recv(0, into=torch.zeros(expected))

    with pytest.raises(WorkerError, match="expected shape"):
        cluster.run(pour, sent, expected)
    assert cluster.pids == pids


@pytest.mark.parametrize("size", [4, 1_000_000])
def test_done_becomes_true_without_a_wait(cluster, size):
    """A bug: gloo tells only those who wait, so `done` stayed false for ever."""

    def look(group, size):
        import time

        n, me = group.size, group.rank
        expected = group.recv_start((me - 1) % n)
        before = expected.done if me == 1 else False
        group.barrier()
        sent = group.send(torch.ones(size), (me + 1) % n)
        deadline = time.monotonic() + 100
        while not all([expected.done, sent.done]):  # looking at a receive is what asks for its payload
            assert time.monotonic() < deadline, "never done"
        return before, expected.wait().sum().item()

    assert values(cluster, look, size) == [(False, size)] * cluster.n_ranks


@pytest.mark.parametrize("size", [4, 1_000_000])
def test_a_receive_that_nobody_waits_for_takes_its_message_and_harms_nobody(cluster, size):
    """A bug: a dropped receive took its buffer with it, and the connection broke under the next message."""

    def drop(group, size):
        import gc

        n, me = group.size, group.rank
        group.recv_start((me - 1) % n, into=torch.empty(size))
        gc.collect()
        for value in (1.0, 2.0):
            group.send(torch.full((size,), value), (me + 1) % n)
        return group.recv((me - 1) % n)[0].item(), group.all_reduce(torch.ones(1)).item()

    assert values(cluster, drop, size) == [(2.0, cluster.n_ranks)] * cluster.n_ranks


def test_messages_of_a_swapped_in_collective_do_not_meet_those_of_the_caller(cluster):
    """A bug: a ring's chunk 0 was given to the caller's own receive under tag 0."""

    def mixed(group):
        n, me = group.size, group.rank
        mine = group.recv_start((me - 1) % n, tag=0)
        total = group.using(all_reduce=ring.all_reduce).all_reduce(torch.ones(8))
        group.send(torch.full((3,), float(me)), (me + 1) % n, tag=0)
        return total.tolist(), mine.wait().tolist()

    n = cluster.n_ranks
    assert values(cluster, mixed) == [([float(n)] * 8, [float((r - 1) % n)] * 3) for r in range(n)]


def test_bytes_of_nested_collectives_count_for_each_of_them(cluster):
    """A bug: an all_reduce made of a reduce_scatter and an all_gather counted as nothing."""

    def nested(group):
        def halves(x, group):
            return group.all_gather(group.reduce_scatter(x))

        inner = group.using(reduce_scatter=ring.reduce_scatter)
        inner.using(all_reduce=halves).all_reduce(torch.ones(8 * group.size))
        names = ("all_reduce", "reduce_scatter", "send", "all_gather", None)
        return [group.ledger.sent_bytes(name) for name in names]

    n = cluster.n_ranks
    half = 8 * 4 * (n - 1)
    assert values(cluster, nested) == [[2 * half, half, half, half, 2 * half]] * n


def test_a_refused_send_is_not_counted_and_leaves_no_receive_behind(cluster):
    """A bug: the ledger counted what never left, and a refused exchange swallowed the next message."""

    def refused(group):
        n, me = group.size, group.rank
        for bad in (torch.ones(2, dtype=torch.complex32), torch.ones((1,) * 9), torch.ones(2).to_sparse(), 3.0):
            with pytest.raises(ValueError):
                group.send(bad, (me + 1) % n)
            with pytest.raises(ValueError):
                group.exchange(bad, (me + 1) % n, (me - 1) % n)
        assert group.ledger.sent_bytes() == 0
        return group.exchange(torch.tensor([me]), (me + 1) % n, (me - 1) % n).item()

    n = cluster.n_ranks
    assert values(cluster, refused) == [(r - 1) % n for r in range(n)]


@pytest.mark.parametrize("tag", [-1, 1 << 20, 1.5, "a", True])
def test_a_tag_out_of_range_is_refused_with_the_range(tag):
    """Would catch two streams that meet because a large tag wrapped around."""
    with pytest.raises(ValueError, match="from 0 to 1,048,575"):
        run_threads(lambda g: g.send(torch.ones(1), 1 - g.rank, tag=tag), 2)


@pytest.mark.parametrize("module", [ring, tree, star])
@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter"])
def test_an_unknown_op_is_refused_by_the_algorithms_themselves(module, verb):
    """A bug: ring.all_reduce(x, group, "avg") gave the minimum."""
    for n in (1, 2):
        with pytest.raises(ValueError, match="op must be one of sum, mean, max, min, got 'avg'"):
            run_threads(lambda g: getattr(module, verb)(torch.ones(4), g, "avg"), n)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_started_collectives_are_what_the_blocking_ones_give(cluster, op):
    """Would catch a start that reads its input too late, ignores `into`, or charges other bytes."""

    def started(group, op):
        n = group.size
        x = torch.arange(6.0 * n) + group.rank
        works = [group.reduce_scatter_start(x, op), group.reduce_scatter_start(torch.arange(2.0 * n + 1), op)]
        into = torch.empty(4 * n)
        gathered = group.all_gather_start(torch.full((4,), float(group.rank)), into)
        swapped = group.all_to_all_start(x)
        sent = [t.n_bytes for t in group.ledger]
        same = [
            torch.equal(works[0].wait(), group.reduce_scatter(x, op)),
            torch.equal(works[1].wait(), group.reduce_scatter(torch.arange(2.0 * n + 1), op)),
            gathered.wait() is into and torch.equal(into, group.all_gather(torch.full((4,), float(group.rank)))),
            torch.equal(swapped.wait(), group.all_to_all(x)),
        ]
        return same, sent[0], sent[-2], sent[-1]

    def in_order(group, op):
        return started(group, op)[0]

    n = cluster.n_ranks
    expected = (n - 1) * 6 * 4, (n - 1) * 4 * 4, (n - 1) * 6 * 4
    for same, *sent in values(cluster, started, op):
        assert same == [True] * 4
        assert tuple(sent) == expected
    assert run_threads(in_order, n, op) == [[True] * 4] * n


@pytest.mark.parametrize(
    ("thing", "mend"),
    [
        (None, "a function without `return` gives None"),
        ([1, 2], r"wrap it, torch.tensor\(\[1, 2\]\)"),
        ("x", "a tensor"),
    ],
)
def test_what_is_no_tensor_is_refused_with_a_mend_that_works(thing, mend):
    """Would catch the advice to write torch.tensor(None)."""
    with pytest.raises(ValueError, match=mend):
        run_threads(lambda group: group.all_reduce(thing), 2)


def narrow(group, dtype):
    """What each verb says of a dtype, what was counted meanwhile, and what messages of it give."""
    x, said = torch.ones(group.size).to(dtype), []
    for verb in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "all_gather_start"):
        try:
            getattr(group, verb)(x)
        except ValueError as error:
            said.append(f"{verb}: {error}")
    counted = group.ledger.sent_bytes()
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return (
        said,
        counted,
        torch.equal(group.exchange(x, right, left), x),
        torch.equal(ring.all_gather(x, group)[:1], x[:1]),
    )


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e5m2], ids=str)
def test_a_dtype_that_the_backend_does_not_take_is_refused_before_anything_is_sent(cluster, dtype):
    """A bug: torch's "Invalid scalar type" over gloo, and over shared memory a rank that waited for one that had
    failed in the middle of a sum. Messages, and what is made of them, take such numbers."""
    for said, counted, exchanged, gathered in values(cluster, narrow, dtype):
        assert len(said) == 6
        assert all(f"takes no {str(dtype)[6:]}: use x." in words and "x.view(torch.uint8)" in words for words in said)
        assert (counted, exchanged, gathered) == (0, True, True)
    assert values(cluster, lambda g: g.all_reduce(torch.ones(1)).item()) == [cluster.n_ranks] * cluster.n_ranks


@pytest.mark.parametrize(("over_nccl", "taken"), [(True, True), (False, False)])
def test_codes_of_eight_bits_go_over_nccl_and_not_over_gloo(over_nccl, taken):
    """Would catch one table for both backends."""
    wire = SimpleNamespace(on_device=over_nccl)
    with nullcontext() if taken else pytest.raises(ValueError, match="over gloo takes no float8_e4m3fn"):
        Native.check_dtype(wire, "all_gather", torch.float8_e4m3fn)
    with nullcontext() if not over_nccl else pytest.raises(ValueError, match="complex64: use torch.view_as_real"):
        Native.check_dtype(wire, "reduce_scatter", torch.complex64)
    with pytest.raises(ValueError, match=f"over {'NCCL' if over_nccl else 'gloo'} takes no int16: use x.to"):
        Native.check_dtype(wire, "all_gather", torch.int16)
