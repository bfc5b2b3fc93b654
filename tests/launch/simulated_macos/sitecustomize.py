"""A macOS, simulated on Linux, for every Python that is started with this folder on PYTHONPATH.

What macOS lacks is gone before labkit is imported, and what it has otherwise is otherwise. Nothing of labkit is
replaced. Libraries that were built for Linux still need it: torch, psutil and what the standard library asks for in
their name see the machine as it is.

    sys.platform                       "darwin" for labkit's own code, "linux" for everybody else
    os, signal, socket, resource       without memfd, pidfd, affinity, fallocate, SO_PEERCRED, prlimit ...
    /proc, /sys, /dev/shm              are not there
    the C library                      without prctl, process_vm_readv, mallopt, malloc_trim, capset, clearenv
    os.fork                            refused once torch is imported, after which no library of a Mac bears it
    unix sockets                       have a path of 103 bytes at most
    open files                         the hard limit is "none", which the soft limit must not be
    psutil                             calls each process running; memory of others by RSS only
    multiprocessing                    spawns

lo0 is not there, since gloo would look for it: labkit must ask for the name.
"""

import ctypes
import fcntl
import functools
import importlib
import multiprocessing
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
import types

import psutil

GONE = ("/proc", "/sys", "/dev/shm", "/run")
SEES_MACOS = ("labkit", "__main__", "attempt", "tests")
"""The innermost package beside the standard library that asks: if it is one of these, it sees a Mac."""
ABSENT = (
    (os, "memfd_create MFD_CLOEXEC pidfd_open sched_getaffinity sched_setaffinity posix_fallocate posix_fadvise O_PATH "
         "O_TMPFILE eventfd pipe2 getrandom getresuid setresuid setresgid unshare setns copy_file_range splice"),
    (signal, "pidfd_send_signal SIGRTMIN SIGRTMAX sigtimedwait sigwaitinfo"),
    (socket, "SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK SO_BINDTODEVICE"),
    (select, "epoll"),
    (resource, "prlimit RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_SIGPENDING RLIMIT_RTPRIO"),
    (fcntl, "F_OFD_SETLK F_OFD_SETLKW F_OFD_GETLK F_ADD_SEALS F_SETPIPE_SZ"),
    (time, "CLOCK_BOOTTIME"),
    (psutil.Process, "rlimit cpu_affinity io_counters memory_maps ionice"),
)  # fmt: skip
NOT_IN_LIBC = (
    "prctl", "process_vm_readv", "mallopt", "malloc_trim", "capset", "capget", "clearenv", "syscall", "tgkill",
)  # fmt: skip
INFINITY, OPEN_MAX, LONGEST = (1 << 63) - 1, 10240, 103


def sees_macos():
    """True if labkit's own code or a program asks, by way of the standard library or not."""
    frame = sys._getframe(2)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in sys.stdlib_module_names and package != "sitecustomize" or package == "__main__":
            return package in SEES_MACOS
        frame = frame.f_back
    return False


class Sys(types.ModuleType):
    """The module sys, in which labkit's own code reads another name of the system."""

    def __new__(cls, *args):
        return types.ModuleType(*args)  # importlib makes new modules by type(sys)

    @property
    def platform(self):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return "darwin" if caller.partition(".")[0] in SEES_MACOS else "linux"

    def __reduce__(self):
        return importlib.import_module, ("sys",)


def is_gone(path):
    """True if this path is not there on a Mac, and whoever asks is not a library that was built for Linux."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False
    name = os.fsdecode(os.fspath(path))
    return any(name == place or name.startswith(place + "/") for place in GONE) and sees_macos()


def hook(event, args):
    """Refuse what there is not: files, functions of the C library, long paths of sockets."""
    if event in ("open", "os.listdir", "os.scandir", "os.chdir", "os.mkdir", "os.statvfs") and is_gone(args[0]):
        raise FileNotFoundError(2, "No such file or directory", args[0])
    if event == "ctypes.dlsym" and args[1] in NOT_IN_LIBC and sees_macos():
        raise AttributeError(f"dlsym(RTLD_DEFAULT, {args[1]}): symbol not found")
    if event == "ctypes.dlopen" and args[0] and ".so" in str(args[0]) and sees_macos():
        raise OSError(f"dlopen({args[0]}): no such file")
    if event in ("socket.bind", "socket.connect") and isinstance(args[1], (str, bytes)):
        name = os.fsencode(args[1])
        if len(name) > LONGEST or name.startswith(b"\0"):
            raise OSError("AF_UNIX path too long")


def without(function):
    """The function, for which the paths of Linux are not there."""

    @functools.wraps(function)
    def looked(path, *args, **kwargs):
        if is_gone(path):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *args, **kwargs)

    return looked


def refused_fork(fork):
    """os.fork, which a process that has torch does not survive."""

    def forked():
        if "torch" in sys.modules:
            raise RuntimeError("simulated macOS: this process has imported torch, and a fork of it would be ended")
        return fork()

    return forked


def limits(get, put):
    """getrlimit and setrlimit, for which nothing limits the number of open files."""

    def getrlimit(which):
        soft, hard = get(which)
        return (soft, INFINITY if which == resource.RLIMIT_NOFILE else hard)

    def setrlimit(which, pair):
        soft, hard = pair
        if which == resource.RLIMIT_NOFILE:
            real = get(which)[1]
            if soft > OPEN_MAX:
                raise ValueError("current limit exceeds maximum limit")
            soft, hard = min(soft, real), min(hard, real)
        put(which, (soft, hard))

    return getrlimit, setrlimit


def begin():
    """Take away what macOS has not."""
    for home, names in ABSENT:
        for name in names.split():
            if hasattr(home, name):
                delattr(home, name)
    for name in ("stat", "lstat", "access", "readlink", "statvfs"):
        setattr(os, name, without(getattr(os, name)))
    os.path.exists = lambda path: _looks(os.stat, path)
    os.path.lexists = lambda path: _looks(os.lstat, path)
    os.path.isdir = lambda path: _looks(os.stat, path) and (os.stat(path).st_mode & 0o170000) == 0o040000
    os.path.isfile = lambda path: _looks(os.stat, path) and (os.stat(path).st_mode & 0o170000) == 0o100000
    os.fork = refused_fork(os.fork)
    resource.RLIM_INFINITY = INFINITY
    resource.getrlimit, resource.setrlimit = limits(resource.getrlimit, resource.setrlimit)
    shutil.disk_usage = without(shutil.disk_usage)
    status, memory = psutil.Process.status, psutil.Process.memory_full_info
    psutil.Process.status = lambda self: psutil.STATUS_ZOMBIE if status(self) == "zombie" else psutil.STATUS_RUNNING

    def memory_full_info(self):
        if self.pid != os.getpid():
            raise psutil.AccessDenied(self.pid)
        return memory(self)

    psutil.Process.memory_full_info = memory_full_info
    multiprocessing.set_start_method("spawn")
    assert ctypes
    sys.addaudithook(hook)
    sys.__class__ = Sys


def _looks(look, path):
    try:
        look(path)
    except (OSError, ValueError):
        return False
    return True


begin()
