"""Who holds a lock on a SQLite file: on Linux the system lists all locks, with the process and the file of each.

/proc/locks    1: POSIX  ADVISORY  WRITE 4242 fe:00:1310868 1073741825 1073741825
                                         process   file's inode  first byte  last byte
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

LOCKS = Path("/proc/locks")
PENDING, LAST = 0x40000000, 0x40000000 + 511
"""SQLite locks these bytes of a file, which are never written: PENDING, RESERVED and 510 for those who read."""


def holders(path: Path) -> str:
    """Words for the processes that hold a lock on this file: "process 4242 (python, since 13:05)"."""
    return " and ".join(_name(pid) for pid in sorted(_pids(path))) or "a process that cannot be seen from here"


def _pids(path: Path) -> set[int]:
    pids = set()
    with suppress(OSError):
        inode = str(path.stat().st_ino)
        for line in LOCKS.read_text().splitlines():
            words = line.split()
            if len(words) != 8 or words[1] != "POSIX":  # nine words: it waits for the lock
                continue
            first, last = int(words[6]), LAST if words[7] == "EOF" else int(words[7])
            if words[5].rpartition(":")[2] == inode and first <= LAST and last >= PENDING and int(words[4]) > 0:
                pids.add(int(words[4]))
    return pids


def _name(pid: int) -> str:
    if pid == os.getpid():
        return "this process"
    try:
        process = psutil.Process(pid)
        since = time.strftime("%H:%M", time.localtime(process.create_time()))
        return f"process {pid} ({process.name()}, since {since})"
    except psutil.Error:
        return f"process {pid}"
