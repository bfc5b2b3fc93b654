"""How many ranks a machine can hold: said before any is started, and a start that fails leaves nothing."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import socket
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace

import psutil
import pytest

from labkit import Cluster
from labkit.launch import limits, working_folders
from labkit.launch.rank_processes import Channels, RankProcesses
from labkit.launch.rank_spec import RankSpec
from labkit.launch.warden import Warden
from tests.waiting import until


def test_more_ranks_than_the_machine_holds_are_refused_with_the_number_that_it_holds():
    """Would catch minutes of silence, a machine that swaps, and an error without the mend."""
    most = min(limit.n_ranks for limit in limits.limits())
    with pytest.raises(ValueError, match=r"cannot hold 1,000,000 ranks but about [\d,]+: .*rehearse one rank"):
        Cluster(1_000_000, device="cpu")
    assert 0 < most < 1_000_000
    limits.check(1)


@pytest.mark.parametrize(
    ("most", "words"),
    [
        ({"free_bytes": lambda: 1 << 30}, r"but about 6\d: 1\.1 GB of memory are free"),
        ({"_processes": lambda: 800}, "but about 100: 800 more processes and threads"),
    ],
)
def test_each_limit_is_named(monkeypatch, most, words):
    """Would catch a limit that is not looked at: the ranks would fail one by one, in the middle of the start."""
    for name, value in most.items():
        monkeypatch.setattr(limits, name, value)
    with pytest.raises(ValueError, match=words):
        limits.check(500)


def test_a_container_and_its_processes_count(tmp_path):
    """Would catch a container whose host has room that it has not."""
    (tmp_path / "pids.max").write_text("300\n")
    (tmp_path / "pids.current").write_text("100\n")
    assert limits._processes(tmp_path) == 200
    (tmp_path / "pids.max").write_text("max\n")
    assert limits._processes(tmp_path) > 200


def test_kernel_and_warden_do_not_both_wait_until_the_other_reads():
    """Would catch a start that only sends: with 279 ranks the socket was full of answers, and nobody read any more."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    n_ranks, warden = 64, Connection(theirs.detach())

    def answer() -> None:
        for _ in range(n_ranks):
            _, spec = warden.recv()
            warden.send(("started", spec["rank"], 10_000 + spec["rank"]))

    processes = RankProcesses.__new__(RankProcesses)
    folder = working_folders.private_folder()  # a short path, since it is a socket's
    Channels.__init__(processes, f"ipc://{folder}/wire", Connection(ours.detach()))
    processes.folder, processes.spec = folder, RankSpec(environment={"X": "x" * 9000})
    processes.devices, processes.sent_sources = ["cpu"] * 64, set()
    processes.box = SimpleNamespace(wipe=lambda rank: None)
    processes.tails = [SimpleNamespace(path="")] * n_ranks  # type: ignore[list-item]
    threads = [threading.Thread(target=work, daemon=True) for work in (answer, lambda: processes.start(range(n_ranks)))]
    for thread in threads:
        thread.start()
    assert until(lambda: not any(thread.is_alive() for thread in threads), 30)
    processes.wait(lambda: len(processes.pids) == n_ranks, 30)
    assert sorted(processes.pids) == list(range(n_ranks))
    processes.hang_up()
    warden.close()
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.faults
def test_a_start_that_is_stopped_leaves_no_rank():
    """Would catch a stop that does nothing for a minute, and ranks that are left until the kernel ends."""
    with Cluster(1, device="cpu", quiet=True):  # the zygote is warm
        before = {process.pid for process in psutil.Process().children(recursive=True)}
    began = threading.Event()

    def press() -> None:
        assert until(lambda: len(psutil.Process().children(recursive=True)) > len(before) + 5)
        began.set()
        os.kill(os.getpid(), signal.SIGINT)

    finger = threading.Thread(target=press)
    finger.start()
    with pytest.raises(KeyboardInterrupt):
        Cluster(150, device="cpu", quiet=True)
    finger.join()
    assert began.is_set()
    assert until(lambda: {process.pid for process in psutil.Process().children(recursive=True)} <= before)


def test_a_process_that_the_system_refuses_is_told_and_the_warden_goes_on(monkeypatch):
    """Would catch a warden that dies of it: its ranks would be gone, and nobody could say why."""

    def refuse() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    ours, theirs = Pipe()
    warden = Warden.__new__(Warden)
    warden.kernel, warden.ranks = theirs, {}
    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # of this process
    warden.start({"fresh": False, "rank": 7, "imports": ()})
    kind, rank, words = ours.recv()
    assert (kind, rank) == ("refused", 7)
    assert "Resource temporarily unavailable" in words
