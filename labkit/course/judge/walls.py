"""The kernel's walls around a process that runs a stranger's program. They hold whatever that program does in Python.

    limits        memory, processor seconds, open files, file size 0: a process that exceeds one gets an error or ends
    no variables  the environment is empty, and nothing is open but the pipe to the judge
    Landlock      only Python's own folders can be read; nothing is written, called or signalled outside
    nobody        user 65534 without rights, where the judge runs as root
    seccomp       only the system calls of `syscalls.csv`; no other program, process, socket or shared memory

    confine(parent, keep)    raise all walls around this process; there is no way back
    shelter()                a lighter wall, for the judge itself

Which of them stand on a machine is not assumed: a confined process tries each (wall_trials.py).

Linux has all of them since 5.13 (Landlock; the network since 6.7, signals since 6.12) on x86_64 and aarch64. Where
Landlock is missing, seccomp forbids to open any file, so that modules that were not imported yet are out of reach.
Sources: seccomp(2), landlock(7), capabilities(7) and prctl(2) of the Linux manual pages.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import functools
import os
import platform
import resource
import signal
import site
import struct
import sys
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from labkit.launch import system
from labkit.launch.environment import forget

NOBODY = 65534
ROOM_BYTES = 4 << 30
"""Memory that a process may take in addition to what it has when it is confined."""
CPU_S = 300
"""The judge ends a rank far sooner (case_run.py); this is for one whose judge has ended."""
OPEN_FILES, THREADS = 64, 512

# -- prctl(2) and capabilities(7) ------------------------------------------------------------------------------------
PDEATHSIG, _KEEPCAPS, _SECCOMP, _BOUNDING_DROP, _NO_NEW_PRIVS, _AMBIENT = 1, 8, 22, 24, 38, 47
SEARCH, _CAPABILITIES, _VERSION_3 = (2, 1), 41, 0x20080522  # the two rights to read all; Docker gives the second

# -- landlock(7) -----------------------------------------------------------------------------------------------------
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILES, _READ_FOLDERS = 1 << 2, 1 << 3
_BITS = ((1, 13), (2, 14), (3, 15), (5, 16))  # from this version on, rights on files are this many bits

_ABOUT_THE_PROCESSOR = ("/proc/cpuinfo", "/sys/devices/system/cpu")
"""Looked at by torch before its first product of matrices."""

# -- seccomp(2): a program for the kernel's packet filter, over `struct seccomp_data` --------------------------------
_LOAD, _EQUAL, _AT_LEAST, _ANY_OF, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _EACCES, _ENOSYS = 1, 13, 38
_MACHINES = MappingProxyType({"x86_64": 0xC000003E, "aarch64": 0xC00000B7})
_FOREIGN = 0x40000000
"""From this number on, calls are those of another interface (x32), whose numbers mean something else."""
_CLONE_THREAD = 0x10000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CONTROLS = MappingProxyType({
    "fcntl": (1, (0, 1, 2, 3, 4, 1030)),  # duplicate, flags; no locks and leases, which other ranks could see
    "ioctl": (1, (0x5401, 0x5421, 0x5450, 0x5451, 0x541B)),  # is it a terminal, do not block, close on exec
    "prctl": (0, (3, 15, 16, 21, 39, 0x53564D41)),  # names of threads and of memory; not the death signal
})  # fmt: skip


def confine(parent: int, keep: Collection[int] = ()) -> None:
    """Raise all walls that this kernel has around this process, which has one thread, and end it with its parent.

    keep    file descriptors that stay open, besides 0, 1 and 2

    A wall that the kernel does not have is left out; `wall_trials.examined` says which."""
    _close(keep)  # before the limit on open files, which would let nobody list more of them
    _limit()
    forget()
    trees = _trees()  # found while this process may still look, and so are the calls: its home may be closed to nobody
    _calls(platform.machine())
    os.chdir("/")
    rules = _rules(trees)
    prctl(_NO_NEW_PRIVS, 1)
    read = rules >= 0 and _syscall(_RESTRICT_SELF, rules, 0) == 0
    if rules >= 0:
        os.close(rules)
    _drop_rights(keep_search=read and not all(map(_open_to_all, trees)))
    system.end_with(parent)  # a new user forgets the death signal, so it is set last
    _filter(may_open=read)


def shelter(folders: Collection[str] = ("/proc", os.devnull)) -> None:
    """A lighter wall for the judge itself, which reads what ranks say: nothing is written or connected, and only
    Python's own folders and these are read. It still starts ranks, and ends them."""
    prctl(_NO_NEW_PRIVS, 1)
    rules = _rules((*_trees(), *folders))
    if rules >= 0:
        _syscall(_RESTRICT_SELF, rules, 0)
        os.close(rules)


# -- limits, files, rights -------------------------------------------------------------------------------------------


def _limit() -> None:
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CPU: CPU_S}
    limits[resource.RLIMIT_NOFILE] = OPEN_FILES
    if system.LINUX:
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        limits |= {resource.RLIMIT_AS: now + ROOM_BYTES, resource.RLIMIT_MSGQUEUE: 0}
    if os.geteuid() == 0:
        limits[resource.RLIMIT_NPROC] = THREADS  # of nobody's; of a user with other programs nobody knows how many
    for limit, most in limits.items():
        _, hard = resource.getrlimit(limit)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (value, value))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write raises an error and does not kill the process


def _close(keep: Collection[int]) -> None:
    """Close all that was inherited: another rank's pipe, a file whose position two ranks could tell each other by."""
    with contextlib.suppress(OSError):
        for fd in map(int, os.listdir("/proc/self/fd" if system.LINUX else "/dev/fd")):
            if fd > 2 and fd not in keep:
                with contextlib.suppress(OSError):  # the listing itself is over
                    os.close(fd)


@functools.cache
def _trees() -> tuple[str, ...]:
    """The folders of Python, its packages and labkit: what torch imports late, and what tracebacks quote."""
    names = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    names |= {*site.getsitepackages(), str(Path(__file__).parents[2])}
    torch = sys.modules.get("torch")
    names |= {str(Path(torch.__file__).parent.parent)} if torch is not None and torch.__file__ else set()
    return tuple(sorted(name for name in {*names, *_ABOUT_THE_PROCESSOR} if name and os.path.exists(name)))


def _open_to_all(folder: str) -> bool:
    """True if any user may read in this folder."""
    above = [Path(folder).resolve(), *Path(folder).resolve().parents]
    return all(path.stat().st_mode & 0o001 for path in above[1:]) and bool(above[0].stat().st_mode & 0o004)


def _drop_rights(keep_search: bool) -> None:
    """Become nobody, if this is root, and give up all rights. `keep_search`: but one to read what others may not, for
    packages in root's own folder, behind the wall that leaves only these to be read."""
    if not system.LINUX:
        return
    permitted = rights()[1]
    kept = next((1 << right for right in SEARCH if permitted >> right & 1), 0)
    kept = kept if keep_search and os.geteuid() == 0 else 0
    prctl(_AMBIENT, 4)  # clear all
    for right in range(_CAPABILITIES):
        prctl(_BOUNDING_DROP, right)
    if os.geteuid() == 0:
        prctl(_KEEPCAPS, 1 if kept else 0)
        with contextlib.suppress(OSError):  # a container without the right to change users; wall_trials.py will say so
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        prctl(_KEEPCAPS, 0)
    ctypes.CDLL(None).capset(struct.pack("=Ii", _VERSION_3, 0), struct.pack("=6I", kept, kept, 0, 0, 0, 0))


def rights() -> tuple[int, ...]:
    """Capabilities of this process: effective, permitted and inheritable, and the same three from number 32 on."""
    held = ctypes.create_string_buffer(24)
    ctypes.CDLL(None).capget(struct.pack("=Ii", _VERSION_3, 0), held)
    return struct.unpack("=6I", held.raw)


def _rules(trees: Collection[str]) -> int:
    """A Landlock ruleset that refuses all but to read these files and folders; -1 where the kernel has none."""
    if not system.LINUX:
        return -1
    version = _syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return -1
    files = (1 << max(bits for since, bits in _BITS if version >= since)) - 1
    network, scope = 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _syscall(_CREATE_RULESET, struct.pack("=3Q", files, network, scope), ctypes.c_size_t(size), 0)
    for tree in trees if rules >= 0 else ():
        with contextlib.suppress(OSError):  # a folder that this user cannot enter
            fd = os.open(tree, os.O_PATH | os.O_CLOEXEC)
            reads = _READ_FILES | _READ_FOLDERS if os.path.isdir(tree) else _READ_FILES
            _syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", reads, fd), 0)
            os.close(fd)
    return rules


def prctl(option: int, value: int) -> int:
    """The system call of that name; -1 where it fails, or is not to be had."""
    return int(ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)) if system.LINUX else -1


def _syscall(number: int, *args: Any) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(number, *args))


# -- system calls ----------------------------------------------------------------------------------------------------


def _filter(may_open: bool) -> bool:
    """Allow only the calls of the list from now on. False where this machine's calls are not known."""
    machine = platform.machine()
    calls = _calls(machine)
    if not calls:
        return False
    program = b"".join(filter_program(machine, calls, os.getpid(), may_open))
    held = ctypes.create_string_buffer(program)
    sock_fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    return int(ctypes.CDLL(None).prctl(_SECCOMP, ctypes.c_ulong(2), sock_fprog, 0, 0)) == 0


@functools.cache
def _calls(machine: str) -> dict[str, int]:
    """The calls that a confined process may make, by name; none where this machine's calls are not known."""
    if not system.LINUX or machine not in _MACHINES:
        return {}
    with (Path(__file__).parent / "syscalls.csv").open(encoding="utf-8") as file:
        return {row["call"]: int(row[machine]) for row in csv.DictReader(file) if row[machine]}


def filter_program(machine: str, calls: dict[str, int], pid: int, may_open: bool) -> Iterator[bytes]:
    """The filter, instruction by instruction. Most calls are allowed or not; some depend on an argument."""
    refused = _ERROR | _EPERM
    yield _instruction(_LOAD, _ARCHITECTURE)
    yield _instruction(_EQUAL, _MACHINES[machine], 1, 0)
    yield _instruction(_RETURN, _KILL)
    yield _instruction(_LOAD, _NUMBER)
    if machine == "x86_64":
        yield from _returned(_AT_LEAST, _FOREIGN, refused)
    for name, number in calls.items():
        body = list(_answered(name, pid, may_open, refused))
        yield _instruction(_EQUAL, number, 0, len(body))
        yield from body
    yield _instruction(_RETURN, refused)


def _answered(name: str, pid: int, may_open: bool, refused: int) -> Iterator[bytes]:
    if name in ("clone3", "openat2"):  # their arguments lie in memory, where a filter cannot look
        yield _instruction(_RETURN, _ERROR | _ENOSYS)
    elif name in ("open", "openat"):
        if not may_open:
            yield _instruction(_RETURN, _ERROR | _EACCES)
            return
        yield _argument(1 if name == "open" else 2)
        yield from _returned(_ANY_OF, _WRITING, _ERROR | _EACCES)
    elif name == "clone":  # a thread of this process, and no other process
        yield _argument(0)
        yield _instruction(_ANY_OF, _CLONE_THREAD, 1, 0)
        yield _instruction(_RETURN, refused)
    elif name in ("kill", "tgkill"):  # itself
        yield _argument(0)
        yield _instruction(_EQUAL, pid, 1, 0)
        yield _instruction(_RETURN, refused)
    elif name == "prlimit64":  # to ask for its own limits, and not to set any
        yield _argument(0)
        yield _instruction(_EQUAL, 0, 1, 0)
        yield _instruction(_RETURN, refused)
        for half in (0, 4):
            yield _argument(2, half)
            yield _instruction(_EQUAL, 0, 1, 0)
            yield _instruction(_RETURN, refused)
    elif name in _CONTROLS:
        place, allowed = _CONTROLS[name]
        yield _argument(place)
        for value in allowed:
            yield from _returned(_EQUAL, value, _ALLOW)
        yield _instruction(_RETURN, refused)
        return
    yield _instruction(_RETURN, _ALLOW)


def _instruction(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_so, if_not, value)


def _returned(test: int, value: int, answer: int) -> Iterator[bytes]:
    """Return `answer` if the test holds, and go on otherwise."""
    yield _instruction(test, value, 0, 1)
    yield _instruction(_RETURN, answer)


def _argument(place: int, half: int = 0) -> bytes:
    """Load 32 bits of an argument, the lower ones unless `half` is 4 (both machines put these first)."""
    return _instruction(_LOAD, _ARGUMENTS + 8 * place + half)
