"""The nursery: the process from which ranks come. It has torch and what a rank runs, and nothing of any exercise.

    judge ──the part, the program──> nursery ──fork──> parent of one run ──fork──> rank 0, rank 1, ...
      └──────────── one pipe to each rank, made by the judge: inputs, messages, answers ────────────┘

The judge holds references, seeds, all inputs and answers. Were ranks its forks, they would hold copies of all of it,
and a program that gets round Python's guards would find them. So they are forks of a process that was never told. Of
an exercise they get its `Part`, a text; everything else stays on the judge's side of the pipes.

    ranks = nursery().ranks(part, program, ends)     their processes: `.pids`, `.how(rank)`, `.stack(rank)`, `.end()`

The parent of a run is told to end its ranks, or finds its own line closed: then it ends them, too.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from labkit.course.judge import late_imports
from labkit.course.judge.page_memory import return_at_once, trim
from labkit.course.judge.sandbox import Fingerprint, fingerprint
from labkit.course.judge.sandboxed_rank import Part, Program, become_rank, player_of
from labkit.course.judge.static_check import MODULES
from labkit.launch import system
from labkit.launch.zygote import zygote

RANKS, FETCH = b"r", b"f"
MOST_DESCRIPTORS = 253
"""The most that one message can carry (unix(7))."""
LOOKS, LOOK_S = 50, 0.01
"""How often, and how far apart, a rank whose pipe is closed is asked whether it has ended."""
PLAYED_WITH = ("labkit", "labkit.comm.mesh", "labkit.parallel.tensor", "labkit.train.lora", "labkit.plan.model.shape")
"""What parts of exercises import, fetched once for all of them; a part that needs more fetches it itself."""


class Processes(Protocol):
    """The processes of one run, as the judge sees them."""

    pids: list[int]

    def how(self, rank: int) -> int | None:
        """The exit code of a rank whose pipe is closed, minus the number of a signal; None if it has not ended."""

    def stack(self, rank: int) -> None:
        """Ask a rank for its stack, which comes out of its second pipe."""

    def end(self) -> None:
        """End all of them, and return when they are gone."""


class BornRanks:
    """Ranks whose parent is a fork of the nursery. The judge may not send signals to them (walls.shelter): it asks."""

    def __init__(self, line: Connection):
        self.line = line
        reply = line.recv()
        if isinstance(reply, str):
            raise RuntimeError(f"the part of an exercise that plays an attempt cannot be loaded:\n{reply}")
        self.pids: list[int] = reply

    def how(self, rank: int) -> int | None:
        """The exit code of a rank whose pipe is closed; None if it has not ended."""
        self.line.send(("how", rank))
        code: int | None = self.line.recv()
        return code

    def stack(self, rank: int) -> None:
        """Ask a rank for its stack."""
        self.line.send(("stack", rank))

    def end(self) -> None:
        """End all of them, and return when they are gone."""
        with contextlib.suppress(EOFError, ConnectionError):  # the parent has gone, and its ranks with it
            self.line.send(("end", 0))
            self.line.recv()
        self.line.close()


class Nursery:
    """The nursery as a judge sees it: the other end of its socket."""

    def __init__(self, line: socket.socket):
        self.line = line

    @classmethod
    def forked(cls) -> Nursery:
        """A nursery that is a fork of this process, which must have nothing of an exercise yet, and one thread."""
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        if os.fork() == 0:
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd > 2 and fd != theirs.fileno():
                    with contextlib.suppress(OSError):  # the listing itself is over
                        os.close(fd)
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 1)  # the prefork server's line to the kernel
            main(theirs.fileno(), parent)
        theirs.close()
        return cls(ours)

    def fetch(self) -> None:
        """Have it import what torch imports late, before the next run."""
        self.line.sendall(FETCH)

    def ranks(self, part: Part, program: Program, ends: Sequence[tuple[int, int]]) -> BornRanks:
        """Ranks of a new run. `ends` has two descriptors for each: of its pipe to the judge, and of the pipe for its
        stack. RuntimeError if the nursery has ended, or the part cannot be loaded."""
        ours, theirs = socket.socketpair()
        line = Connection(ours.detach())
        with theirs:
            socket.send_fds(self.line, [RANKS], [theirs.fileno(), *(fd for pair in ends for fd in pair)])
        try:
            line.send((part, program))
            return BornRanks(line)
        except (EOFError, ConnectionError):
            raise RuntimeError("the process that ranks of a check come from has ended") from None

    def alive(self) -> bool:
        """True if its process listens: it says nothing of its own, so whatever can be read is the end."""
        try:
            self.line.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


def nursery() -> Nursery:
    """This process's nursery, which is started at the first call: for judges that are not forks of the prefork
    server, such as tests."""
    ours = _nursery_of(os.getpid())
    if not ours.alive():
        _nursery_of.cache_clear()
        ours = _nursery_of(os.getpid())
    return ours


@functools.lru_cache(maxsize=1)
def _nursery_of(pid: int) -> Nursery:  # by process id: a fork must not use its parent's
    return Nursery(zygote().fork("labkit.course.judge.nursery"))


def main(fd: int, kernel_pid: int) -> None:
    """The nursery's own life: each message is a run, whose parent it forks. It ends when the other end of `fd` is
    closed. The kernel's end closes it, so its process id is not asked for."""
    system.end_with(os.getppid())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the parents of runs that are over
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = socket.socket(fileno=fd)
    for name in (*sorted(MODULES), *PLAYED_WITH):
        importlib.import_module(name)
    known = _settled()
    while True:
        word, fds, _, _ = socket.recv_fds(line, 1, MOST_DESCRIPTORS)
        if not word:
            os._exit(0)
        if word == FETCH:
            if not late_imports.here():
                late_imports.fetch()
                known = _settled()
            continue
        nursery_pid = os.getpid()
        if os.fork() == 0:
            line.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            system.end_with(nursery_pid)
            _be_parent(Connection(fds[0]), list(zip(fds[1::2], fds[2::2], strict=True)), known)
        for end in fds:
            os.close(end)


def _settled() -> Fingerprint:
    """Take what is imported out of the collector's sight, and return its fingerprint. This is done once for all runs,
    since it takes a tenth of a second; and a collection would write into pages that are shared with all ranks."""
    gc.collect()
    gc.freeze()
    return fingerprint()


def _be_parent(line: Connection, ends: list[tuple[int, int]], known: Fingerprint) -> None:
    """The life of the parent of one run, which never returns."""
    codes: dict[int, int | None] = {}
    try:
        part, program = line.recv()
        codes |= dict.fromkeys(_born(part, program, ends, known))
        line.send(list(codes))
        _obey(line, codes)
    except (EOFError, ConnectionError):  # the judge is gone
        end_all(codes)
    except BaseException:
        end_all(codes)
        with contextlib.suppress(OSError):
            line.send(traceback.format_exc())
    os._exit(0)


def _born(part: Part, program: Program, ends: list[tuple[int, int]], known: Fingerprint) -> list[int]:
    return_at_once()  # or free places of large blocks are inherited, which nobody gives back
    play = player_of(part)
    labkit: Any = sys.modules["labkit"]
    for name in part.imports:  # its front door imports what is asked for, which nobody can behind the walls
        getattr(labkit, name, None)
    parent, pids = os.getpid(), list[int]()
    trim()
    for rank, (pipe, dump) in enumerate(ends):
        pid = os.fork()
        if pid == 0:
            become_rank(Connection(pipe), part, play, program, rank, len(ends), parent, dump, known)
        pids.append(pid)
    for pair in ends:
        for fd in pair:
            os.close(fd)
    return pids


def _obey(line: Connection, codes: dict[int, int | None]) -> None:
    pids = list(codes)
    while True:
        word, rank = line.recv()
        if word == "end":
            end_all(codes)
            return line.send("ended")
        if word == "stack" and codes[pids[rank]] is None:
            os.kill(pids[rank], signal.SIGUSR1)
        if word == "how":
            line.send(exit_code(codes, pids[rank]))


def exit_code(codes: dict[int, int | None], pid: int) -> int | None:
    """How a child of this process whose pipe is closed has ended: its exit code, or minus the number of a signal; None
    if it goes on. `codes` has those that are known, by process id: the number of a child that was waited for may be
    another process's by now."""
    for _ in range(LOOKS):  # its pipe is closed a moment before it has ended
        if codes[pid] is not None:
            break
        ended, status = os.waitpid(pid, os.WNOHANG)
        codes[pid] = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0 if ended else LOOK_S)
    return codes[pid]


def end_all(codes: dict[int, int | None]) -> None:
    """End those children of this process whose end is not known, and wait for them."""
    going = [pid for pid, code in codes.items() if code is None]
    for pid in going:
        os.kill(pid, signal.SIGKILL)
    for pid in going:
        codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
