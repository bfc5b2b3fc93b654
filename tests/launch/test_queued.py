"""Hangs in collectives that return when they are queued, as NCCL's do: who waits where, and for whom."""

from __future__ import annotations

import pytest
import torch

from labkit import Cluster, WorkerError


def as_on_nccl(group):
    """From now on torch's all_reduce and its handle return at once in this rank, and what is under way is waited for
    where labkit waits for the device."""
    import torch.distributed as dist

    from labkit.comm.process_groups import ProcessGroups

    under_way, blocking = [], dist.all_reduce

    class Queued:
        def wait(self):
            return True

    def all_reduce(y, op=dist.ReduceOp.SUM, group=None, async_op=False):
        under_way.append(blocking(y, op, group, async_op=True))
        return Queued() if async_op else None

    def drain(self):
        while under_way:
            under_way.pop().wait()

    dist.all_reduce, ProcessGroups.drain = all_reduce, drain


@pytest.fixture(params=[True, False], ids=["blocking", "queued"])
def cluster(request):
    with Cluster(3, device="cpu", wire="gloo", quiet=True, blocking=request.param) as made:
        made.run(as_on_nccl)
        made.blocking = request.param
        yield made


def hung(cluster, fn):
    """The error of a call that hangs; afterwards the same ranks go on."""
    pids = cluster.pids
    with pytest.raises(WorkerError) as caught:
        cluster.run(fn)
    assert cluster.pids == pids
    assert [reply.value for reply in cluster.run(lambda group: group.all_reduce(torch.ones(1)))] == [3.0] * 3
    return caught.value


def forgetful(group):
    if group.rank == group.size - 1:
        return None
    y = group.all_reduce(torch.ones(3))
    group.state["beyond"] = True
    return y.shape


def test_a_hang_is_named_in_its_verb_with_its_line(cluster):
    """A bug: on GPUs nothing blocked in the verb, so ranks 0 and 1 were "running Python" somewhere in labkit until the
    time-out. With blocking=False they do go on, and are found in the same verb when the call waits for the device."""
    error = hung(cluster, forgetful)
    assert error.reason == (
        "Hang: ranks 0 and 1 wait in all_reduce #1 on world for rank 2, which has finished without it."
    )
    for stance in error.autopsy.ranks[:2]:
        assert (stance.state, stance.source) == ("waiting", "y = group.all_reduce(torch.ones(3))")
    assert [reply.value for reply in cluster.run(lambda group: group.state.pop("beyond", False))] == [
        not cluster.blocking, not cluster.blocking, False,
    ]  # fmt: skip


def careless(group):
    """Rank 2 starts nothing; the others wait for what they have started."""
    if group.rank < 2:
        work = group.all_reduce_start(torch.ones(3))
        work.wait()


def test_a_started_verb_hangs_where_it_is_waited_for(cluster):
    """Would catch a wait that returns when the device has been told to wait, and not when it has waited."""
    error = hung(cluster, careless)
    assert error.reason == (
        "Hang: ranks 0 and 1 wait in all_reduce #1 on world for rank 2, which has finished without it."
    )
    assert {stance.source for stance in error.autopsy.ranks[:2]} == {"work.wait()"}
