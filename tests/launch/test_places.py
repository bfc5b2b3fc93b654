"""What a cluster stands on: where /proc, the working folder or room is missing, that is said, and nothing is left."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch

from labkit import Cluster
from labkit.comm.traffic import Traffic
from labkit.launch import places
from labkit.launch.blackbox import PAGE, BlackBox
from labkit.plan.topology import Links


def test_the_pages_that_processes_share_have_their_room_at_once(tmp_path: Path, monkeypatch) -> None:
    """Would catch files of holes: on a full disk, the first write to one ends the notebook's kernel with SIGBUS; and a
    folder that is left when there is no room."""
    BlackBox(str(tmp_path / "box"), 5, create=True).close()
    Traffic(str(tmp_path / "traffic"), Links.two_nodes(2)).close()
    for name in ("box", "traffic"):
        file = (tmp_path / name).stat()
        assert file.st_blocks * 512 >= file.st_size > 0
    full = Path(tempfile.mkdtemp(prefix="full-"))  # a short path, else the private folder is made elsewhere

    def no_room(fd: int, start: int, n_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(full))
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    words = rf"black box of 3 ranks: {3 * PAGE:,} bytes are wanted, [\d,]+ are free in {full}/labkit-\w+\. Make room"
    with pytest.raises(OSError, match=words):
        Cluster(3, quiet=True)
    full.rmdir()  # OSError if anything is left in it


def test_a_folder_that_is_gone_and_a_missing_proc_are_named(tmp_path: Path, monkeypatch) -> None:
    """Would catch 'No such file or directory: ' with no name, and a fresh rank that "ended by itself with exit code 1"
    for want of a folder."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    with Cluster(1, quiet=True) as cluster:
        work.rmdir()
        with pytest.raises(ValueError, match=r"work, in which the ranks of this cluster work, was deleted or moved"):
            cluster.restart()
        with pytest.raises(ValueError, match=r"working folder of this notebook was deleted .* os\.chdir"):
            Cluster(1, quiet=True)
        work.mkdir()
        assert [reply.value for reply in cluster.run(lambda group: os.getcwd())] == [str(work)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "PROC", tmp_path / "proc")
    with pytest.raises(ValueError, match="proc is not mounted here"):
        Cluster(1, quiet=True)


def test_what_is_printed_takes_no_room_on_disk_and_a_start_without_room_says_so(tmp_path: Path, monkeypatch) -> None:
    """Would catch 300 KB of prints that fill a small TMPDIR: every later print and every new world fails then."""

    def flood(group):
        for _ in range(3_000):
            print("x" * 100)
        return float(group.all_reduce(torch.ones(1)))

    with Cluster(2, quiet=True) as cluster:
        folder = Path(cluster._processes.folder)
        assert [reply.value for reply in cluster.run(flood)] == [2.0, 2.0]
        assert sum(file.stat().st_size for file in folder.iterdir()) < 100_000 < 2 * 3_000 * 100
        monkeypatch.setattr(places, "SCANT_BYTES", 1 << 62)
        assert f"bytes free in {folder}: make room there" in cluster._processes._start_report()
