"""The warden of one cluster: forks its ranks, reaps them, says how each ended, and leaves nothing behind.

It is a fork of the zygote with a session of its own and a single thread; where a fork is not safe (system.py) it is
executed by the kernel, and executes its ranks. It obeys the notebook's kernel over one socket. The kernel is gone when
that socket ends, when its process ends or when that of the zygote does, which leaves with it; then the warden ends
every rank with all that the rank started. A rank also ends with the warden (on Linux by the parent-death signal, which
is why only this thread forks ranks: that signal follows the thread, not the process). What such a rank has started
falls to the zygote, which ends it; elsewhere the rank ends it with itself.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from labkit.comm.private import have
from labkit.launch import executed, system
from labkit.launch.rank_spec import RankSpec

LOOK_S = 0.5
"""Where the system does not tell when the kernel ends, the warden looks this often."""


class Ended(NamedTuple):
    """The end of a rank's process: its exit code or the signal that ended it, and words if memory ran out.

    `words` say what is known of a process that nobody here could reap. `by_engine` is True if the engine ended it, or
    started another in its place: then another rank is the reason."""

    rank: int
    pid: int
    code: int | None
    signal: str | None
    out_of_memory: str | None
    words: str = ""
    by_engine: bool = False

    def __str__(self) -> str:
        if self.words:
            return self.words
        if self.signal is None:
            return f"ended by itself with exit code {self.code} (os._exit?)"
        if self.out_of_memory:
            return f"was killed by {self.signal}: out of memory ({self.out_of_memory})"
        if self.signal == "SIGKILL":
            return "was killed by SIGKILL, cause unknown (if it was not you: dmesg tells of the out-of-memory killer)"
        return f"was killed by {self.signal}"


def main(fd: int, kernel_pid: int) -> None:
    """Run until the kernel closes the socket or is gone; never returns."""
    code = 1
    try:
        system.lead_session()
        system.adopt_orphans()  # those of ranks, so that we can end them
        Warden(Connection(fd), kernel_pid).serve()
        code = 0
    finally:
        os._exit(code)


class Warden:
    """Obeys the kernel over one connection: each message names one of the methods below and its arguments."""

    def __init__(self, kernel: Connection, kernel_pid: int):
        self.kernel, self.kernel_pid = kernel, kernel_pid
        self.parent_pid = os.getppid()  # the zygote's; the kernel's if this process was executed
        ends = system.end_of(kernel_pid), system.end_of(self.parent_pid)
        self.ends = [*ends[0], *ends[1]] if all(ends) else []
        self.ranks: dict[int, int] = {}  # pid -> rank
        self.oom_kills = _oom_kills()
        self.folder = ""
        # a death writes a byte into this pipe, which wakes `serve` at once; the handler of SIGCHLD itself does nothing
        self.wake, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.end())

    def serve(self) -> None:
        """Obey commands and report deaths for as long as the kernel lives; then end all ranks."""
        while self._kernel_lives():
            ready = wait([self.kernel, self.wake, *self.ends], None if self.ends else LOOK_S)
            if any(end in ready for end in self.ends):
                break
            if self.wake in ready:
                os.read(self.wake, 4096)
            self.reap()
            if self.kernel in ready:
                try:
                    verb, *args = self.kernel.recv()
                except (EOFError, OSError):
                    break
                getattr(self, verb)(*args)
        self.end()

    def _kernel_lives(self) -> bool:
        # the zygote leaves when the kernel does; end of file comes then, too, unless a fork of the kernel holds the
        # socket. If one of them ended before `ends` could be opened, this tells
        return os.getppid() == self.parent_pid and psutil.pid_exists(self.kernel_pid)

    def start(self, words: dict[str, Any]) -> None:
        """Fork one rank (or execute it afresh where its RankSpec asks for it), after importing what that names."""
        spec = RankSpec.read(words)
        try:
            if spec.fresh:
                pid = executed.child(__name__, "become_fresh", os.getpid(), known=words, cwd=spec.cwd)
            else:
                for name in spec.imports:
                    if not name.startswith("torch.") or have(name):
                        importlib.import_module(name)
                gc.freeze()  # as in the zygote: the collector must not write into pages that the ranks share
                pid = os.fork()
                if pid == 0:
                    self._become(spec)
        except OSError as error:  # no process left, or no memory for one
            return self.tell("refused", spec.rank, str(error))
        self.ranks[pid] = spec.rank
        self.tell("started", spec.rank, pid)

    def _become(self, spec: RankSpec) -> None:
        try:
            signal.set_wakeup_fd(-1)
            for sig in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
                signal.signal(sig, signal.SIG_DFL)
            for fd in (self.wake, *self.ends):
                os.close(fd)
            self.kernel.close()
            enter_rank(os.getppid())
            importlib.import_module(spec.module).main(spec)
        finally:
            os._exit(1)

    def signal(self, pids: list[int], number: int) -> None:
        """Send a signal to ranks. Only we reap them, so a process id here cannot have been given to another."""
        for pid in pids:
            if pid in self.ranks:
                os.kill(pid, number)
        self.tell("signalled")

    def kill(self, pids: list[int]) -> None:
        """End ranks with everything that they started."""
        for pid in pids:
            if pid in self.ranks:
                _end_tree(pid)

    def reap(self) -> None:
        """Collect every process that has ended, and tell the kernel how each rank ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            rank = self.ranks.pop(pid, None)
            if rank is None:  # an orphan of a rank that fell to us
                continue
            _kill_group(pid)
            code = os.waitstatus_to_exitcode(status)
            name = signal.Signals(-code).name if code < 0 else None
            self.tell("ended", Ended(rank, pid, code if code >= 0 else None, name, self._out_of_memory(name)))

    def _out_of_memory(self, name: str | None) -> str | None:
        before, self.oom_kills = self.oom_kills, _oom_kills()
        if name == "SIGKILL" and before is not None and self.oom_kills is not None and self.oom_kills > before:
            return f"the memory control group counts oom_kill {before} -> {self.oom_kills}"
        return None

    def keep(self, folder: str) -> None:
        """Remember the cluster's private folder, which is removed at the end even if the kernel cannot do it."""
        self.folder = folder

    def tell(self, *message: Any) -> None:
        """Send a message to the kernel, if it is still there."""
        try:
            self.kernel.send(message)
        except OSError:  # the kernel has gone; the loop will see it
            return

    def end(self) -> None:
        """End all ranks, their process groups, and whatever else descends from them; then leave."""
        me = psutil.Process()
        for _ in range(3):  # a process may be born while we look
            children = me.children(recursive=True)
            if not children:
                break
            for pid in self.ranks:
                _kill_group(pid)
            for child in children:
                _kill(child.pid)
            psutil.wait_procs(children, timeout=1)
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)


def enter_rank(warden_pid: int) -> None:
    """First thing in a rank: a session of its own, and death with the warden."""
    system.lead_session()
    system.end_with(warden_pid)


def become_fresh(warden_pid: int) -> None:
    """The life of a rank that was executed."""
    enter_rank(warden_pid)
    spec = RankSpec.read(executed.known_here())
    importlib.import_module(spec.module).main(spec)


def _end_tree(pid: int) -> None:
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    _kill_group(pid)
    for process in below:
        _kill(process.pid)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _oom_kills() -> int | None:
    """The number of processes of our memory control group that Linux killed for want of memory; None if unknown."""
    try:
        line = next(x for x in Path("/proc/self/cgroup").read_text().splitlines() if x.startswith("0::"))
        events = Path("/sys/fs/cgroup" + line[3:]) / "memory.events"
        return int(dict(row.split() for row in events.read_text().splitlines())["oom_kill"])
    except (OSError, StopIteration, KeyError, ValueError):
        return None
