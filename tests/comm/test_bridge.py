"""torch's own strategies on labkit's groups, against gloo; and what ledger and autopsy see of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labkit import Cluster, WorkerError
from labkit.launch import call
from labkit.plan.machine import collectives


@pytest.fixture(scope="module", params=[3, *(pytest.param(n, marks=pytest.mark.rest) for n in (1, 2, 4))])
def cluster(request):
    """Three ranks, for which no sum of a ring is that of gloo bit for bit."""
    with Cluster(request.param, device="cpu", quiet=True) as made:
        yield made


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    """A refused rank is the only one that fails here: nobody need wait for what the others have to say."""
    monkeypatch.setattr(call, "GRACE_S", 0.02)


def values(cluster, fn, *args):
    return [reply.value for reply in cluster.run(fn, *args)]


@pytest.mark.slow
def test_torchs_strategies_train_on_a_group_as_they_do_on_gloo(cluster):
    """Would catch a verb that mixes up ranks, an operation overtaken by the next, a buffer that is written too late, a
    future that tells too early, and callbacks that wait for the thread they stand in (PowerSGD)."""

    def parity(group):
        import torch.distributed as dist

        from labkit.comm import bridge, ring
        from tests.comm import stock

        names = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
        ringed = group.using(**{name: getattr(ring, name) for name in names})
        theirs = stock.everything(dist.new_group(backend="gloo"))
        ours = [stock.everything(bridge.process_group(view)) for view in (group, ringed)]
        wrong = []
        for name, (losses, learnt) in theirs.items():
            for way, outcome in zip(("native", "ring"), ours, strict=True):
                mine, parts = outcome[name]
                exact = mine == losses and all(map(torch.equal, parts, learnt))
                close = torch.allclose(torch.tensor(mine), torch.tensor(losses), rtol=1e-5, atol=1e-6)
                close &= all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(parts, learnt, strict=True))
                if not (exact if way == "native" else close):
                    wrong.append((name, way, mine, losses))
        return wrong

    assert values(cluster, parity) == [[]] * cluster.n_ranks


def test_every_call_of_a_process_group_gives_what_gloo_gives(cluster):
    """The shape of torchft's `_test_pg`, with values: would catch a missing call, a wrong root, parts in another order,
    an operation that is folded as a sum, a handle without result, and a future that is never set."""

    def calls(group):
        import torch.distributed as dist

        from labkit.comm import bridge
        from tests.comm.calls import outcomes

        theirs, ours = outcomes(dist.new_group(backend="gloo")), outcomes(bridge.process_group(group))
        return {
            name: (ours.get(name), tensors)
            for name, tensors in theirs.items()
            if name not in ours or not all(map(torch.equal, ours[name], tensors))
        }

    assert values(cluster, calls) == [{}] * cluster.n_ranks


def test_the_ledger_has_the_law_by_torchs_own_call_and_by_unit_of_fully_shard(cluster):
    """Would catch messages that are booked as anonymous, twice or not at all, and units that are not told apart."""

    def booked(group):
        from torch import nn
        from torch.distributed.fsdp import fully_shard

        from labkit.comm import bridge, ring
        from tests.comm import stock

        if group.size == 1:
            return None
        ringed = group.using(all_reduce=ring.all_reduce, all_gather=ring.all_gather)
        torchs, model = bridge.process_group(ringed), stock.layers(2)
        group.ledger.clear()
        parallel = nn.parallel.DistributedDataParallel(model, process_group=torchs, init_sync=False)
        parallel(stock.batch(0, group.rank)).sum().backward()
        reduced = group.ledger.sent_bytes("allreduce"), group.ledger.sent_bytes("all_reduce")
        sharded, mesh = stock.layers(2), stock.mesh_of(torchs)
        for block in (*sharded, sharded):
            fully_shard(block, mesh=mesh)
        group.ledger.clear()
        sharded(stock.batch(0, group.rank)).sum().backward()
        table = bridge.by_call(group.ledger)
        of_unit = group.ledger.sent_bytes("1")
        return reduced, table, of_unit, sum(p.numel() for p in model.parameters())

    n = cluster.n_ranks
    for rank, found in enumerate(values(cluster, booked)):
        if found is None:
            continue
        reduced, table, of_unit, n_params = found
        bound = collectives.sent_bytes("ring", "all_reduce", n, 4 * n_params, rank, item_bytes=4)
        assert reduced == (bound, bound)
        gathers, scatters = table["_allgather_base"], table["_reduce_scatter_base"]
        # each unit is gathered for forward and, but for the last one, for backward; its gradient is scattered once
        assert scatters[0] == 2
        assert gathers[0] == table["_allgather_base/0"][0] + table["_allgather_base/1"][0]
        assert of_unit == table["_allgather_base/1"][1] + table["_reduce_scatter_base/1"][1]
        shard = -(-4 * 24 * 48 // n)  # of one weight, at least
        assert gathers[1] >= gathers[0] * (n - 1) * shard


def test_groups_form_in_a_world_that_is_bound_to_a_gpu(cluster):
    """A bug: torch asked a new group for what it has on the world's GPU, and no strategy could begin under NCCL."""

    def sums(group):
        import torch.distributed as dist

        from labkit.comm import bridge

        world, ranks = dist.group.WORLD, list(range(group.size))
        world.bound_device_id = torch.device("cuda:0")  # what init_process_group(device_id=) leaves behind
        try:
            whole = bridge.process_group(group)
            parts = [
                dist.new_group(part, backend="labkit", use_local_synchronization=True)
                for part in (ranks[:1], ranks[1:])
            ]
        finally:
            world.bound_device_id = None
        totals = []
        for made in (whole, *parts):
            if isinstance(made, dist.ProcessGroup):  # and not what a rank outside of it gets, by torch None or -100
                x = torch.tensor([10.0**group.rank])
                dist.all_reduce(x, group=made)
                totals.append(int(x))
        return totals, [device.type for device in whole._device_types]

    if cluster.n_ranks > 1:
        ranks = range(cluster.n_ranks)
        all_parts = (ranks, ranks[:1], ranks[1:])
        assert values(cluster, sums) == [
            ([sum(10**r for r in part) for part in all_parts if rank in part], ["cpu"]) for rank in ranks
        ]


@pytest.mark.slow
def test_an_error_reaches_who_waits_and_a_rank_that_is_left_alone_is_named_with_its_line(cluster):
    """Would catch an error that is lost in the group's thread, a backward pass that waits for ever, and an autopsy that
    shows a line of labkit's."""
    if cluster.n_ranks == 1:
        pytest.skip("a rank that is alone waits for nobody")

    def broken(group):
        import torch.distributed as dist

        from labkit.comm import bridge

        def all_reduce(x, group):
            raise KeyError("my own mistake")

        torchs = bridge.process_group(group.using(all_reduce=all_reduce))
        work = dist.all_reduce(torch.ones(3), group=torchs, async_op=True)
        errors = []
        for wait in (work.wait, work.get_future().wait):
            try:
                wait()
            except Exception as error:
                errors.append(str(error))
        parallel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=torchs)
        try:
            parallel(torch.ones(1, 2)).sum().backward()
        except Exception as error:
            errors.append(str(error))
        return [("my own mistake" in text) for text in errors]

    assert values(cluster, broken) == [[True] * 3] * cluster.n_ranks

    def mismatched(group):
        import torch.distributed as dist

        from labkit.comm import bridge

        torchs = bridge.process_group(group)
        dist.all_reduce(torch.ones(3 + (group.rank == 1)), group=torchs)

    with pytest.raises(WorkerError, match="does not match") as caught:
        cluster.run(mismatched)
    assert "allreduce(shape (3,)" in str(caught.value)

    def skipped(group):
        from labkit.comm import bridge

        torchs = bridge.process_group(group)
        parallel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=torchs)
        loss = parallel(torch.ones(1, 2)).sum()
        if group.rank:
            loss.backward()  # here

    with pytest.raises(WorkerError) as caught:
        cluster.run(skipped)
    waiting = [rank for rank in caught.value.autopsy.ranks if rank.rank != 0]
    assert all(rank.verb == "allreduce" and rank.source.endswith("# here") for rank in waiting)


SCRIPT = """
import torch, torch.distributed as dist
from labkit.comm import bridge, ring

ledger = bridge.register(all_reduce=ring.all_reduce)
dist.init_process_group("labkit")
x = torch.ones(4)
dist.all_reduce(x, group=dist.new_group([0, 1], group_desc="mesh_dp"))
own, _ = dist.new_subgroups(1)
dist.all_reduce(x, group=own)
kept = [None, None]
dist.all_gather_object(kept, {"rank": dist.get_rank(), "sum": x.tolist()})
if dist.get_rank() == 0:
    print(kept, ledger.sent_bytes("all_reduce", "dp"))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_script_under_torchrun_runs_on_the_ring(tmp_path):
    """Would catch a backend that needs a cluster, a subgroup that falls back to gloo, and a process that never ends."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stderr
    whole = [{"rank": rank, "sum": [2.0] * 4} for rank in range(2)]
    assert ended.stdout.splitlines()[-1] == f"{whole} 16"


TORCHS_OWN = (
    "test_Backend_enum_class", "test_DistributedDataParallelCPU", "test_accumulate_gradients_no_sync",
    "test_all_gather_coalesced_with_empty", "test_all_reduce_coalesced_full_group_product",
    "test_all_to_all_single_unequal_split", "test_batch_isend_irecv_gloo", "test_all_gather_object_default_pg",
    "test_monitored_barrier_gloo", "test_reduce_max", "test_isend","test_scatter",
    "test_send_recv_any_source", "test_sparse_all_reduce_sum",
)  # fmt: skip


@pytest.mark.rest
def test_a_part_of_torchs_own_suite_passes():
    """Would catch a change of the bridge that breaks what all of `python -m tests.comm.torch_suite` has shown."""
    code = (
        "from labkit.comm import bridge; from tests.comm import torch_suite as suite; bridge.register()\n"
        "tests = suite.suite('labkit', 4)\n"
        f"ends = {{name: suite.play(tests, name, 4) for name in {TORCHS_OWN!r}}}\n"
        "assert all(end.status != 'failed' for end in ends.values()), ends\n"
        "assert sum(end.status == 'passed' for end in ends.values()) >= 11, ends"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=550)
    assert ended.returncode == 0, ended.stderr
