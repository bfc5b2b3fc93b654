"""The first cluster of a Mac: what is gone is really gone, and labkit works without it. Run by test_macos.py."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import psutil
import torch

from labkit import Cluster
from labkit.launch import system
from labkit.launch.script import _sleeps
from labkit.launch.zygote import zygote
from tests.waiting import until


def refuses(wanted, call):
    """True if the call raises what is wanted."""
    try:
        call()
    except wanted:
        return True
    return False


def total(group, x):
    """The sum over the ranks, and whether this rank is on a Mac."""
    return group.all_reduce(x * group.rank), refuses(RuntimeError, os.fork), hasattr(os, "memfd_create"), sys.platform


def look_around():
    """The machine is a Mac, as far as labkit can see."""
    assert sys.platform == "darwin"
    assert not any(hasattr(os, name) for name in ("memfd_create", "pidfd_open", "posix_fallocate"))
    assert not any(os.path.exists(place) for place in ("/proc/self/fd", "/proc", "/dev/shm"))
    assert refuses(FileNotFoundError, lambda: Path("/proc/self/statm").read_text())
    assert refuses(FileNotFoundError, lambda: os.listdir("/sys"))
    assert refuses(RuntimeError, os.fork)
    assert len(tempfile.gettempdir()) == 49
    assert (system.LINUX, system.forks(), system.end_of(os.getpid())) == (False, False, [])


def main():
    """Run it all; the process ids of what was started, for whoever looks whether they are gone."""
    look_around()
    x = torch.ones(1 << 19)  # large: it goes through a file
    with Cluster(2, device="cpu", quiet=True) as cluster:
        assert cluster.choice.carrier == "gloo"
        folder = Path(cluster._processes.folder)
        assert len(str(folder / "wire")) <= 103
        for reply in cluster.run(total, x):
            value, *found = reply.value
            assert torch.equal(value, x)
            assert found == [True, False, "darwin"], "a rank is not on the simulated Mac"
            command = psutil.Process(cluster.pids[reply.rank]).cmdline()
            assert not any(os.environ["PYTHONPATH"] in word for word in command), "everybody can read the environment"
        assert all(row.private_bytes > 50 << 20 for row in cluster.status()), "each rank has a torch of its own"
        assert [_sleeps(pid) for pid in cluster.pids] == [True, True], "ranks without a call do not compute"
        assert zygote().alive()
        assert zygote().process.poll() == 0, "the process that has said what this torch is, is gone"
        family = [p.pid for p in psutil.Process().children(recursive=True)]
        assert set(cluster.pids) < set(family)
        victim = cluster.pids[1]
        os.kill(victim, signal.SIGKILL)
        assert until(lambda: not psutil.pid_exists(victim)), "nobody has reaped it"
        assert [reply.value for reply in cluster.run(lambda group: group.all_reduce(torch.ones(1)).item())] == [2.0] * 2
        assert cluster.pids[1] != victim
    assert not folder.exists()
    print(*family)


if __name__ == "__main__":
    main()
