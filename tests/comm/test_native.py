"""Groups on real processes over gloo, against torch's own collectives."""

from __future__ import annotations

import pytest
import torch

from labkit import Cluster, Layout, Mesh, WorkerError, ring, star, tree
from labkit.comm.message import EAGER_BYTES, PIECE_BYTES
from labkit.launch import call


@pytest.fixture(
    scope="module", params=[3, pytest.param(2, marks=pytest.mark.rest), pytest.param(4, marks=pytest.mark.rest)]
)
def cluster(request):
    """Three ranks, whose neighbours differ; the algorithms for every other number are proved in test_algorithms.py."""
    with Cluster(request.param, device="cpu", quiet=True, wire="gloo") as made:
        yield made


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    """A refused rank is the only one that fails here: nobody need wait for what the others have to say."""
    monkeypatch.setattr(call, "GRACE_S", 0.02)


def values(cluster, fn, *args):
    return [reply.value for reply in cluster.run(fn, *args)]


def test_native_verbs_equal_torchs_own(cluster):
    """Would catch a verb that changes its input, mixes up ranks, or forgets to divide a mean."""

    def compare(group):
        import torch.distributed as dist

        n = group.size
        x = torch.arange(6.0 * n).reshape(2 * n, 3) + group.rank
        kept = x.clone()
        summed = x.clone()
        dist.all_reduce(summed)
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x)
        swapped = torch.empty_like(x)
        dist.all_to_all_single(swapped, x)
        group.barrier()
        good = [
            torch.equal(group.all_reduce(x), summed),
            torch.equal(group.all_reduce(x, op="mean"), summed / n),
            torch.equal(group.all_reduce(x, op="max"), torch.stack(parts).amax(0)),
            torch.equal(group.reduce_scatter(x), summed.chunk(n)[group.rank]),
            torch.equal(group.reduce_scatter(x[: n + 1]), summed[: n + 1].tensor_split(n)[group.rank]),
            torch.equal(group.all_gather(x), torch.cat(parts)),
            torch.equal(group.broadcast(x, source=n - 1), parts[n - 1]),
            torch.equal(group.all_to_all(x), swapped),
            torch.equal(x, kept),
        ]
        mine = x.clone()
        good.append(
            torch.equal(group.all_reduce_start(mine, op="mean").wait(), summed / n) and torch.equal(mine, summed / n)
        )
        return good

    assert all(all(each) for each in values(cluster, compare))


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
LARGE = PIECE_BYTES // 4 + 1_001
"""So many floats that they go in two pieces."""


@pytest.mark.parametrize(("algorithm", "n_parts"), [(ring, 3), (tree, 1), (star, 1)])
def test_algorithms_on_processes_give_the_sum(cluster, algorithm, n_parts):
    """Would catch what only a real wire shows: a dtype that is sent wrongly, a large message in pieces."""

    def sums(group, name, cases):
        import importlib

        module, right = importlib.import_module(f"labkit.comm.{name}"), []
        for dtype, size in cases:
            numbers = torch.arange(size) % 7
            total = module.all_reduce((numbers + group.rank).to(dtype), group)
            expected = sum((numbers + rank).to(dtype) for rank in range(group.size))
            right.append(total.dtype == dtype and torch.equal(total, expected))
        return right

    cases = [(dtype, size) for dtype in DTYPES for size in (0, 1, 1021)] + [(torch.float32, n_parts * LARGE)]
    assert (
        values(cluster, sums, algorithm.__name__.rpartition(".")[2], cases) == [[True] * len(cases)] * cluster.n_ranks
    )


def test_messages_of_any_size_arrive_with_their_shape(cluster):
    """Would catch an off-by-one between small messages and large ones, and a piece that lands in the wrong place."""

    def shift(group, sizes):
        n, me = group.size, group.rank
        right = []
        for size in sizes:
            row, before = torch.arange(float(size)).reshape(1, size), group.ledger.sent_bytes()
            came = group.exchange(row + me, (me + 1) % n, (me - 1) % n)
            right.append((torch.equal(came, row + (me - 1) % n), group.ledger.sent_bytes() - before))
        return right

    sizes = [0, 1, 900, EAGER_BYTES // 4, EAGER_BYTES // 4 + 1, PIECE_BYTES // 4, PIECE_BYTES // 4 + 1, 3_000_001]
    assert values(cluster, shift, sizes) == [[(True, 4 * size) for size in sizes]] * cluster.n_ranks


def test_the_ledger_counts_native_collectives_by_the_law(cluster):
    """Would catch bytes counted twice, or for the wrong verb."""

    def verbs(group):
        x = torch.ones(12 * group.size)
        group.all_reduce(x)
        group.reduce_scatter(x)
        group.all_gather(x[:12])
        group.broadcast(x, source=1)
        names = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
        return [group.ledger.sent_bytes(name) for name in names], group.ledger.sent_bytes()

    n, whole = cluster.n_ranks, 48 * cluster.n_ranks
    for rank, (sent, total) in enumerate(values(cluster, verbs)):
        assert sent == [2 * (n - 1) * whole // n, (n - 1) * whole // n, (n - 1) * whole // n, whole * (rank == 1)]
        assert total == sum(sent)


@pytest.fixture(scope="module")
def four():
    with Cluster(4, device="cpu", quiet=True, wire="gloo") as made:
        yield made


def test_a_mesh_has_the_groups_of_its_layout(four):
    """Would catch axes that are swapped, and a subgroup that talks to the wrong ranks."""

    def sums(group, layout):
        mesh = Mesh.connect(layout, group)
        x = torch.tensor([10.0**group.rank])
        return {axis: int(getattr(mesh, axis).all_reduce(x)) for axis in ("dp", "pp", "tp")}, group.ledger.calls(
            "all_reduce"
        )

    for layout in (Layout(dp=2, tp=2), Layout(dp=2, pp=2), Layout(dp=4), Layout(pp=2, tp=2)):
        for rank, (totals, calls) in enumerate(values(four, sums, layout)):
            assert totals == {axis: sum(10**r for r in layout.ranks(axis, rank)) for axis in ("dp", "pp", "tp")}
            assert calls == sum(getattr(layout, axis) > 1 for axis in ("dp", "pp", "tp"))
    with pytest.raises(WorkerError, match=r"= 8 ranks, the world has 4"):
        four.run(sums, Layout(dp=2, pp=2, tp=2))


BAD = [
    (lambda g: g.all_reduce([1, 2]), "take a tensor, got list"),
    (lambda g: g.all_reduce(torch.ones(3).to_sparse()), "to_dense"),
    (lambda g: g.all_reduce(torch.ones(3, dtype=torch.int64), op="mean"), r"mean of int64 .* use x.float\(\)"),
    (lambda g: g.all_reduce(torch.ones(3), op="product"), "op must be one of sum, mean, max, min"),
    (lambda g: g.all_reduce_start(torch.ones(4, 4).T), "needs a contiguous tensor"),
    (lambda g: g.send(torch.ones(1), g.size), "ranks of the world group are 0 to"),
    (lambda g: g.send(torch.ones(1), g.rank), "cannot send to itself"),
    (lambda g: g.all_to_all(torch.ones(g.size + 1)), "divisible by"),
    (lambda g: g.reduce_scatter(torch.tensor(1.0)), "a scalar has none"),
    (lambda g: g.using(all_sum=ring.all_reduce), "no collective"),
    (
        lambda g: g.all_reduce(torch.ones(3, dtype=torch.float64 if g.rank else torch.float32)),
        "float64.*float32|float32.*float64",
    ),
    (lambda g: g.all_reduce(torch.ones(3 + g.rank)), r"\(3,\).*\(\d,\)|\(\d,\).*\(3,\)"),
    (lambda g: g.all_gather(torch.ones(3 + g.rank)), r"shape \(3,\)|shape \(4,\)"),
]


@pytest.mark.parametrize(("fn", "message"), BAD)
def test_bad_input_is_refused_with_the_numbers_and_the_cluster_stays_usable(cluster, fn, message):
    """Would catch a hang, an abort of the process, or an error that does not say what to do."""
    pids = cluster.pids
    with pytest.raises(WorkerError, match=message) as caught:
        cluster.run(fn)
    assert isinstance(caught.value.__cause__, ValueError)
    assert cluster.pids == pids
    assert values(cluster, lambda g: g.all_reduce(torch.ones(1)).item()) == [cluster.n_ranks] * cluster.n_ranks


def test_non_contiguous_tensors_are_welcome_where_nothing_is_changed_in_place(cluster):
    """Would catch a transposed tensor whose memory is summed in the wrong order."""

    def turned(group):
        x = torch.arange(6.0).reshape(2, 3).T
        return torch.equal(group.all_reduce(x), x * group.size) and torch.equal(
            ring.all_reduce(x, group), x * group.size
        )

    assert all(values(cluster, turned))


def test_a_world_of_one_needs_no_wire():
    """Would catch a special case that every strategy would have to write."""

    def alone(group):
        x = torch.ones(3)
        group.barrier()
        return [
            group.all_reduce(x),
            group.all_gather(x),
            group.reduce_scatter(x),
            group.broadcast(x),
            ring.all_reduce(x, group),
        ]

    with Cluster(1, device="cpu", quiet=True) as cluster:
        assert all(torch.equal(each, torch.ones(3)) for each in values(cluster, alone)[0])


def test_a_message_whose_work_is_dropped_still_arrives(cluster):
    """A bug: gloo forgot a send when its handle was collected, and the receiver waited for ever."""

    def careless(group):
        import gc

        if group.rank == 0:
            for k in range(3):
                group.send(torch.full((5,), float(k)), 1)
            gc.collect()
            return None
        return [group.recv(0)[0].item() for _ in range(3)] if group.rank == 1 else None

    assert values(cluster, careless)[1] == [0.0, 1.0, 2.0]
