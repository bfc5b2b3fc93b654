"""What Linux lets processes of one machine do with each other's memory, and whether it lets them here.

    why_not(n)     the reason why n ranks cannot share memory, in words; "" if they can
    room(n)        fresh memory for the mailboxes of n ranks (mailbox.py): a nameless file, which needs no room in
                   /dev/shm and ends with the last process that has it open
    Memory         read from another process (process_vm_readv), sleep at a word of shared memory and wake (futex)

This file imports no torch: a notebook's kernel asks it before the first rank is there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from pathlib import Path

MOST_RANKS = 64
"""The mailboxes of n ranks grow with the square of n: 4 MiB for 4 ranks, 285 MB for 64."""
PAGE = 4096
_FUTEX, _WAIT, _WAKE, _EVERYBODY = 202, 0, 1, 0x7FFFFFFF
_PR_SET_PTRACER = 0x59616D61
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


def why_not(n_ranks: int, neighbour: int | None = None) -> str:
    """The reason why so many ranks of this machine cannot share memory; "" if they can. `neighbour` is a process of
    this user's that is tried. ProcessLookupError if there is no such process."""
    if n_ranks > MOST_RANKS:
        return f"no shared memory for more than {MOST_RANKS} ranks"
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"no shared memory on {sys.platform}, {platform.machine()}"
    try:
        os.close(room(n_ranks))
        if _YAMA.exists() and int(_YAMA.read_text()) > 1:
            return f"{_YAMA} forbids processes to read each other's memory"
        for pid in (os.getpid(), neighbour or os.getpid()):
            Memory().ask(pid)
    except ProcessLookupError:
        raise
    except (OSError, ValueError, AttributeError) as error:
        return f"no shared memory: {error}"
    return ""


def room(n_ranks: int) -> int:
    """A descriptor of fresh memory for the mailboxes of `n_ranks` ranks. OSError if there is none."""
    fd = os.memfd_create("labkit-mail")
    try:
        os.ftruncate(fd, bytes_of(n_ranks))
        os.pwrite(fd, bytes(PAGE), 0)  # the first page, now: no memory at all is an error here and no signal later
    except OSError:
        os.close(fd)
        raise
    return fd


def slots(n_ranks: int) -> int:
    """Letters for which a ring has room, of a page each."""
    return 64 if n_ranks <= 16 else 16  # a power of two, since counts wrap around


def bytes_of(n_ranks: int) -> int:
    """Memory for bells and marks of each rank, and for the ring of each two: a page of counts and its letters."""
    return PAGE * (2 * n_ranks + n_ranks**2 * (1 + slots(n_ranks)))


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("n_bytes", ctypes.c_size_t))


class _Time(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class Memory:
    """What the C library does with the memory of this process and others."""

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.readv, self.futex = self.libc.process_vm_readv, self.libc.syscall
        self.readv.restype = ctypes.c_ssize_t
        pointer, length = ctypes.c_void_p, ctypes.c_ulong
        self.readv.argtypes = [ctypes.c_int, pointer, length, pointer, length, length]
        self.futex.argtypes = [
            ctypes.c_long, pointer, ctypes.c_int, ctypes.c_uint32, pointer, pointer, ctypes.c_uint32
        ]  # fmt: skip

    def read(self, pid: int, address: int, to: int, n_bytes: int) -> None:
        """Copy bytes from another process. RuntimeError if it is gone, or its memory is."""
        while n_bytes:
            target, source = _Span(to, n_bytes), _Span(address, n_bytes)
            n = self.readv(pid, ctypes.addressof(target), 1, ctypes.addressof(source), 1, 0)
            if n <= 0:
                reason = os.strerror(ctypes.get_errno())
                raise RuntimeError(f"connection closed: the memory of process {pid} cannot be read ({reason})")
            address, to, n_bytes = address + n, to + n, n_bytes - n

    def ask(self, pid: int) -> None:
        """OSError if this process may not read another: ProcessLookupError if there is none. What is asked for is at
        address 0, where nothing is."""
        target, source = _Span(0, 1), _Span(0, 1)
        self.readv(pid, ctypes.addressof(target), 1, ctypes.addressof(source), 1, 0)
        if (number := ctypes.get_errno()) != errno.EFAULT:
            raise OSError(number, f"process {pid} cannot be read ({os.strerror(number)})")

    def sleep(self, word: int, value: int, seconds: float) -> None:
        """Sleep until somebody wakes those who sleep at this word, but not if it no longer has this value."""
        limit = _Time(int(seconds), int(seconds % 1 * 1e9))
        self.futex(_FUTEX, word, _WAIT, value, ctypes.addressof(limit), None, 0)

    def wake(self, word: int) -> None:
        """Wake everybody who sleeps at this word."""
        self.futex(_FUTEX, word, _WAKE, _EVERYBODY, None, None, 0)

    def let_siblings_read(self) -> None:
        """Where Yama asks who may read this process: its parent's descendants, which are its siblings."""
        self.libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)
