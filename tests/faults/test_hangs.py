"""F01 to F11: collectives that can never end, and getting out of them."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from labkit import Cluster, WorkerError
from labkit.launch import call
from labkit.launch.blackbox import BlackBox, Page
from labkit.launch.call import Call
from tests.faults.conftest import all_well
from tests.waiting import come, here, meet, once, stop_button, until, waiting

pytestmark = pytest.mark.faults


def fails(cluster, fn):
    """The error of a call that is given up for what it is, and not for having been silent for long."""
    with pytest.raises(WorkerError) as caught:
        cluster.run(fn)
    assert "Time-out" not in caught.value.reason
    return caught.value


def test_f01_a_skipped_collective_names_the_missing_rank_the_verb_and_the_line(cluster):
    """Would catch silence until the time-out, and a report without the learner's line."""
    last, pids = cluster.n_ranks - 1, cluster.pids

    def skips(group):
        if group.rank != group.size - 1:
            group.all_reduce(torch.ones(7, 3))  # here

    error = fails(cluster, skips)
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

    error = fails(cluster, skips)
    assert error.rank == 0
    assert all("all_reduce" in each.call and each.source.endswith("# raw") for each in error.autopsy.ranks[1:])
    all_well(cluster)


def test_f02_different_collectives_are_named_both(cluster):
    """Would catch a hang, or gloo mixing up the bytes of two collectives."""

    def confused(group):
        x = torch.ones(4)
        return group.all_reduce(x) if group.rank else group.broadcast(x)

    error = fails(cluster, confused)
    assert "all_reduce" in error.reason
    assert "broadcast" in error.reason
    all_well(cluster)


@pytest.mark.parametrize("strict", [False, True])
def test_f03_different_shapes_are_named_both(strict):
    """Would catch gloo's abort of the process, which explains nothing and loses the rank's names."""
    with Cluster(2, device="cpu", strict=strict, quiet=True) as cluster:
        cluster.state["k"] = 5
        error = fails(cluster, lambda group: group.all_reduce(torch.ones(4 + 2 * group.rank)))
        assert "(4,)" in error.reason
        assert "(6,)" in error.reason
        all_well(cluster)


def test_f03_strict_mode_names_the_shapes_of_torchs_own_collectives():
    """Would catch a strict mode that is not passed on to torch."""

    def raw(group):
        import torch.distributed as dist

        dist.all_reduce(torch.ones(4 + 2 * group.rank))

    with Cluster(2, device="cpu", strict=True, quiet=True) as cluster:
        error = fails(cluster, raw)
        assert "4" in str(error)
        assert "6" in str(error)
        all_well(cluster, remembers=False)


def test_f04_a_receive_without_a_send(cluster):
    """Would catch point-to-point waits that torch's recorder does not see."""
    error = fails(cluster, lambda group: group.recv(1) if group.rank == 0 else None)
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

    error = fails(cluster, stuck)
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

    error = fails(four, opposite)
    assert set(error.autopsy.stuck) == {0, 1, 2, 3}
    assert {each.axis for each in error.autopsy.ranks} == {"dp", "tp"}
    all_well(four)


def test_f06_a_straggler_is_reported_and_not_stopped(monkeypatch, tmp_path):
    """Would catch a watchdog that shoots whoever is slow. The report is made when it is known where the rank is, which
    goes on when the watch has looked at it five times as long as it needs to be sure of a hang."""
    told, heard, report, look, looked = tmp_path / "told", [], Call._straggler, Call._look, []

    def look_again(self, now):
        look(self, now)
        looked.extend([now] * bool(heard))
        if looked and now - looked[0] > 10 * call.SURE_S:
            told.touch()

    def report_in_time(self, seen):
        where = self.positions.get(1)
        if where is not None and where.function == "late":
            report(self, seen)

    monkeypatch.setattr(call, "STRAGGLER_S", 0.1)
    monkeypatch.setattr(call, "SURE_S", 0.1)
    monkeypatch.setattr(call, "print", lambda words, **_: heard.append(words), raising=False)
    monkeypatch.setattr(Call, "_look", look_again)
    monkeypatch.setattr(Call, "_straggler", report_in_time)

    def late(group, told):
        while group.rank == 1 and not told.exists():
            time.sleep(0.05)
        group.barrier()
        return "done"

    with Cluster(2, device="cpu", quiet=True) as cluster:
        assert [reply.value for reply in cluster.run(late, told)] == ["done", "done"]
    (sentence,) = heard
    assert "waiting in barrier #1" in sentence
    assert "rank 1 is running Python, test_hangs.py:" in sentence
    assert "time.sleep(0.05)" in sentence or "told.exists()" in sentence


def test_f07_the_stop_button_frees_ranks_from_a_collective(cluster):
    """Would catch ranks that stay stuck until the time-out, or are replaced and forget everything."""
    pids = cluster.pids

    def waits(group):
        here(group)
        if group.rank == 0:
            time.sleep(600)
        group.all_reduce(torch.ones(3))

    others = range(1, cluster.n_ranks)
    with (
        pytest.raises(KeyboardInterrupt),
        once(lambda: come(cluster, 0)() and waiting(cluster, *others)(), stop_button),
    ):
        cluster.run(waits)
    assert cluster.pids == pids
    all_well(cluster)


def ddps_backward(group, stuck):
    """Rank 0 stays away from the sums of DDP's C++ reducer."""
    from torch.nn.parallel import DistributedDataParallel

    loss = DistributedDataParallel(torch.nn.Linear(4, 4))(torch.ones(2, 4)).sum()
    if stuck:
        stay_away(group)
    loss.backward()


def ddps_constructor(group, stuck):
    """Rank 0 stays away from the broadcast of the weights."""
    from torch.nn.parallel import DistributedDataParallel

    if stuck:
        stay_away(group)
    DistributedDataParallel(torch.nn.Linear(4, 4))


def fully_shards_gather(group, stuck):
    """Rank 0 stays away from the all-gather before a forward of FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(torch.nn.Linear(8, 8), mesh=init_device_mesh("cpu", (group.size,)))
    model(torch.ones(2, 8)).sum().backward()
    if stuck:
        stay_away(group)
    model(torch.ones(2, 8))


def stay_away(group):
    """Rank 0 sleeps here. Of every rank it is said that it has come when its main thread no longer moves."""
    main = threading.get_ident()

    def look():
        last, n_same = None, 0
        while n_same < 5:
            time.sleep(0.02)
            frame = sys._current_frames()[main]
            now = id(frame), frame.f_lasti
            del frame
            last, n_same = now, n_same + 1 if now == last else 0
        here(group)

    threading.Thread(target=look, daemon=True).start()
    if group.rank == 0:
        time.sleep(600)


@pytest.mark.parametrize(("n", "n_times"), [(2, 1), pytest.param(4, 3, marks=pytest.mark.rest)])
def test_f08_the_stop_button_frees_ranks_from_torchs_own_strategies(n, n_times):
    """Would catch a way out that works in Python but not in torch's C++. A bug, in the constructor: SIGINT met an error
    of the cut collective while it was being reported, and the rank died of it."""
    with Cluster(n, device="cpu", quiet=True) as cluster:
        cluster.state["k"] = 5
        pids = cluster.pids
        for strategy in (ddps_backward, ddps_constructor, fully_shards_gather):
            cluster.run(strategy, False)  # the first time it imports for two seconds
            for _ in range(n_times):
                with pytest.raises(KeyboardInterrupt), once(come(cluster), stop_button):
                    cluster.run(strategy, True)
                assert cluster.pids == pids
                all_well(cluster)


def test_f08_a_request_to_free_ranks_that_comes_late_leaves_the_new_world_alone():
    """A bug: on a busy machine the second request arrived when the first had freed the rank and all had met again; the
    next collective then said that it had been freed."""
    with Cluster(2, device="cpu", quiet=True) as cluster:
        cluster.state["k"] = 5
        ranks = cluster._processes
        request = ranks.generation, ranks.endpoints()
        ranks.heal()
        ranks.ask([0, 1], "cut", request)
        ranks.ask([0, 1], "where")  # answered after it
        answers = []
        assert until(lambda: answers.extend(ranks.poll(0.05)) or [e.kind for e in answers].count("where") == 2)
        all_well(cluster)


SLOW_TO_LOAD = """
from . import part
import pathlib, signal, time
rank = signal.getsignal(signal.SIGINT).__self__
pathlib.Path(__file__).with_name(f"begun {rank.rank}").touch()
while not rank.spared:
    time.sleep(0.01)
whole = 1
"""


def test_a_stop_in_the_middle_of_an_import_does_not_leave_half_a_module(cluster, tmp_path):
    """A bug: after a stop during `import torch._dynamo` every later DDP failed with an AttributeError. Here an import
    goes on until it has been spared an interrupt."""
    module = tmp_path / "slow_to_load"
    module.mkdir()
    (module / "__init__.py").write_text(SLOW_TO_LOAD)
    (module / "part.py").write_text("import itertools\ncount = itertools.count()\n")
    pids = cluster.pids

    def load(group, path):
        import sys

        sys.path.insert(0, path)
        import slow_to_load

        time.sleep(0 if "again" in group.state else 600)
        return slow_to_load.whole, hasattr(slow_to_load, "part")

    begun = lambda: len(list(module.glob("begun *"))) == cluster.n_ranks  # noqa: E731
    with pytest.raises(KeyboardInterrupt), once(begun, stop_button):
        cluster.run(load, str(tmp_path))
    assert cluster.pids == pids
    cluster.run(lambda group: group.state.update(again=True))
    assert {reply.value for reply in cluster.run(load, str(tmp_path))} == {(1, True)}


def test_f09_a_users_exception_is_the_root_cause_and_the_others_are_collateral(cluster):
    """Would catch "connection closed by peer" shown in place of the mistake."""

    def fails_on_one(group):
        if group.rank == 1:
            meet(group, 0)
            raise ValueError("boom 42")  # the mistake
        group.all_reduce(torch.ones(3))

    pids = cluster.pids
    error = fails(cluster, fails_on_one)
    assert error.rank == 1
    assert "boom 42" in error.reason
    assert 'raise ValueError("boom 42")  # the mistake' in error.remote_traceback
    assert isinstance(error.__cause__, ValueError)
    assert re.search(r"ranks? 0(, [2-4, and]+)? ha(s|ve) been in all_reduce #1", str(error))
    assert cluster.pids == pids
    all_well(cluster)


def test_f10_recoveries_in_a_row_leave_no_sockets_behind(four, monkeypatch):
    """Would catch a generation whose connections or store files stay open."""
    monkeypatch.setattr(call, "GRACE_S", 0.01)

    def fds(group):
        return psutil.Process().num_fds()

    def fails_on_one(group):
        if group.rank == 1:
            raise ValueError("boom")
        group.all_reduce(torch.ones(3))

    counts = []
    for _ in range(8):
        with pytest.raises(WorkerError):
            four.run(fails_on_one)
        counts.append([reply.value for reply in four.run(fds)])
    assert counts[-1] == counts[2]
    assert four.status().generation == 9
    assert sum(name.startswith("store") for name in os.listdir(four._processes.folder)) == 1
    all_well(four)


def test_f11_ranks_that_cannot_meet_are_reported_stage_by_stage(monkeypatch):
    """Would catch a start that waits for ever when the network interface does not exist."""
    from labkit.launch.rank_processes import RankProcesses

    def wrong_interface(self, ranks, start=RankProcesses.start):
        self.spec = replace(self.spec, interface="no-such-interface")
        start(self, ranks)

    monkeypatch.setattr(RankProcesses, "start", wrong_interface)
    with pytest.raises(RuntimeError, match="did not all meet") as caught:
        Cluster(2, device="cpu", quiet=True)
    assert "rank 0:" in str(caught.value)


def test_a_timeout_without_any_sign_of_life_is_reported():
    """Would catch an endless loop that is waited for, and a report that does not say where it loops."""

    def endless(group):
        while True:
            pass

    with Cluster(2, device="cpu", quiet=True) as cluster:
        cluster.state["k"] = 5
        cluster.timeout_s = 0.5
        with pytest.raises(WorkerError) as caught:
            cluster.run(endless)
        assert "no rank finished a verb" in caught.value.reason
        assert caught.value.autopsy.ranks[0].state == "running"
        assert Path(caught.value.autopsy.ranks[0].file).name == "test_hangs.py"
        cluster.timeout_s = 60
        all_well(cluster)


def test_silence_is_counted_from_the_last_sign_of_life(tmp_path):
    """Would catch a time-out on the whole call in place of on silence. The looks are at times that are made up."""
    box = BlackBox(str(tmp_path / "box"), 2, create=True)
    tails = [SimpleNamespace(at=0, hidden_bytes=0) for _ in range(2)]
    processes = SimpleNamespace(n_ranks=2, box=box, tails=tails, ask=lambda *_: None)
    page, under_way = Page(box, 1), Call(processes, range(2), 1, timeout_s=1.5)
    page.begin(1)
    now = under_way.started
    for _ in range(20):
        now += 1.4
        page.beat()
        under_way._look(now)
        assert under_way.reason is None
    tails[0].at = 7  # a rank that prints lives, too
    under_way._look(now + 1.4)
    under_way._look(now + 2.8)
    assert under_way.reason is None
    under_way._look(now + 3.0)
    assert under_way.reason.startswith("Time-out: for 1.5 s no rank finished a verb")
    box.close()
