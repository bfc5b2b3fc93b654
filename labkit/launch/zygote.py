"""The zygote: a process that has imported torch once and forks what needs torch at once: a warden for each cluster.

It is started (executed, never forked) from the kernel, stays single-threaded, creates no ZeroMQ context and never
touches CUDA, so everything forked from it is as good as fresh, a hundred times sooner:

    kernel ──exec──> zygote ──fork──> warden of cluster A ──fork──> ranks 0..n-1
                            ──fork──> warden of cluster B ──fork──> ranks 0..n-1

Where a fork is not safe (system.py), nothing is forked: the zygote says what this torch is and ends, and whatever would
be its fork is executed afresh by the kernel itself. A warden needs no torch and is there in a fifth of a second; each
rank imports torch anew.

It lives as long as the kernel: when the kernel's end of the socket closes, or its process ends, so does the zygote;
each warden watches the kernel in the same way. A warden that is killed takes its ranks along; what those have started
then falls to the zygote, which ends it. Nothing is looked at now and then: an idle zygote sleeps.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from typing import Any, NamedTuple

from labkit.comm.libraries import within
from labkit.comm.private import UntriedTorch, absent, warn_if_untried, was_tried
from labkit.launch import system
from labkit.launch.executed import execute
from labkit.launch.progress import REDRAW_S, WaitBar

PINNED = (("OMP_NUM_THREADS", "1"), ("MKL_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1"))
"""Thread pools must not exist when ranks are forked; each rank sets its own number of threads afterwards."""

FIRST = ("torch", "torch.distributed", "cloudpickle", "zmq", "psutil", "labkit.launch.warden", "labkit.launch.worker")
LATER = ("numpy", "sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo", "torch.distributed.optim")
"""Modules that most ranks need later (the first optimizer imports torch._dynamo): imported when there is time."""

LOOK_S = 0.5
"""Where the system does not tell when the kernel ends, or imports are left to be done, the zygote looks this often."""
QUIET_S, NEXT_S = 8.0, 1.0
"""The seconds without a request for a cluster after which those imports go on: at first, and after a cluster. An import
cannot be broken off, so a cluster would have to wait for it; but each later rank saves the time of what is imported by
then."""


GONE_S = 0.5
"""Seconds that the kernel waits for a process that was killed to end."""


class Gone(RuntimeError):
    """The process that forks wardens has ended, or the warden of a cluster. A new cluster gets fresh ones."""


class Hello(NamedTuple):
    """The zygote's greeting, which it sends when torch is imported. `cuda` and `hip` are the versions of CUDA and of
    ROCm's HIP that this torch was built for; "" if for none."""

    pid: int
    torch: str
    absent: tuple[str, ...]
    cuda: str
    hip: str
    can_fork: bool


class Zygote:
    """The kernel's handle. `ready()` waits for the imports; `warden()` and `fork()` give a socket to a new process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.process = self._execute("labkit.launch.zygote", theirs)
        theirs.close()
        self.socket = ours
        self.hello: Hello | None = None

    def ready(self, timeout_s: float = 300.0) -> Hello:
        """Wait until torch is imported. RuntimeError if that fails, with the reason on the kernel's stderr; Gone if the
        process was killed."""
        if self.hello is None:
            deadline = time.monotonic() + timeout_s
            with WaitBar("fetching torch for the ranks") as bar:
                while not select.select([self.socket], [], [], REDRAW_S)[0]:
                    if time.monotonic() > deadline:
                        raise RuntimeError(
                            f"the process that imports torch for all ranks is not ready after {timeout_s:g} s"
                        )
                    bar.look()
            data = self.socket.recv(65536)
            if not data:
                code = self.process.wait(5)
                if code < 0:
                    raise Gone(f"the process that imports torch for all ranks was killed by signal {-code}")
                raise RuntimeError(f"the process that imports torch for all ranks ended ({code}): is torch installed?")
            self.hello = pickle.loads(data)
            warn_if_untried(self.hello.torch, self.hello.absent)
        return self.hello

    def warden(self) -> socket.socket:
        """Fork a warden; its end of this socket carries the commands, and its end of file ends the cluster. Gone if
        this process has ended."""
        self.ready()
        try:
            return self.fork("labkit.launch.warden")
        except OSError as error:
            raise Gone(f"the process that forks wardens is gone ({error})") from None

    def settle(self) -> None:
        """Give the process a moment to end, if it was killed: until it has, `zygote` takes it for alive."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GONE_S)

    def fork(self, module: str) -> socket.socket:
        """Fork a process that runs `main(fd, kernel_pid)` of this module as soon as the zygote is warm, and return the
        other end of its socket at once. That function must end its process: it never returns. Where a fork is not safe
        the process is executed afresh."""
        ours, theirs = socket.socketpair()
        with theirs:
            if system.forks():
                socket.send_fds(self.socket, [module.encode()], [theirs.fileno()])
            else:
                process = self._execute(module, theirs)
                threading.Thread(target=process.wait, name="labkit-reaper", daemon=True).start()
        return ours

    @staticmethod
    def _execute(module: str, theirs: socket.socket) -> subprocess.Popen:
        return execute(
            module, "main", theirs.fileno(), os.getpid(), keep=(theirs.fileno(),),
            start_new_session=True,  # the kernel's signals go to its whole process group; not to us
            env={**os.environ, **dict(PINNED)},
        )  # fmt: skip

    def alive(self) -> bool:
        """True while its process runs, or has done all that is asked of it."""
        return self.process.poll() is None or (self.process.returncode == 0 and not system.forks())

    def close(self) -> None:
        """End the zygote. Its wardens notice that their parent has changed, and end their ranks."""
        self.socket.close()
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def zygote() -> Zygote:
    """This kernel's zygote: started at the first call, warm from then on."""
    ours = _zygote_of(os.getpid())
    if not ours.alive():
        ours.close()
        _zygote_of.cache_clear()
        ours = _zygote_of(os.getpid())
    return ours


@functools.lru_cache(maxsize=1)
def _zygote_of(pid: int) -> Zygote:  # by process id: a fork of the kernel must not use its parent's
    return Zygote()


def main(fd: int, kernel_pid: int) -> None:
    """The zygote's own life."""
    for sig in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    connection = socket.socket(fileno=fd)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntriedTorch)  # the kernel tells it, where it is seen
        for name in FIRST:
            importlib.import_module(name)
    within(__file__)  # where libraries lie is found once, for all ranks
    torch: Any = sys.modules["torch"]
    version = str(torch.__version__)
    lacking = () if was_tried(version) else absent()
    cuda, hip = torch.version.cuda or "", torch.version.hip or ""
    hello = Hello(os.getpid(), version, lacking, cuda, hip, system.forks())
    connection.send(pickle.dumps(hello))
    if not system.forks():
        return
    system.adopt_orphans()
    ends, forks = system.end_of(kernel_pid), set[int]()
    deaths, wake = os.pipe()  # a death writes a byte into it, which wakes us at once
    for fd in (deaths, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    later, quiet_since, quiet_s = list(LATER), time.monotonic(), QUIET_S
    while os.getppid() == kernel_pid:
        wait_s = None if ends and not later else LOOK_S
        readable, _, _ = select.select([connection.fileno(), deaths, *ends], [], [], wait_s)
        if any(end in readable for end in ends):
            return
        if deaths in readable:
            os.read(deaths, 4096)
        _reap(forks)
        if connection.fileno() not in readable:
            if later and time.monotonic() - quiet_since > quiet_s:
                _warm(later.pop(0))
            continue
        quiet_since, quiet_s = time.monotonic(), NEXT_S
        try:
            module, fds, _, _ = socket.recv_fds(connection, 256, 4)
        except ConnectionError:  # the kernel has ended without reading our greeting
            return
        if not module:
            return
        # The trick of the whole launcher: a fork copies no memory, so the warden has torch imported at once. It is safe
        # because this process has one thread and holds no lock, no ZeroMQ context and no CUDA context that would be
        # copied in the middle of something. The collector writes into every object that it looks at, which would copy
        # the page; freeze() takes the objects of imported code out of its sight, so that their pages stay shared.
        gc.collect()
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            for fd in (deaths, wake, *ends):
                os.close(fd)
            importlib.import_module(module.decode()).main(fds[0], kernel_pid)
        forks.add(pid)
        for fd in fds:  # a copy left open here would keep the end of file from the other end
            os.close(fd)


def _warm(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError:  # an optional part of torch; ranks will meet the same error if they need it
        return


def _reap(forks: set[int]) -> None:
    """Collect what has ended, and end what it has left: children that are none of our own `forks` are orphans of a
    warden that was killed, or of its ranks. Each end of one brings its own children to us, and us here again."""
    ended = False
    try:
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            forks.discard(pid)
            ended = True
    except ChildProcessError:
        return
    for orphan in system.children() - forks if ended else ():
        os.kill(orphan, signal.SIGKILL)  # it is there until we reap it
