"""What Linux does for processes that must leave nothing behind; on another system these do nothing.

die_with_parent    a rank ends with the thread that forked it, however that ends
adopt_orphans      processes whose parent ends become our children, not init's, so that we can end them
end_of             a file descriptor that becomes readable when a process ends: nobody has to look now and then
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent() -> None:
    """SIGKILL for this process when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
