"""What a cluster stands on: where /proc, the working folder or room is missing, that is said, and nothing is left."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import torch
import zmq

from labkit import Cluster
from labkit.comm.traffic import Traffic
from labkit.launch import working_folders
from labkit.launch.blackbox import PAGE, BlackBox
from labkit.plan.machine.topology import Links
from tests.waiting import LONG_S, until


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere zeros are written, since nothing else takes room")
def test_the_pages_that_processes_share_have_their_room_at_once(tmp_path: Path, monkeypatch) -> None:
    """Would catch files of holes: on a full disk, the first write to one ends the notebook's kernel with SIGBUS; and a
    folder that is left when there is no room."""
    BlackBox(str(tmp_path / "box"), 5, create=True).close()
    Traffic(str(tmp_path / "traffic"), Links.two_nodes(2)).close()
    for name in ("box", "traffic"):
        file = (tmp_path / name).stat()
        assert file.st_blocks * 512 >= file.st_size > 0
    full = Path(tempfile.mkdtemp(prefix="full-", dir="/tmp"))  # a short path, else the private folder is made elsewhere

    def no_room(fd: int, start: int, n_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(full))
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    words = rf"black box of 3 ranks: {3 * PAGE:,} bytes are wanted, [\d,]+ are free in {full}/labkit-\w+\. Make room"
    with pytest.raises(OSError, match=words):
        Cluster(3, device="cpu", quiet=True)
    full.rmdir()  # OSError if anything is left in it


def test_a_folder_that_is_gone_and_a_missing_proc_are_named(tmp_path: Path, monkeypatch) -> None:
    """Would catch 'No such file or directory: ' with no name, and a fresh rank that "ended by itself with exit code 1"
    for want of a folder."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    with Cluster(1, device="cpu", quiet=True) as cluster:
        work.rmdir()
        with pytest.raises(ValueError, match=r"work, in which the ranks of this cluster work, was deleted or moved"):
            cluster.restart()
        with pytest.raises(ValueError, match=r"working folder of this notebook was deleted .* os\.chdir"):
            Cluster(1, device="cpu", quiet=True)
        work.mkdir()
        assert [reply.value for reply in cluster.run(lambda group: os.getcwd())] == [str(work)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(working_folders, "PROC", tmp_path / "proc")
    if sys.platform == "linux":
        with pytest.raises(ValueError, match="proc is not mounted here"):
            Cluster(1, device="cpu", quiet=True)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no file is without a name")
def test_what_is_printed_takes_no_room_on_disk_and_a_start_without_room_says_so(tmp_path: Path, monkeypatch) -> None:
    """Would catch 300 KB of prints that fill a small TMPDIR: every later print and every new world fails then; and
    memory that grows with what is printed."""

    def flood(group):
        for _ in range(60_000):
            print("x" * 100)
        return float(group.all_reduce(torch.ones(1)))

    with Cluster(2, device="cpu", quiet=True) as cluster:
        folder = Path(cluster._processes.folder)
        assert [reply.value for reply in cluster.run(flood)] == [2.0, 2.0]
        assert sum(file.stat().st_size for file in folder.iterdir()) < 100_000
        assert [reply.output for reply in cluster.run(lambda group: print("after"))] == ["after\n"] * 2
        assert max(os.fstat(tail.fd).st_size for tail in cluster._processes.tails) < 1 << 20
        monkeypatch.setattr(working_folders, "SCANT_BYTES", 1 << 62)
        assert f"bytes free in {folder}: make room there" in cluster._processes._start_report()


def test_an_odd_umask_a_long_path_with_spaces_and_a_thread_are_no_hindrance(tmp_path: Path, monkeypatch) -> None:
    """Would catch a folder that its own ranks cannot open, a socket whose path is too long, and a cluster that only the
    main thread can make."""
    folder = tmp_path / ("long and spaced " * 12)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    sums: list[float] = []

    def work() -> None:
        with Cluster(2, device="cpu", quiet=True) as cluster:
            sums.extend(reply.value for reply in cluster.run(lambda group: float(group.all_reduce(torch.ones(1)))))

    before = os.umask(0o377)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(LONG_S)
    finally:
        os.umask(before)
    assert sums == [2.0, 2.0]
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", ["\u00fc" * 40, "\udcff", "100% #1 [x] labkit"])
def test_a_socket_has_a_place_whatever_the_folder_for_temporary_files_is_called(name, monkeypatch) -> None:
    """Would catch a path whose letters are counted where its bytes have a limit, and one that is no text."""
    folder = Path(tempfile.mkdtemp(prefix=name, dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as channel:
        private = Path(working_folders.private_folder())
        channel.bind(f"ipc://{private / 'wire'}")
        assert (private / "wire").is_socket()
        channel.unbind(f"ipc://{private / 'wire'}")
    shutil.rmtree(private)
    folder.rmdir()


LOADS = """
from labkit import Cluster

def total(group):
    import torch
    from torch.utils.data import DataLoader
    return sum(float(x.sum()) for x in DataLoader(torch.ones(4, 2), num_workers=1))

with Cluster(1, device="cpu", quiet=True) as cluster:
    print(cluster.run(total)[0].value, cluster._processes.folder)
"""


@pytest.mark.slow
def test_the_workers_of_a_loader_hand_over_where_the_folder_for_temporary_files_has_a_long_path(tmp_path: Path) -> None:
    """Would catch ranks that wait for ever in `for x in loader`, and a folder of theirs that is left."""
    folder = tmp_path / ("long and spaced " * 12)
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", LOADS], env=environment, stdout=subprocess.PIPE, text=True)
    total, private = done.stdout.split(maxsplit=1)
    assert total == "8.0"
    assert not Path(private.strip()).exists()
    assert not list(folder.iterdir())


@pytest.mark.rest
@pytest.mark.faults
def test_a_rank_can_have_a_cluster_of_its_own_which_ends_with_it(tmp_path: Path) -> None:
    """Would catch a zygote, a warden and ranks of a rank that is killed: nobody else knows of them."""

    def inner(group):
        group.state["inner"] = Cluster(2, device="cpu", quiet=True)
        total = [
            reply.value for reply in group.state["inner"].run(lambda group: float(group.all_reduce(torch.ones(1))))
        ]
        return total, [child.pid for child in psutil.Process().children(recursive=True)]

    with Cluster(1, device="cpu", quiet=True, timeout_s=None) as cluster:
        total, family = cluster.run(inner)[0].value
        assert total == [2.0, 2.0]
        assert len(family) == 4
        os.kill(cluster.pids[0], signal.SIGKILL)
        assert until(lambda: not any(map(psutil.pid_exists, family)))
