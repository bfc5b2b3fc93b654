"""What goes wrong between two ranks, and algorithms that are swapped in, on real processes over gloo."""

from __future__ import annotations

import pytest
import torch

from labkit import Cluster, WorkerError, ring, star, tree
from labkit.comm.local import run_threads
from labkit.plan import collectives


@pytest.fixture(scope="module", params=[2, 4])
def cluster(request):
    with Cluster(request.param, quiet=True) as made:
        yield made


def values(cluster, fn, *args):
    return [reply.value for reply in cluster.run(fn, *args)]


@pytest.mark.parametrize("shape", [(3,), (2, 2), (5_000,), (2_000_000,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
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
@pytest.mark.parametrize("size", [0, 1, 1021, 600_001])
def test_a_swapped_in_algorithm_gives_all_ranks_the_same_bits_and_sends_the_bytes_of_its_law(cluster, module, size):
    """Would catch ranks that round differently over gloo, and a `using` that still runs the native verb."""

    def swapped(group, f, size):
        x = torch.randn(size, generator=torch.Generator().manual_seed(group.rank))
        total = group.using(all_reduce=f).all_reduce(x)
        sent = group.ledger.sent_bytes("all_reduce")
        return total, sent, group.all_gather(x.reshape(1, -1))

    found = values(cluster, swapped, module.all_reduce, size)
    name, n = module.__name__.rpartition(".")[2], cluster.n_ranks
    xs = found[0][2].double()
    assert all(torch.equal(total, found[0][0]) for total, _, _ in found)
    bound = n * torch.finfo(torch.float32).eps * xs.abs().sum(0)  # n - 1 roundings of partial sums
    assert ((found[0][0].double() - xs.sum(0)).abs() <= bound).all()
    law = [collectives.sent_bytes(name, "all_reduce", n, 4 * size, rank, item_bytes=4) for rank in range(n)]
    assert [sent for _, sent, _ in found] == law


@pytest.mark.parametrize("module", [ring, tree, star])
@pytest.mark.parametrize("size", [0, 5, 13, 40])
def test_thirteen_ranks_agree(module, size):
    """Would catch arithmetic that holds for powers of two, or for small worlds, alone."""
    found = run_threads(lambda g: module.all_reduce(torch.arange(size) * 7 + g.rank, g), 13)
    assert all(torch.equal(each, torch.arange(size) * 91 + 78) for each in found)
    sources = run_threads(lambda g: module.broadcast(torch.full((size,), g.rank), g, source=11), 13)
    assert all(torch.equal(each, torch.full((size,), 11)) for each in sources)
