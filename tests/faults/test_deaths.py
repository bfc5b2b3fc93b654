"""F12 to F18: ranks that die, and what they leave behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import torch

from labkit import Cluster, WorkerError
from labkit.launch.zygote import zygote
from tests.faults.conftest import all_well, belongings, gone
from tests.waiting import LONG_S, replaced, until

pytestmark = pytest.mark.faults


def test_f12_a_rank_killed_while_idle_is_noticed_and_only_it_is_replaced(cluster, capsys):
    """Would catch a status that believes its own list, and a repair that restarts everybody."""
    before = cluster.pids
    os.kill(before[1], signal.SIGKILL)
    assert until(lambda: not cluster.status()[1].alive)
    assert cluster.status()[1].signal == "SIGKILL"
    all_well(cluster, remembers=False)
    assert "rank 1 was killed by SIGKILL" in capsys.readouterr().out
    assert replaced(before, cluster) == [1]
    kept = cluster.run(lambda group: group.state.get("k"))
    assert [reply.value for reply in kept] == [None if rank == 1 else 5 for rank in range(cluster.n_ranks)]


@pytest.mark.parametrize("victim", [0, 1])
def test_f13_f17_a_rank_killed_in_a_collective_frees_the_others(cluster, victim):
    """Would catch survivors that wait for the dead, and a rendezvous that dies with rank 0."""
    before = cluster.pids

    def dies(group, victim):
        if group.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        group.all_reduce(torch.ones(3))

    with pytest.raises(WorkerError) as caught:
        cluster.run(dies, victim)
    assert caught.value.rank == victim
    # a slow machine may see the hang of the others first, and then says why they wait in vain
    assert re.search(rf"rank {victim}(, which)? was killed by SIGKILL", caught.value.reason)
    assert replaced(before, cluster) == [victim]
    all_well(cluster, remembers=False)


def test_f14_without_a_memory_group_the_cause_of_sigkill_is_unknown(four):
    """Would catch a guess that is sold as a finding."""
    with pytest.raises(WorkerError, match="cause unknown"):
        four.on(0).run(lambda group: os.kill(os.getpid(), signal.SIGKILL))


def test_f14_out_of_memory_is_told_with_the_counter_that_proves_it(tmp_path):
    """Would catch an out-of-memory kill that is reported as a riddle."""
    root = Path("/sys/fs/cgroup")
    mine = root / f"labkit-test-{os.getpid()}"
    try:
        mine.mkdir()
        if not (mine / "memory.max").exists():
            raise OSError("no memory controller")
    except OSError as error:
        pytest.skip(f"needs a writable cgroup v2 with a memory controller: {error}")
    program = tmp_path / "hungry.py"
    program.write_text(
        "import os, pathlib, sys\n"
        f"pathlib.Path({str(mine / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"
        "from labkit import Cluster, WorkerError\n"
        "def hungry(group):\n"
        "    held = [bytearray(32 << 20) for _ in range(200)]\n"
        "with Cluster(1, device='cpu', quiet=True) as cluster:\n"
        f"    pathlib.Path({str(mine / 'memory.max')!r}).write_text(str(1500 << 20))\n"
        "    try:\n"
        "        cluster.run(hungry)\n"
        "    except WorkerError as error:\n"
        "        print(error)\n"
    )
    try:
        done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=LONG_S)
        assert "out of memory" in done.stdout, done.stdout + done.stderr
        assert "oom_kill" in done.stdout
    finally:
        until(lambda: not (mine / "cgroup.procs").read_text().strip())
        mine.rmdir()


def test_f15_a_segmentation_fault_shows_the_signal_and_the_line(four, capsys):
    """Would catch a crash in C of which only "rank 1 is gone" remains."""

    def crash(group):
        import ctypes

        if group.rank == 1:
            ctypes.string_at(0)

    with pytest.raises(WorkerError, match="rank 1 was killed by SIGSEGV"):
        four.run(crash)
    printed = capsys.readouterr().out
    assert "Segmentation fault" in printed
    assert "test_deaths.py" in printed
    assert "in crash" in printed
    all_well(four, remembers=False)


def test_f16_exits(four):
    """Would catch sys.exit taking the rank with it, and os._exit passing as success."""
    pids = four.pids
    for leave in (lambda group: sys.exit(3), lambda group: (_ for _ in ()).throw(SystemExit)):
        with pytest.raises(WorkerError, match="SystemExit"):
            four.run(leave)
        assert four.pids == pids
    with pytest.raises(WorkerError, match="exit code 0"):
        four.on(2).run(lambda group: os._exit(0))
    assert replaced(pids, four) == [2]
    all_well(four, remembers=False)


def test_f18_grandchildren_go_with_their_rank():
    """Would catch a sleeping subprocess or a data loader's workers left running."""

    def spawn(group):
        return subprocess.Popen(["sleep", "600"]).pid

    with Cluster(2, device="cpu", quiet=True) as cluster:
        children = [reply.value for reply in cluster.run(spawn)]
        assert all(psutil.pid_exists(pid) for pid in children)
        os.kill(cluster.pids[0], signal.SIGKILL)
        assert gone(children[:1])
        assert psutil.pid_exists(children[1])
    assert gone(children)


def test_f18_data_loader_workers_go_too():
    """Would catch torch's own worker processes surviving the cluster."""

    def load(group):
        loader = torch.utils.data.DataLoader(list(range(8)), num_workers=2, persistent_workers=True)
        group.state["loader"] = iter(loader)
        next(group.state["loader"])
        return [child.pid for child in psutil.Process().children()]

    with Cluster(2, device="cpu", quiet=True) as cluster:
        workers = [pid for reply in cluster.run(load) for pid in reply.value]
        assert len(workers) >= 4
    assert gone(workers)


def test_a_killed_warden_takes_its_ranks_along_and_says_so():
    """Would catch ranks without anybody who looks after them, and what they have started left behind: a child, one in a
    session of its own, and one whose parent has ended."""

    def spawn(group):
        leaves = "import subprocess as s; print(s.Popen(['sleep', '1000'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
        return [
            subprocess.Popen(["sleep", "1000"]).pid,
            subprocess.Popen(["sleep", "1000"], start_new_session=True).pid,
            int(subprocess.run([sys.executable, "-c", leaves], capture_output=True, check=True).stdout),
        ]

    cluster = Cluster(2, device="cpu", quiet=True)
    pids = [*cluster.pids, *(pid for reply in cluster.run(spawn) for pid in reply.value)]
    assert all(psutil.pid_exists(pid) for pid in pids)
    os.kill(psutil.Process(pids[0]).ppid(), signal.SIGKILL)
    assert gone(pids)
    with pytest.raises(RuntimeError, match="warden"):
        cluster.run(lambda group: None)
    cluster.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody forks wardens who could be killed")
def test_a_cluster_that_is_made_while_everything_is_being_killed_gets_fresh_processes(monkeypatch):
    """A bug: a cluster that met the dying zygote said that its warden was gone. Here the zygote still takes the request
    for a warden, and dies before it forks one."""
    own = tempfile.mkdtemp(dir="/tmp")  # tests beside this one make and remove folders of clusters in the usual place
    monkeypatch.setattr(tempfile, "tempdir", own)
    with Cluster(1, device="cpu", quiet=True):
        folders = belongings()["temp"]
    assert folders > 0, "the folder of a cluster lies elsewhere, and nothing is compared"
    dying = zygote().process.pid
    os.kill(dying, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, (dying, signal.SIGKILL)).start()
    with Cluster(2, device="cpu", quiet=True) as cluster:
        all_well(cluster, remembers=False)
        assert belongings()["temp"] == folders, "the first attempt left its folder behind"
    assert zygote().process.pid != dying
    os.rmdir(own)  # it is empty


def test_a_cluster_whose_folder_was_removed_says_so():
    """Would catch a bare FileNotFoundError for weeks-old kernels on machines that tidy up their temporary folders."""
    program = (
        "import os, shutil, signal, labkit\n"
        "cluster = labkit.Cluster(1, device='cpu')\n"
        "shutil.rmtree(cluster._processes.folder)\n"
        "os.kill(cluster.pids[0], signal.SIGKILL)\n"
        "try:\n    cluster.run(lambda group: 1)\n"
        "except RuntimeError as error:\n    print(error)\n"
        "cluster.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG_S)
    assert "has been removed" in done.stdout, done.stderr


def test_ranks_print_where_the_kernel_has_no_standard_streams():
    """Would catch a rank that closes its own output: the first file that it opens gets the number of the closed one."""
    program = (
        "import os, labkit\nkept = os.dup(1)\nos.close(1)\nos.close(2)\n"
        "(reply,) = labkit.run(lambda group: print('hi'), n_ranks=1, device='cpu')\n"
        "os.write(kept, reply.output.encode())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG_S)
    assert done.stdout == "hi\n"
