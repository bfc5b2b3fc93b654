"""What this system has for processes, and what takes the place of what it lacks. Decisions by system stand here only.

                Linux                                    elsewhere, such as macOS
forks           a process that has torch may be forked   each process is executed afresh (executed.py): what torch
                                                         loads on macOS (Accelerate, Grand Central Dispatch,
                                                         Metal) ends or hangs a fork that uses it
end_with        the parent's end kills this process,     a thread looks for the parent, LOOK_S apart; it cannot
                whatever it does                         look while C code holds the interpreter
adopt_orphans   who loses its parent becomes our child   it becomes init's, and ends with a rank only if it is in
                                                         the rank's process group
end_of          a descriptor tells a process's end       whoever waits for the end looks now and then
state           psutil tells whether a process sleeps    psutil calls each process running; `ps` knows it
queued_s        the scheduler counts how long threads    nothing counts it
                were ready and had no core
loopback        lo                                       lo0
memory_file     a nameless file in memory                a file in the cluster's private folder, and goes with it
open_files      the hard limit is a number               the hard limit may be "none", the soft one must not
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from types import MappingProxyType

import psutil

LINUX = sys.platform == "linux"
LOOK_S = 0.25
OPEN_MAX = 10240
"""The most open files that every macOS grants a process (OPEN_MAX of sys/syslimits.h)."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STATES = MappingProxyType({
    "R": psutil.STATUS_RUNNING, "U": psutil.STATUS_DISK_SLEEP, "D": psutil.STATUS_DISK_SLEEP,
    "T": psutil.STATUS_STOPPED, "Z": psutil.STATUS_ZOMBIE,
})  # fmt: skip
"""The letters of `ps` that do not say that a process sleeps: U on macOS and D on Linux that nothing can wake it."""


def forks() -> bool:
    """True if a process that has imported torch may be forked."""
    return LINUX and hasattr(os, "fork")


def queued_s(pid: int) -> float | None:
    """Seconds for which threads of a process, of those that it has now, were ready to run and no core was free; None
    where the system does not tell, or the process is gone."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        waits = [Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1] for thread in threads]
    except (OSError, IndexError):
        return None
    return sum(map(int, waits)) / 1e9


def end_with(parent: int) -> None:
    """End this process when `parent`, which has started it, ends; at once if it has ended already."""
    if LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_look_for, args=(parent,), daemon=True, name="labkit-parent").start()
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def _look_for(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    try:
        for below in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                below.kill()
        os.killpg(0, signal.SIGKILL)  # and those in its group whose own parent has ended
    finally:  # where an attempt is judged, Python refuses all this
        os._exit(1)


def adopt_orphans() -> None:
    """From now on this process is the parent of every descendant that loses its own."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_of(pid: int) -> list[int]:
    """A descriptor that becomes readable when this process ends, or [] where the system has none (before 5.3)."""
    if not hasattr(os, "pidfd_open"):
        return []
    try:
        return [os.pidfd_open(pid)]
    except OSError:  # a container may forbid it
        return []


def children() -> set[int]:
    """The process ids of this process's own children, also of those that have ended and were not reaped yet."""
    me = os.getpid()
    try:
        return set(map(int, Path(f"/proc/{me}/task/{me}/children").read_text().split()))
    except OSError:  # a kernel that was built without this file
        return {child.pid for child in psutil.Process().children()}


def lead_session() -> None:
    """Give this process a session and a process group of its own, unless it was started with them."""
    if os.getsid(0) != os.getpid():
        os.setsid()


def state(pid: int) -> str:
    """What a process does now, as psutil calls it: psutil.STATUS_RUNNING, STATUS_SLEEPING and so on; STATUS_DEAD if
    there is no such process. On Linux of its main thread, elsewhere of that which is most awake."""
    try:
        status = str(psutil.Process(pid).status())
    except psutil.Error:
        return str(psutil.STATUS_DEAD)
    if LINUX or status != psutil.STATUS_RUNNING:
        return status
    command = ["ps", "-o", "state=", "-p", str(pid)]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        letters = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
        return str(_STATES.get(letters[:1], psutil.STATUS_SLEEPING) if letters else psutil.STATUS_DEAD)
    return status


@cache
def loopback() -> str:
    """The name of the network interface that has 127.0.0.1."""
    there = psutil.net_if_addrs().items()
    named = (name for name, addresses in there for address in addresses if address.address == "127.0.0.1")
    return next(named, "lo" if LINUX else "lo0")


def memory_file(name: str, folder: str | None = None) -> tuple[int, str]:
    """(descriptor, path) of an empty file in memory, which other processes of this user open by that path while the
    descriptor is open; a file in `folder` where the system has no memory for it. OSError if there is no room."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        return fd, f"/proc/{os.getpid()}/fd/{fd}"
    return tempfile.mkstemp(prefix=f"{name}-", dir=folder)


def close_memory_file(fd: int, path: str) -> None:
    """Close it, so that no other process can open it any more; who has it open keeps it."""
    os.close(fd)
    if not hasattr(os, "memfd_create"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def open_files() -> None:
    """Let this process open as many files as the system allows it: a rank has a socket for each other rank."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for soft in (most, min(most, OPEN_MAX) if most > 0 else OPEN_MAX):
        with contextlib.suppress(ValueError, OSError):
            return resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


def _prctl(option: int, value: int) -> None:
    if LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
