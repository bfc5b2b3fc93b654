"""Ranks over NCCL, on GPUs of their own, or where there are too few all on one (tests/gpu/ranks.py).

The same programs run here on CPU ranks. What the self-test does on the way to "auto" (labkit/self_test.py: verbs, one
rank first, subgroup, mesh, hang, stop, the next generation, memory) is one test of these; its CPU side is
tests/test_self_test.py."""

from __future__ import annotations

import pytest
import torch

from labkit import Layout, Mesh, WorkerError
from labkit.comm import by_messages
from labkit.launch.verdict import FAILED, PASSED
from labkit.parallel.blockwise_attention import positions_of
from labkit.parallel.context import ring_attention, zigzag
from labkit.probe.memory import MemoryProbe
from labkit.self_test import examine
from tests.gpu.ranks import cluster_on, maker
from tests.waiting import LONG_S

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", CUDA]
MOST = 4


def number_of_ranks(device):
    """As many ranks as there are GPUs, four at most; four on a CPU and on one GPU."""
    there = torch.cuda.device_count() if device == "cuda" else MOST
    return min(there, MOST) if there > 1 else MOST


def values(cluster, fn, *args):
    return [reply.value for reply in cluster.run(fn, *args)]


@pytest.mark.slow
@pytest.mark.parametrize("device", [CUDA])
def test_the_self_test_passes_over_nccl(device):
    """Would catch whatever keeps a cluster of GPUs from working, part by part, and says which."""
    n = number_of_ranks(device)
    parts = list(examine(*maker(device, n), n))
    assert [part for part in parts if part.outcome == FAILED] == []
    assert {part.name for part in parts if part.outcome == PASSED} >= {"verbs", "hang", "stop", "memory"}


def of_each_dtype(group):
    """Sums, parts and messages of numbers that every one of these dtypes has, on the host."""
    n, got = group.size, {}
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        x = (torch.arange(2 * n) + group.rank).to(group.device, dtype)
        y = [group.all_reduce(x), group.all_gather(x), group.reduce_scatter(x), group.all_to_all(x)]
        y.append(group.exchange(x, (group.rank + 1) % n, (group.rank - 1) % n))
        got[str(dtype)] = [part.to("cpu", torch.int64).tolist() for part in y]
    return got


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_verbs_of_every_dtype_give_the_same_whole_numbers(device):
    """Would catch a dtype that NCCL does not know, or that is added up in another one."""
    n = number_of_ranks(device)
    with cluster_on(device, n) as cluster:
        replies = values(cluster, of_each_dtype)
    rows = [[k + rank for k in range(2 * n)] for rank in range(n)]
    total = [sum(column) for column in zip(*rows, strict=True)]
    for rank, of_dtypes in enumerate(replies):
        mine = slice(2 * rank, 2 * rank + 2)
        expected = [total, sum(rows, []), total[mine], sum((row[mine] for row in rows), []), rows[rank - 1]]
        assert of_dtypes == dict.fromkeys(of_dtypes, expected)
        assert len(of_dtypes) == 6


def lives(group, times):
    """Groups that torch keeps after so many meshes more."""
    import torch.distributed as dist

    for _ in range(times):
        mesh = Mesh.connect(Layout(dp=group.size), group)
    total = mesh.dp.all_reduce(torch.ones(1, device=group.device)).item()
    return total, len(dist.distributed_c10d._world.pg_map)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_ten_meshes_take_the_groups_of_one(device):
    """Would catch a communicator of NCCL, 100 MB of a GPU or more, for every call of `Mesh.connect`."""
    n = number_of_ranks(device)
    with cluster_on(device, n) as cluster:
        first = values(cluster, lives, 1)
        assert values(cluster, lives, 10) == first
        assert first[0][0] == n


def forgetful(group):
    if group.rank < group.size - 1:
        return group.all_reduce(torch.ones(3, device=group.device))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_hang_is_named_with_its_line_and_the_same_ranks_go_on(device):
    """Would catch a hang that is noticed where the host waits for the device, and an abort that takes ranks along."""
    n = number_of_ranks(device)
    with cluster_on(device, n, timeout_s=LONG_S) as cluster:
        pids = cluster.pids
        with pytest.raises(WorkerError) as caught:
            cluster.run(forgetful)
        assert values(cluster, lives, 1)[0][0] == n
        assert cluster.pids == pids
    for seen in caught.value.autopsy.ranks[: n - 1]:
        assert (seen.state, seen.verb, seen.waits_for) == ("waiting", "all_reduce", (n - 1,))
        assert seen.line == forgetful.__code__.co_firstlineno + 2


def over_the_cap(group):
    """Bytes that a rank holds when it is refused more, by the probe and by the allocator of its GPU."""
    from labkit.probe.memory import VirtualOutOfMemory

    on_gpu = torch.device(group.device).type == "cuda"
    before = torch.cuda.memory_stats()["allocated_bytes.all.current"] if on_gpu else 0
    held = []
    with MemoryProbe(device=torch.device(group.device).type, cap_bytes=40 << 20) as probe:
        try:
            while True:
                held.append(torch.ones(2 << 20, device=group.device))  # 8 MiB: whole blocks of the allocator
        except VirtualOutOfMemory:
            pass
        counted = probe.live_bytes
    allocated = torch.cuda.memory_stats()["allocated_bytes.all.current"] - before if on_gpu else counted
    return len(held), counted, allocated


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_cap_refuses_what_is_beyond_it_and_the_allocator_agrees(device):
    """Would catch a cap that counts the host's memory, and a refused tensor that stays allocated."""
    with cluster_on(device, number_of_ranks(device)) as cluster:
        for n_held, counted, allocated in values(cluster, over_the_cap):
            assert (n_held, counted) == (5, 40 << 20)
            assert allocated == counted


def long_rows(length, width):
    """Queries, keys, values and a gradient, of whole rows of one head."""
    stream = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, length, width, generator=stream) for _ in range(4)]


def in_a_ring(group, length, width):
    """How far this rank's part of the answer and of the gradients is from one process, relative to the largest."""
    q, k, v, grad = (x.to(group.device) for x in long_rows(length, width))
    mine = positions_of(zigzag(length, group.size)[group.rank], group.device)
    parts = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
    y = ring_attention(*parts, group)
    got = [y.detach(), *torch.autograd.grad(y, parts, grad[:, :, mine])]
    wholes = [x.requires_grad_() for x in (q, k, v)]
    y = torch.nn.functional.scaled_dot_product_attention(*wholes, is_causal=True)
    expected = [y.detach(), *torch.autograd.grad(y, wholes, grad)]
    return max(float((a - b[:, :, mine]).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_attention_in_a_ring_of_four_ends_with_large_keys_and_values(device):
    """Would catch ranks whose sends wait for each other in a circle as soon as messages exceed the wire's buffers: on a
    GPU, 64 MB of keys and values for each rank."""
    n, width = MOST, 64 if device == "cpu" else 4096
    with cluster_on(device, n, timeout_s=LONG_S) as cluster:
        assert max(values(cluster, in_a_ring, 2048 * n if device != "cpu" else 256 * n, width)) < 1e-4


def dealt(group, rows):
    """Whether `by_messages.all_to_all` gives what the group's own verb does, in two orders of the same ranks."""
    x = torch.arange(group.size * rows * 256, device=group.device).reshape(-1, 256) + 1000 * group.rank
    return [torch.equal(by_messages.all_to_all(x, group), group.all_to_all(x)) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_everybody_may_send_to_everybody_at_the_same_time(device):
    """Would catch three ranks or more that wait for each other, each for the one that it has not heard yet."""
    with cluster_on(device, number_of_ranks(device), timeout_s=LONG_S) as cluster:
        assert values(cluster, dealt, 4096 if device != "cpu" else 512) == [[True, True]] * cluster.n_ranks


def sharded_by_torch(group):
    """Losses and weights of fully_shard over the bridge, and those of one process that has everybody's rows."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from labkit.comm import bridge
    from tests.comm import stock

    ours, alone = stock.layers(2).to(group.device), stock.layers(2).to(group.device)
    kind = torch.device(group.device).type
    mesh = DeviceMesh.from_group(bridge.process_group(group), kind, mesh_dim_names=("dp",))
    for block in (*ours, ours):
        fully_shard(block, mesh=mesh)
    losses = []
    for model in (ours, alone):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(stock.STEPS):
            everybody = [stock.batch(step, rank).to(group.device) for rank in range(group.size)]
            rows = everybody[group.rank] if model is ours else torch.cat(everybody)
            optimizer.zero_grad()
            loss = (model(rows) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().reshape(1))
    mine = group.all_reduce(torch.cat(losses[: stock.STEPS]), "mean").tolist()
    weights = [p.full_tensor().cpu() for p in ours.parameters()]
    off = max(float((a - b.cpu()).abs().max()) for a, b in zip(weights, alone.parameters(), strict=True))
    return mine, torch.cat(losses[stock.STEPS :]).tolist(), off


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_fully_shard_over_the_bridge_trains_as_one_process_does(device):
    """Would catch unfinished copies that are sent, and a bridge that torch finds no backend in for these tensors."""
    with cluster_on(device, number_of_ranks(device)) as cluster:
        for ours, alone, off in values(cluster, sharded_by_torch):
            assert ours == pytest.approx(alone, rel=1e-4)
            assert off < 1e-4
