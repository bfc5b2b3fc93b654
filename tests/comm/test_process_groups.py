"""torch's process groups of a generation: who may call first, what is formed once, and what is left of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from labkit import Cluster, Layout, Mesh, WorkerError
from labkit.comm.process_groups import refuse_one_gpu


def as_with_gpus(group):
    """From the next generation on, messages have groups of their own in this rank, as beside NCCL's."""
    from labkit.comm.process_groups import ProcessGroups

    ProcessGroups.apart = property(lambda self: True)


def unheard(group):
    """What the kernel answers with a new generation."""
    if group.rank == 0:
        group.send(torch.ones(1), 1)


def values(replies):
    return [reply.value for reply in replies]


@pytest.fixture(params=["shared", "as with GPUs"])
def four(request):
    with Cluster(4, device="cpu", wire="shared" if request.param == "shared" else "gloo", quiet=True) as cluster:
        if request.param != "shared":
            cluster.run(as_with_gpus)
            cluster.run(unheard)
        yield cluster


def rank_of(group):
    return group.rank


def sums(group, layout):
    """What each axis sums, and what its neighbour there sends, all under one tag."""
    mesh = Mesh.connect(layout, group)
    x = torch.tensor([10.0**group.rank])
    sent = [axis.send(x, axis.rank ^ 1) for axis in (mesh.dp, mesh.tp, mesh.world)]
    came = [int(axis.recv(axis.rank ^ 1)) for axis in (mesh.world, mesh.tp, mesh.dp)]
    for work in sent:
        work.wait()
    return [int(axis.all_reduce(x)) for axis in (mesh.dp, mesh.tp)], came


def parts(group):
    trainers, generators = (
        Mesh.within(layout, group, first, axis)
        for layout, first, axis in ((Layout(dp=2), 0, "trainers"), (Layout(tp=2), 2, "generators"))
    )
    axis = trainers.dp if generators is None else generators.tp
    return axis.all_reduce(torch.tensor([10.0**group.rank])).item(), trainers is None, generators is None


def test_one_rank_may_be_called_first_in_a_generation(four):
    """A bug: groups for messages were formed by the first call, which waited for ranks that were not called."""
    assert values(four.on(0).run(rank_of)) == [0]
    assert values(four.run(rank_of)) == [0, 1, 2, 3]


def test_parts_of_a_fresh_world_get_their_groups(four):
    """A bug: a group of one rank asked all ranks of the world to form a group with it, each at another moment."""
    assert values(four.run(parts)) == [(11, False, True), (11, False, True), (1100, True, False), (1100, True, False)]


def test_a_part_of_a_world_is_not_cut_further(four):
    """A bug: its ranks waited for those of the rest to form a group with them, and asked for ranks by their number in
    the part."""

    def cut(group):
        part = Mesh.within(Layout(dp=2), group, 2, "generators")
        return None if part is None else part.cut(1)

    with pytest.raises(WorkerError, match="not that world: connect a mesh over the world"):
        four.run(cut)


def test_a_world_that_somebody_else_has_formed_is_as_good(four):
    """Would catch a script under torchrun whose ranks get a group that cannot send, or form no mesh."""

    def adopt(group, layout):
        from labkit import Ledger
        from labkit.comm.native import world

        return sums(world(group.rank, group.size, "cpu", Ledger()), layout)

    assert values(four.run(adopt, Layout(dp=2, tp=2)))[0] == ([101, 11], [10, 10, 100])


def lives(group, layout, times):
    """Groups that torch keeps and threads of this process, after so many meshes more."""
    import psutil
    import torch.distributed as dist

    for _ in range(times):
        Mesh.connect(layout, group)
    return len(dist.distributed_c10d._world.pg_map), psutil.Process().num_threads()


def test_a_hundred_meshes_take_what_one_takes(four):
    """A bug: each `Mesh.connect` formed its groups anew, and torch kept them: two groups and six threads a mesh."""
    first = values(four.run(lives, Layout(dp=2, tp=2), 1))
    assert values(four.run(lives, Layout(dp=2, tp=2), 99)) == first
    assert values(four.run(sums, Layout(dp=2, tp=2)))[2:] == [
        ([101, 1100], [1000, 1000, 1]),
        ([1010, 1100], [100, 100, 10]),
    ]


def test_groups_end_with_their_generation(four):
    """Would catch sockets and threads that outlive the groups, and a mesh that is given groups of an earlier world."""
    (first, *_), fresh = values(four.run(lives, Layout(dp=2, tp=2), 1)), values(four.run(lives, Layout(dp=4), 0))
    for _ in range(3):
        four.run(unheard)
        assert values(four.run(lives, Layout(dp=2, tp=2), 1))[0] == first
    assert fresh[0] == first
    assert values(four.run(sums, Layout(dp=2, tp=2)))[0] == ([101, 11], [10, 10, 100])


def forgetful(group):
    """The last rank does not come. On its way out each rank's groups are NCCL's, as far as they know."""
    import torch.distributed as dist

    def refuse(group=None):
        raise AssertionError("destroyed, and not aborted")

    dist.destroy_process_group = refuse
    group.wire.groups.backend, group.state["groups"] = "nccl", group.wire.groups
    if group.rank == group.size - 1:
        return None
    return group.all_reduce(torch.ones(3))


def test_nccls_groups_are_aborted_and_the_next_generation_works(four, monkeypatch):
    """Would catch groups that are destroyed, which with NCCL waits for what is under way, and an abort that leaves
    torch believing in the old world."""
    monkeypatch.setattr("labkit.launch.call.RELEASE_S", 60.0)  # a busy machine takes long to let go
    pids = four.pids
    with pytest.raises(WorkerError, match="Hang: ranks 0, 1 and 2 wait in all_reduce #1"):
        four.run(forgetful)
    assert four.pids == pids
    aborted = values(four.run(lambda group: group.state["groups"].aborted))
    assert any(aborted[:3])  # not all: once the first is free, gloo tells the others
    assert not aborted[3]  # it did not wait
    assert values(four.run(sums, Layout(dp=2, tp=2)))[0] == ([101, 11], [10, 10, 100])


def hopeful(group, layout):
    """Asks for a message that nobody sends."""
    tp = Mesh.connect(layout, group).tp
    if group.rank == 0:
        tp.recv_start(1)


def pair(group, layout):
    tp = Mesh.connect(layout, group).tp
    if group.rank == 0:
        return tp.recv(1).item()
    return tp.send(torch.tensor(7.0), 0).wait() if group.rank == 1 else None


def test_a_receive_that_nobody_answers_takes_no_message_of_the_next_call(four):
    """Would catch groups that are kept for the next mesh, and with them what an earlier call has asked of them."""
    four.run(hopeful, Layout(dp=2, tp=2))
    assert values(four.run(pair, Layout(dp=2, tp=2)))[0] == 7.0


def test_a_message_that_comes_and_does_not_fit_ends_no_rank(four):
    """A bug: what was asked for and not waited for was looked at after the call, where nobody catches an error."""
    pids = four.pids

    def pour(group):
        if group.rank == 0:
            group.send(torch.ones(5), 1)
            group.send(torch.ones(1), 1, tag=1)
        elif group.rank == 1:
            group.recv_start(0, into=torch.ones(4))
            group.recv(0, tag=1)  # so the first message has come, too

    four.run(pour)
    assert values(four.run(rank_of)) == [0, 1, 2, 3]
    assert four.pids == pids


def told_by_all(store, gpus):
    """What each of several ranks is told, which meet at a store with these GPUs."""

    def told(rank):
        try:
            return refuse_one_gpu(store, rank, len(gpus), gpus[rank])
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(gpus)) as ranks:
        return list(ranks.map(told, range(len(gpus))))


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_ranks_with_one_gpu_are_all_told_which_and_ranks_that_nccl_tells_apart_are_not(kind, tmp_path):
    """Would catch "Duplicate GPU detected", in NCCL's words and late, and a refusal of GPUs of several machines."""
    store = lambda name: dist.FileStore(str(tmp_path / name), 3) if kind == "file" else dist.HashStore()  # noqa: E731
    same = told_by_all(store("same"), [("a", "GPU-1"), ("a", "GPU-2"), ("a", "GPU-1")])
    assert len(set(same)) == 1
    assert same[0].startswith("ranks 0 and 2 have the same GPU, GPU-1 of a, and NCCL wants one for each")
    apart = told_by_all(store("apart"), [("a", "GPU-1"), ("b", "GPU-1"), ("a", "GPU-2")])
    assert apart == [None] * 3
