"""Memory from outside: the pages of a rank's process that are its own, as the kernel counts them.

The memory probe in a rank (labkit/probe/memory.py) knows what each byte is for, and counts no bytes of Python objects,
of foreign libraries or of tensors that it does not hear of. The kernel knows nothing but pages, and forgets none. So
both are asked: laws are exact by the probe, and within the noise of an allocator by the pages.

    ready    inputs are there, nothing has run       the baseline
    wait     a rank stands still in a verb           the judge reads, then answers
    ticks    the judge's own, at random              whatever a rank is doing
    weigh    the exercise asks what is held          before the probe inside takes its own pictures

Needs /proc (Linux). Elsewhere nothing is read, and `missing` says so once a check.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
from collections.abc import Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from labkit.launch import system

TICK_S = (0.001, 0.02)
"""The judge's own looks are so far apart, at random."""
MISSING = "this machine has no /proc: memory is measured only inside the ranks, and what hides from tensors is not seen"
PICTURE_BYTES = 16 << 20
"""The most bytes of pages that a rank's own pictures of its memory may take."""
_AT_WORK = ("wait", "weigh", "end")
_AFTER = MappingProxyType({"": ("begin",), "begin": _AT_WORK, "weigh": ("resume",), "resume": _AT_WORK, "end": ()})
"""What a rank may say of its memory, and whether it may wait, after what it has said last."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _BLOCK_BYTES = -1, -2, -3, 64 << 10
_NO_HUGE_PAGES = 41  # PR_SET_THP_DISABLE
_STATM = "/proc/{}/statm"


def missing() -> str:
    """A sentence that says why pages cannot be read on this machine; "" if they can."""
    return "" if os.path.exists(_STATM.format("self")) else MISSING


def page_bytes(pid: int) -> int | None:
    """Bytes of anonymous pages of a process; None where they cannot be read. Takes microseconds.

    A page that is still shared with the judge counts as well. It counts no more when it is copied, so that what a rank
    adds is what it has asked for itself."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(_STATM.format(pid), encoding="ascii") as file:
            _, resident, shared, *_ = file.read().split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    return None


@cache
def libc() -> Any:
    """The C library; None where there is none of Linux's kind."""
    return ctypes.CDLL(None) if system.LINUX else None


def return_at_once() -> None:
    """From now on malloc gives large blocks back to the kernel as soon as they are freed, and keeps no room of its own.

    Otherwise pages of what is gone would stand for what is held; and with huge pages, two megabytes for a few bytes."""
    with contextlib.suppress(AttributeError):  # another C library, or none
        for option, value in ((_MMAP_THRESHOLD, _BLOCK_BYTES), (_TRIM_THRESHOLD, 0), (_TOP_PAD, 0)):
            libc().mallopt(option, value)
        libc().prctl(_NO_HUGE_PAGES, 1, 0, 0, 0)


def trim() -> None:
    """Give back to the kernel what is free: a forked rank could fill it without asking for a page."""
    with contextlib.suppress(AttributeError):
        libc().malloc_trim(0)


class Outside:
    """For each rank, how many bytes of pages it had more than at its start: at most, and when it was weighed.

    A rank says four words about its memory, each at its moment and most of them once: "begin" before the attempt's code
    is loaded, "weigh" and "resume" around the pictures that it takes of its own memory, "end" before it packs its
    answer. So the base is set once, and no word of an attempt's own can move it."""

    def __init__(self, pids: Sequence[int]):
        self.pids = pids
        self.base: dict[int, int] = {}
        self.paused: dict[int, int] = {}
        self.peak: dict[int, int] = {}
        self.weighed: dict[int, int] = {}
        self.moments: dict[int, str] = {}

    def look(self, rank: int, moment: str = "tick") -> None:
        """Read a rank's pages now. Before its start ("begin") nothing is read: its inputs are still to come.

        Between "weigh" and "resume" the rank takes pictures of its own, whose pages, up to PICTURE_BYTES, are not the
        attempt's. After "end" it packs its answer, and nothing is read. ValueError for a word at another moment than
        its own."""
        before = self.moments.get(rank, "")
        if moment != "tick" and moment not in _AFTER[before]:
            raise ValueError(f"a rank that has said {before or 'nothing'!r} cannot say {moment!r}")
        if moment in _AFTER:
            self.moments[rank] = moment
        runs = moment == "begin" or (rank in self.base and before != "end")
        now = page_bytes(self.pids[rank]) if runs else None
        if now is None:
            return
        if moment == "begin":
            self.base[rank] = now
        if moment == "resume":
            self.base[rank] += min(now - self.paused.pop(rank), PICTURE_BYTES)
        pictures = max(0, min(now - self.paused[rank], PICTURE_BYTES)) if rank in self.paused else 0
        growth = now - self.base[rank] - pictures
        self.peak[rank] = max(growth, self.peak.get(rank, 0))
        if moment == "weigh":
            self.weighed[rank] = max(growth, self.weighed.get(rank, 0))
            self.paused[rank] = now

    def tick_s(self) -> float:
        """Seconds until the judge's own next look."""
        return random.uniform(*TICK_S)
