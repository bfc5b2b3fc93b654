"""torch's own strategies over labkit's groups beside NCCL: what one process computes in float64.

Each runs on "cpu", too, wherever there is no GPU: so what it says of a program is tested itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.gpu.ranks import cluster_on

N, STEPS, ROWS, WIDTH = 2, 3, 4, 24
DEVICES = ["cpu", *(pytest.param(device, marks=pytest.mark.gpu) for device in ("cuda", "cuda:0"))]


@pytest.fixture(scope="module", params=DEVICES)
def ranks(request):
    with cluster_on(request.param, N) as made:
        yield made


def network():
    """The same on every rank, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        blocks = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)]
    return nn.Sequential(*blocks).double()


def rows_of(step, rank):
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=draw)


def trained(model, rows):
    """Three steps of Adam; the weights then, whole and on the CPU, by name."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(rows(step)) - 1).square().mean().backward()
        optimizer.step()
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.named_parameters()}
    return {name: p.detach().cpu() for name, p in whole.items()}


def one_process():
    return trained(network(), lambda step: torch.cat([rows_of(step, rank) for rank in range(N)]))


def mesh_of(group, torchs, name):
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(torchs, group.device.partition(":")[0], mesh_dim_names=(name,))


def ddp(group, torchs):
    """DistributedDataParallel with several buckets."""
    model = nn.parallel.DistributedDataParallel(network().to(group.device), process_group=torchs, bucket_cap_mb=0.01)
    learnt = trained(model, lambda step: rows_of(step, group.rank).to(group.device))
    return {name.removeprefix("module."): p for name, p in learnt.items()}


def sharded(group, torchs):
    """fully_shard of each block and of the whole, which copies on streams of its own."""
    from torch.distributed.fsdp import fully_shard

    model, mesh = network().to(group.device), mesh_of(group, torchs, "dp")
    for block in (*model, model):
        fully_shard(block, mesh=mesh)
    return trained(model, lambda step: rows_of(step, group.rank).to(group.device))


def tensor_parallel(group, torchs):
    """parallelize_module: columns, then rows; every rank has all rows of the batch."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = network().to(group.device), mesh_of(group, torchs, "tp")
    for block in model:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return trained(model, lambda step: torch.cat([rows_of(step, r) for r in range(N)]).to(group.device))


def off(group, strategy, ringed):
    """The largest difference to one process, of all weights, relative to the largest of each."""
    from labkit.comm import bridge, ring

    torchs = bridge.process_group(group.using(all_reduce=ring.all_reduce) if ringed else group)
    learnt, expected = strategy(group, torchs), one_process()
    assert learnt.keys() == expected.keys()
    moved = max(float((expected[name] - p.detach()).abs().max()) for name, p in network().named_parameters())
    assert moved > 0.01, "three steps have moved nothing"
    return max(float((p - learnt[name]).abs().max() / p.abs().max()) for name, p in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("ringed", [False, True], ids=["native", "ring"])
@pytest.mark.parametrize("strategy", [ddp, sharded, tensor_parallel])
def test_torchs_strategies_learn_what_one_process_learns(ranks, strategy, ringed):
    """Would catch a group that does not form beside NCCL, copies that are sent before they are through, a future that
    does not know its GPU, and a verb of the wrong ranks."""
    for reply in ranks.run(off, strategy, ringed):
        assert reply.value < 1e-9


def unequal(group):
    """Messages of both ranks at once, and a sum of everybody's object, by torch's calls."""
    import torch.distributed as dist

    from labkit.comm import bridge

    torchs, other = bridge.process_group(group), 1 - group.rank
    x = torch.full((100_000,), float(group.rank), device=group.device)
    y = torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, y, group=torchs, group_peer=other),
            dist.P2POp(dist.isend, x, group=torchs, group_peer=other),
        ]
    )
    for work in works:
        work.wait()
    told = [None] * group.size
    dist.all_gather_object(told, {"rank": group.rank}, group=torchs)
    return float(y.mean()), [each["rank"] for each in told]


@pytest.mark.slow
def test_messages_and_objects_go_over_the_group_of_a_gpu(ranks):
    """Would catch objects that torch puts on the CPU for a group that talks on a GPU."""
    assert [reply.value for reply in ranks.run(unequal)] == [(1.0, [0, 1]), (0.0, [0, 1])]
