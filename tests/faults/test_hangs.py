"""F01 to F11: collectives that can never end, and getting out of them."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from labkit import Cluster, WorkerError
from tests.faults.conftest import BUSY_S, all_well

pytestmark = pytest.mark.faults


def fails(cluster, fn, within_s):
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        cluster.run(fn)
    assert time.monotonic() - started < within_s + BUSY_S
    return caught.value


def interrupt_soon(after_s=0.8):
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_f01_a_skipped_collective_names_the_missing_rank_the_verb_and_the_line(cluster):
    """Would catch silence until the time-out, and a report without the learner's line."""
    last, pids = cluster.n_ranks - 1, cluster.pids

    def skips(group):
        if group.rank != group.size - 1:
            group.all_reduce(torch.ones(7, 3))  # here

    error = fails(cluster, skips, within_s=2)
    waiting = [each for each in error.autopsy.ranks if each.rank != last]
    assert error.rank == last
    assert all(each.waits_for == (last,) and each.seq == 1 and each.verb == "all_reduce" for each in waiting)
    assert all("(7, 3)" in each.shape and each.source.endswith("# here") for each in waiting)
    assert all(each.file == __file__ for each in waiting)
    assert cluster.pids == pids
    all_well(cluster)


def test_f01_a_skipped_collective_of_torch_itself_is_named_too(cluster):
    """Would catch an autopsy that only knows labkit's own verbs."""

    def skips(group):
        import torch.distributed as dist

        if group.rank != 0:
            dist.all_reduce(torch.ones(5))  # raw

    error = fails(cluster, skips, within_s=2)
    assert error.rank == 0
    assert all("all_reduce" in each.call and each.source.endswith("# raw") for each in error.autopsy.ranks[1:])
    all_well(cluster)


def test_f02_different_collectives_are_named_both(cluster):
    """Would catch a hang, or gloo mixing up the bytes of two collectives."""

    def confused(group):
        x = torch.ones(4)
        return group.all_reduce(x) if group.rank else group.broadcast(x)

    error = fails(cluster, confused, within_s=2)
    assert "all_reduce" in error.reason
    assert "broadcast" in error.reason
    all_well(cluster)


@pytest.mark.parametrize("strict", [False, True])
def test_f03_different_shapes_are_named_both(strict):
    """Would catch gloo's abort of the process, which explains nothing and loses the rank's names."""
    with Cluster(2, strict=strict, quiet=True) as cluster:
        cluster.state["k"] = 5
        error = fails(cluster, lambda group: group.all_reduce(torch.ones(4 + 2 * group.rank)), within_s=2)
        assert "(4,)" in error.reason
        assert "(6,)" in error.reason
        all_well(cluster)


def test_f03_strict_mode_names_the_shapes_of_torchs_own_collectives():
    """Would catch a strict mode that is not passed on to torch."""

    def raw(group):
        import torch.distributed as dist

        dist.all_reduce(torch.ones(4 + 2 * group.rank))

    with Cluster(2, strict=True, quiet=True) as cluster:
        error = fails(cluster, raw, within_s=2)
        assert "4" in str(error)
        assert "6" in str(error)
        all_well(cluster, remembers=False)


def test_f04_a_receive_without_a_send(cluster):
    """Would catch point-to-point waits that torch's recorder does not see."""
    error = fails(cluster, lambda group: group.recv(1) if group.rank == 0 else None, within_s=2)
    assert "recv from rank 1" in error.reason
    assert error.autopsy.ranks[0].waits_for == (1,)
    all_well(cluster)


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_f04_both_send_first(cluster, size):
    """Would catch a send that pretends to be delivered, for small messages or for large ones."""

    def stuck(group):
        if group.rank < 2:
            group.send(torch.ones(size), 1 - group.rank).wait()
            group.recv(1 - group.rank)

    error = fails(cluster, stuck, within_s=2)
    assert error.reason.startswith("Deadlock")
    assert set(error.autopsy.stuck) == {0, 1}
    all_well(cluster)


def test_f05_two_subgroups_in_opposite_order(four):
    """Would catch a diagnosis that looks at one group at a time."""

    def opposite(group):
        from labkit import Layout, Mesh

        mesh = Mesh.connect(Layout(dp=2, tp=2), group)
        first, second = (mesh.dp, mesh.tp) if group.rank in (0, 3) else (mesh.tp, mesh.dp)
        first.all_reduce(torch.ones(2))
        second.all_reduce(torch.ones(2))

    error = fails(four, opposite, within_s=2)
    assert set(error.autopsy.stuck) == {0, 1, 2, 3}
    assert {each.axis for each in error.autopsy.ranks} == {"dp", "tp"}
    all_well(four)


def test_f06_a_straggler_is_reported_and_not_stopped(capsys):
    """Would catch a watchdog that shoots whoever is slow."""

    def late(group):
        if group.rank == 1:
            time.sleep(7)
        group.barrier()
        return "done"

    with Cluster(2, quiet=True) as cluster:
        assert [reply.value for reply in cluster.run(late)] == ["done", "done"]
    printed = capsys.readouterr().out
    assert "waiting in barrier #1" in printed
    assert "rank 1 is running Python" in printed
    assert "time.sleep(7)" in printed


def test_f07_the_stop_button_frees_ranks_from_a_collective(cluster):
    """Would catch ranks that stay stuck until the time-out, or are replaced and forget everything."""
    pids = cluster.pids

    def waits(group):
        if group.rank == 0:
            time.sleep(60)
        group.all_reduce(torch.ones(3))

    interrupt_soon()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        cluster.run(waits)
    assert time.monotonic() - started < 0.8 + BUSY_S
    assert cluster.pids == pids
    all_well(cluster)


def ddps_backward(group):
    """Rank 0 stays away from the sums of DDP's C++ reducer."""
    from torch.nn.parallel import DistributedDataParallel

    loss = DistributedDataParallel(torch.nn.Linear(4, 4))(torch.ones(2, 4)).sum()
    if group.rank == 0 and "warm" in group.state:
        time.sleep(60)
    loss.backward()


def ddps_constructor(group):
    """Rank 0 stays away from the broadcast of the weights."""
    from torch.nn.parallel import DistributedDataParallel

    if group.rank == 0 and "warm" in group.state:
        time.sleep(60)
    DistributedDataParallel(torch.nn.Linear(4, 4))


def fully_shards_gather(group):
    """Rank 0 stays away from the all-gather before a forward of FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(torch.nn.Linear(8, 8), mesh=init_device_mesh("cpu", (group.size,)))
    model(torch.ones(2, 8)).sum().backward()
    if group.rank == 0 and "warm" in group.state:
        time.sleep(60)
    model(torch.ones(2, 8))


@pytest.mark.parametrize("stuck", [ddps_backward, ddps_constructor, fully_shards_gather])
def test_f08_the_stop_button_frees_ranks_from_torchs_own_strategies(cluster, stuck):
    """Would catch a way out that works in Python but not in torch's C++. A bug, in the constructor: SIGINT met an error
    of the cut collective while it was being reported, and the rank died of it."""
    pids = cluster.pids

    def again(group):
        stuck(group)
        group.state["warm"] = True

    cluster.run(again)  # the first time it imports for two seconds
    for _ in range(3):
        interrupt_soon(1.0)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            cluster.run(again)
        assert time.monotonic() - started < 1.0 + BUSY_S
        assert cluster.pids == pids
        all_well(cluster)


def test_a_stop_in_the_middle_of_an_import_does_not_leave_half_a_module(cluster, tmp_path):
    """A bug: after a stop during `import torch._dynamo` every later DDP failed with an AttributeError."""
    (tmp_path / "slow_to_load").mkdir()
    (tmp_path / "slow_to_load/__init__.py").write_text("from . import part\nimport time\ntime.sleep(0.9)\nwhole = 1\n")
    (tmp_path / "slow_to_load/part.py").write_text("import itertools\ncount = itertools.count()\n")
    pids = cluster.pids

    def load(group, path):
        import sys

        sys.path.insert(0, path)
        import slow_to_load

        time.sleep(0 if "again" in group.state else 60)
        return slow_to_load.whole, hasattr(slow_to_load, "part")

    interrupt_soon(0.3)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(load, str(tmp_path))
    assert cluster.pids == pids
    cluster.run(lambda group: group.state.update(again=True))
    assert {reply.value for reply in cluster.run(load, str(tmp_path))} == {(1, True)}


def test_f09_a_users_exception_is_the_root_cause_and_the_others_are_collateral(cluster):
    """Would catch "connection closed by peer" shown in place of the mistake."""

    def fails_on_one(group):
        if group.rank == 1:
            raise ValueError("boom 42")  # the mistake
        group.all_reduce(torch.ones(3))

    pids = cluster.pids
    error = fails(cluster, fails_on_one, within_s=2)
    assert error.rank == 1
    assert "boom 42" in error.reason
    assert 'raise ValueError("boom 42")  # the mistake' in error.remote_traceback
    assert isinstance(error.__cause__, ValueError)
    assert "rank 0 has been in all_reduce #1" in str(error)
    assert cluster.pids == pids
    all_well(cluster)


def test_f10_twenty_recoveries_in_a_row_leave_no_sockets_behind(four):
    """Would catch a generation whose connections or store files stay open."""

    def fds(group):
        return len(os.listdir("/proc/self/fd"))

    def fails_on_one(group):
        if group.rank == 1:
            raise ValueError("boom")
        group.all_reduce(torch.ones(3))

    counts = []
    for _ in range(20):
        with pytest.raises(WorkerError):
            four.run(fails_on_one)
        counts.append([reply.value for reply in four.run(fds)])
    assert counts[-1] == counts[2]
    assert four.status().generation == 21
    assert sum(name.startswith("store") for name in os.listdir(four._crew.folder)) == 1
    all_well(four)


def test_f11_ranks_that_cannot_meet_are_reported_stage_by_stage(monkeypatch):
    """Would catch a start that waits for ever when the network interface does not exist."""
    from labkit.launch import crew

    def wrong_interface(self, ranks, start=crew.Crew.start):
        self.spec["interface"] = "no-such-interface"
        start(self, ranks)

    monkeypatch.setattr(crew.Crew, "start", wrong_interface)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="did not all meet") as caught:
        Cluster(2, quiet=True)
    assert time.monotonic() - started < 60
    assert "rank 0:" in str(caught.value)


def test_a_timeout_without_any_sign_of_life_is_reported_within_two_seconds():
    """Would catch an endless loop that is waited for, and a report that does not say where it loops."""

    def endless(group):
        while True:
            pass

    with Cluster(2, timeout_s=2, quiet=True) as cluster:
        cluster.state["k"] = 5
        error = fails(cluster, endless, within_s=2 + 2)
        assert "no rank finished a verb" in error.reason
        assert error.autopsy.ranks[0].state == "running"
        all_well(cluster)


def test_a_long_call_that_shows_life_is_not_given_up():
    """Would catch a time-out on the whole call in place of on silence."""

    def steps(group):
        for _ in range(8):
            time.sleep(0.4)
            group.all_reduce(torch.ones(1))
        return "done"

    with Cluster(2, timeout_s=1.5, quiet=True) as cluster:
        assert cluster.run(steps)[0].value == "done"
