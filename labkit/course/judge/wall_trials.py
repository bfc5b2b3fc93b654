"""Trials of the kernel's walls: a confined process tries all that it must not be able to do.

    walls = examined()     each wall, and whether it stood when it was tried
    missing(walls)         what is missing on this machine, in one sentence; "" if nothing is

The doctor tells it, the first report of a check does, and `labkit grade` refuses to judge where something is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from labkit.course.judge.walls import (
    CPU_S,
    OPEN_FILES,
    PDEATHSIG,
    ROOM_BYTES,
    SEARCH,
    confine,
    prctl,
    rights,
)
from labkit.launch import executed, system

PATIENCE_S = 20.0
"""A confined process that tries its walls for longer is ended; what it has not tried counts as missing."""


ELSEWHERE = "Linux, such as a container or a virtual machine on this computer; here, check only programs that you trust"


class Wall(NamedTuple):
    """One wall: what it keeps an attempt from, whether it stands, and what is to be done where it does not."""

    name: str
    stands: bool
    mend: str = ""


def examined() -> tuple[Wall, ...]:
    """Confine a process, let it try everything that it must not be able to do, and say which walls stood.

    To be called in a process with one thread, such as the prefork server, since it forks."""
    read, write = os.pipe()
    parent = os.getpid()
    if system.forks():
        pid = os.fork()
        if pid == 0:
            try_all(parent, write)
    else:
        pid = executed.child(__name__, "try_all", parent, write, keep=(write,))
    os.close(write)
    text, deadline = b"", time.monotonic() + PATIENCE_S
    while select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0] and (part := os.read(read, 65536)):
        text += part
    os.close(read)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    stood = dict(json.loads(line) for line in text.splitlines())
    return tuple(
        Wall(name, bool(stood.get(name)), "" if stood.get(name) else mend) for name, (mend, _) in _TRIALS.items()
    )


def try_all(parent: int, write: int) -> None:
    """The life of the confined process, which writes a line of JSON for each wall: its name, and whether it stood."""
    with contextlib.suppress(BaseException):
        confine(parent, (write,))
        for name, stopped in _tried(parent):
            os.write(write, json.dumps([name, stopped]).encode() + b"\n")
    os._exit(0)


def missing(walls: Collection[Wall]) -> str:
    """The walls that do not stand, in one sentence; "" if all do."""
    gaps = [wall for wall in walls if not wall.stands]
    if not gaps:
        return ""
    mends = "; ".join(dict.fromkeys(wall.mend for wall in gaps)) if system.LINUX else ELSEWHERE
    return (
        f"On this machine the kernel does not keep an attempt from {_listed([wall.name for wall in gaps])}: only "
        f"Python's guards do, which a determined program can leave. Needed: {mends}"
    )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _tried(parent: int) -> Iterator[tuple[str, bool]]:
    """For each wall, in order, whether it stopped what it must stop."""
    for name, (_, trial) in _TRIALS.items():
        try:
            trial(parent)
            yield name, False
        except (OSError, MemoryError):
            yield name, True
        except Exception:  # what cannot even be tried is not known to be stopped
            yield name, False


def _start_a_process(parent: int) -> None:
    if os.fork() == 0:
        os._exit(0)


def _start_a_program(parent: int) -> None:
    with contextlib.suppress(OSError):
        os.execv("/bin/sh", ["sh", "-c", ":"])
    os.execv(sys.executable, [sys.executable, "-c", ""])


def _connect(parent: int) -> None:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()


def _write(parent: int) -> None:
    path = os.path.join("/tmp", f"labkit-wall-{os.getpid()}")
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    os.unlink(path)


def _read(parent: int) -> None:
    os.close(os.open("/etc/passwd", os.O_RDONLY))


def _read_variables(parent: int) -> None:
    with contextlib.suppress(OSError), open("/proc/self/environ", "rb") as file:
        assert not file.read().strip(b"\0")
    assert not _variables()
    raise PermissionError


def _variables() -> list[bytes]:
    strings = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    return [strings[0]] if strings and strings[0] else []


def _share_memory(parent: int) -> None:
    segment = ctypes.CDLL(None, use_errno=True).shmget(0, 4096, 0o1600)
    if segment == -1:
        os.close(os.open("/dev/shm/labkit-wall", os.O_RDWR | os.O_CREAT))
    else:
        ctypes.CDLL(None).shmctl(segment, 0, None)


def _signal(parent: int) -> None:
    os.kill(parent, 0)


def _look_into_another(parent: int) -> None:
    value = ctypes.create_string_buffer(8)
    there = struct.pack("PN", ctypes.addressof(value), 8)
    if ctypes.CDLL(None).process_vm_readv(parent, there, 1, there, 1, 0) == -1:
        os.close(os.open(f"/proc/{parent}/mem", os.O_RDONLY))


def _have_rights(parent: int) -> None:
    assert os.geteuid() != 0
    assert os.getuid() != 0
    assert not any(held & ~sum(1 << right for right in SEARCH) for held in rights())
    os.chmod("/", os.stat("/").st_mode & 0o7777)


def _take_memory(parent: int) -> None:
    limits = ((resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_NOFILE, OPEN_FILES), (resource.RLIMIT_FSIZE, 0))
    assert all(0 <= resource.getrlimit(limit)[0] <= most for limit, most in limits)
    bytearray(2 * ROOM_BYTES)


def _outlive(parent: int) -> None:
    if system.LINUX and prctl(PDEATHSIG, 0) == -1:  # elsewhere it is a thread of its own that ends it
        raise PermissionError


_SECCOMP_NEEDED = "Linux on x86_64 or aarch64, with seccomp"
_LANDLOCK_NEEDED = "Linux 5.13 or later, with Landlock"
_TRIALS: Mapping[str, tuple[str, Callable[[int], None]]] = MappingProxyType({
    "starting processes": (_SECCOMP_NEEDED, _start_a_process),
    "the network": (_SECCOMP_NEEDED, _connect),
    "writing files": (_LANDLOCK_NEEDED, _write),
    "reading your files": (_LANDLOCK_NEEDED, _read),
    "reading your environment": ("Linux", _read_variables),
    "sharing memory with other processes": (_SECCOMP_NEEDED, _share_memory),
    "signalling other processes": (_SECCOMP_NEEDED, _signal),
    "looking into other processes": (_SECCOMP_NEEDED, _look_into_another),
    "your rights": ("a user that is not root, or a root that may become nobody", _have_rights),
    "using up memory, files or processor": ("Linux", _take_memory),
    "living on after the check": (_SECCOMP_NEEDED, _outlive),
    "starting programs": (_SECCOMP_NEEDED, _start_a_program),  # last: where it succeeds, nothing follows
})  # fmt: skip
