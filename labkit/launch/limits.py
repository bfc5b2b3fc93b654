"""How many ranks this machine can hold, worked out before the first process is started.

A rank costs memory, processes (a thread counts as one) and open files. Every rank of gloo is connected with every other
one, so that n ranks hold n (n - 1) sockets: their memory grows with the square of n.

    memory      RANK_BYTES n + SOCKET_BYTES n²  <= what the machine, and its container, have left
    processes   RANK_THREADS n                  <= what the user and the container may still start
    files       KERNEL_FILES n here, and RANK_FILES + n in each rank  <= the limit of open files (`ulimit -n`)

The constants were measured with 8 to 300 ranks on Linux with torch 2.13 (`benchmarks/launch.py` prints the memory).
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
from pathlib import Path
from typing import NamedTuple

import psutil

from labkit.launch import system

CGROUP = Path("/sys/fs/cgroup")
RANK_BYTES, SOCKET_BYTES = 16 << 20, 6 << 10
EXECUTED_BYTES = 150 << 20
"""What a rank takes that is executed: its torch is its own, while forked ranks share theirs."""
RANK_THREADS, RANK_FILES, KERNEL_FILES = 8, 40, 3


class Limit(NamedTuple):
    """The most ranks that one of the machine's limits allows, and what it is, in words."""

    n_ranks: int
    words: str


def check(n_ranks: int) -> None:
    """ValueError with the number that this machine can hold, and the reason, if `n_ranks` are more than that."""
    limit = min(limits(), key=lambda limit: limit.n_ranks)
    if n_ranks > limit.n_ranks:
        raise ValueError(
            f"this machine cannot hold {n_ranks:,} ranks but about {max(limit.n_ranks, 0):,}: {limit.words}. "
            "To see what a job of thousands of ranks does, rehearse one rank of it (labkit.rehearse) or plan it "
            "(labkit.plans)"
        )


def limits() -> list[Limit]:
    """The limits on the number of ranks here, by memory, processes and open files."""
    free = free_bytes()
    rank_bytes = RANK_BYTES if system.forks() else EXECUTED_BYTES
    discriminant = math.sqrt(rank_bytes**2 + 4 * SOCKET_BYTES * free)
    by_memory = int((discriminant - rank_bytes) / (2 * SOCKET_BYTES))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = soft - psutil.Process().num_fds() - 50  # the notebook opens files of its own
    processes = _processes()
    return [
        Limit(by_memory, f"{free / 1e9:.1f} GB of memory are free, and a rank takes {rank_bytes >> 20} MiB and more"),
        Limit(
            files // KERNEL_FILES,
            f"a process may open {soft:,} files (ulimit -n), {KERNEL_FILES} of them for each rank",
        ),
        Limit(hard - RANK_FILES, f"a rank may open {hard:,} files (ulimit -Hn), one of them for each other rank"),
        Limit(processes // RANK_THREADS, f"{processes:,} more processes and threads may be started (ulimit -u)"),
    ]


def free_bytes(cgroup: Path = CGROUP) -> int:
    """Memory that this process may still take: of the machine, and of its container if that has a limit."""
    machine = psutil.virtual_memory().available
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return machine if limit == "max" else max(0, min(machine, int(limit) - int(used)))
    except (OSError, ValueError):  # no container, or another kind of system
        return machine


def _processes(cgroup: Path = CGROUP) -> int:
    """The number of processes and threads that may still be started: by this user, container and machine."""
    left = [1 << 30]
    with contextlib.suppress(OSError, ValueError):
        limit, used = ((cgroup / name).read_text().strip() for name in ("pids.max", "pids.current"))
        left += [] if limit == "max" else [int(limit) - int(used)]
    with contextlib.suppress(OSError, ValueError, IndexError):
        threads = int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])  # of everybody: a little too many
        left.append(int(Path("/proc/sys/kernel/pid_max").read_text()) - threads)
        most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if most != resource.RLIM_INFINITY and os.getuid() != 0:  # the limit does not hold for root
            left.append(most - threads)
    return max(0, min(left))
