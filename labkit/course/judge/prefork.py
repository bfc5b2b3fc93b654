"""The prefork server: a process that has imported the judge once, and forks a judge for each attempt.

    kernel ──exec──> zygote ──fork──> prefork server ──fork──> judge of one attempt
                                                     ──fork──> nursery ──fork──> ranks of one case
    kernel ──exec──> prefork server, which judges itself ──exec──> ranks of one case        where a fork is not safe

It is a fork of the same zygote that clusters are forked from (labkit/launch/zygote.py), so it has torch from the start,
and it runs nothing of a learner's: a check begins in milliseconds, with a library as it was installed. When the kernel
ends, or the stop button is pressed, the judge and its ranks go with it: each ends with its parent.

    report = prefork_server().judge("03.2", attempt)
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import signal
import socket
import threading
import time
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import psutil

from labkit.course.judge import late_imports
from labkit.course.judge.wall_trials import Wall, examined, missing
from labkit.launch import system
from labkit.launch.reply import Stopped
from labkit.launch.zygote import zygote

if TYPE_CHECKING:
    from labkit.course.judge.attempt import Attempt
    from labkit.course.judge.nursery import Nursery
    from labkit.course.judge.report import Report

QUIET_S = 3.0
"""The seconds without a check after which the server imports what a later one may need (late_imports.py)."""
MOST_S = 600.0
"""No check takes so long, on a machine with much else to do neither; one that does has a mistake in it that is ours."""


class PreforkServer:
    """The prefork server as the kernel sees it. Its process is asked for at once, and ready when it has imported the
    judge. `line` is a socket to a process that is a server already (classroom/bubble.py)."""

    def __init__(self, line: socket.socket | None = None) -> None:
        self.lock, self.numbers = threading.Lock(), itertools.count()
        self.connection = Connection((line or zygote().fork("labkit.course.judge.prefork")).detach())

    @functools.cached_property
    def pid(self) -> int:
        """The server's process id, which is the first thing that it says. RuntimeError if it has ended before."""
        return int(self._received()["pid"])

    def judge(self, key: str, attempt: Attempt, seed: int | None = None) -> Report:
        """The report on an attempt. KeyboardInterrupt ends the check; RuntimeError if the judge itself fails."""
        from labkit.course.judge.report import Report  # not before the server is asked for: it loads slowly

        request = {"key": key, "source": attempt.source, "before": attempt.before, "seed": seed}
        reply = self._replied(request, f"Stopped before {key} was judged. Nothing of this attempt counts.")
        if "failed" in reply:
            raise RuntimeError(f"the judge itself failed on {key}:\n{reply['failed']}")
        return Report.of_dict(reply)

    def walls(self) -> tuple[Wall, ...]:
        """The kernel's walls around an attempt, which a confined process has tried, one by one."""
        reply = self._replied({}, "Stopped before the walls around an attempt were tried.")
        return tuple(Wall(*wall) for wall in reply["walls"])

    def _replied(self, request: dict[str, Any], stopped: str) -> dict[str, Any]:
        with self.lock:
            try:
                return self._ask({**request, "number": next(self.numbers)})
            except BaseException as error:
                self.close()  # whatever was under way; the next check begins with a new one
                if isinstance(error, KeyboardInterrupt):
                    raise Stopped(stopped) from None
                raise

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.pid  # its greeting is received before any reply
        with contextlib.suppress(BrokenPipeError):  # then there is no reply, which is told below
            _send(self.connection, request)
        while True:
            reply = self._received()
            if reply.pop("number") == request["number"]:  # a judge that reports and then dies is told of twice
                return reply

    def _received(self) -> dict[str, Any]:
        until = time.monotonic() + MOST_S
        try:
            while not self.connection.poll(0.5):
                if time.monotonic() > until:
                    raise RuntimeError(f"the judge has said nothing for {MOST_S:g} s: this is a mistake of labkit")
            message: dict[str, Any] = json.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise RuntimeError("the process that judges has ended: is torch installed?") from None
        return message

    def alive(self) -> bool:
        """True if the server can be asked: it is under way, or its process runs."""
        if self.connection.closed:
            return False
        if "pid" not in self.__dict__ and not self.connection.poll():
            return zygote().alive()  # it is not forked yet
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, RuntimeError):
            return False

    def close(self) -> None:
        """End the server's process, and the check that is under way."""
        if self.connection.closed:
            return
        with contextlib.suppress(RuntimeError):
            pid = self.pid if "pid" in self.__dict__ or self.connection.poll() else None
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.killpg(pid, signal.SIGKILL)
        self.connection.close()  # one that is not forked yet finds it closed, and ends


def prefork_server() -> PreforkServer:
    """This process's prefork server: started at the first call, warm from then on."""
    ours = _server_of(os.getpid())
    if not ours.alive():
        _server_of.cache_clear()
        ours = _server_of(os.getpid())
    return ours


@functools.lru_cache(maxsize=1)
def _server_of(pid: int) -> PreforkServer:  # by process id: a fork must not use its parent's
    return PreforkServer()


def main(fd: int, kernel_pid: int) -> None:
    """The server's own life, in a fork of the zygote: each message is an attempt, and its report is sent back."""
    system.end_with(os.getppid())  # the zygote, which ends with the kernel; or the kernel itself
    system.lead_session()  # whoever ends this process's group ends all ranks, and nobody else
    # As file descriptor 1 the connection is closed in every rank (sandboxed_rank.py), so no attempt can write a report.
    os.dup2(fd, 1)
    os.close(fd)
    kernel = Connection(1)
    _send(kernel, {"pid": os.getpid()})
    from labkit.course.judge.nursery import Nursery  # it imports what ranks need, and no exercise

    origin = Nursery.forked() if system.forks() else None  # before anything of a judge is here
    importlib.import_module("labkit.course.judge.judge")
    standing = examined()
    notes = [gap] if (gap := missing(standing)) else []
    quiet_since = time.monotonic()
    with contextlib.suppress(EOFError, ConnectionError):
        while psutil.pid_exists(kernel_pid):
            if not kernel.poll(0.5):
                if system.forks() and not late_imports.here() and time.monotonic() - quiet_since > QUIET_S:
                    _fetch(origin)
                continue
            request = json.loads(kernel.recv_bytes())
            if "source" in request:
                _serve(kernel, origin, request, notes)
                notes = []  # said once
            else:
                _send(kernel, {"number": request["number"], "walls": standing})
            quiet_since = time.monotonic()
    os._exit(0)


def _fetch(origin: Nursery | None) -> None:
    """Import what torch imports late, here and where ranks come from: so that whoever has it knows that both do."""
    if origin is not None:
        origin.fetch()
    late_imports.fetch()


def _serve(kernel: Connection, origin: Nursery | None, request: dict[str, Any], notes: list[str]) -> None:
    """Judge one attempt in a fork, and wait for its end. `notes` are added to its report.

    Where a fork is not safe this process judges itself: nothing of an attempt runs in it, and each rank is executed."""
    from labkit.course.judge import walls

    if origin is None:
        return _send(kernel, {"number": request["number"], **_judged_here(request, notes)})
    server_pid = os.getpid()
    judge_pid = os.fork()
    if judge_pid == 0:
        system.end_with(server_pid)
        walls.shelter()
        late_imports.raise_at_compiler()
        try:
            reply = _judged(origin, request, notes)
        except late_imports.Late:
            os._exit(late_imports.ENDED)
        with contextlib.suppress(BrokenPipeError):
            _send(kernel, {"number": request["number"], **reply})
        os._exit(0)
    _, status = os.waitpid(judge_pid, 0)
    if os.waitstatus_to_exitcode(status) == late_imports.ENDED:
        _fetch(origin)
        _serve(kernel, origin, request, notes)
    elif status:
        failure = f"the judge ended with {os.waitstatus_to_exitcode(status)}"
        _send(kernel, {"number": request["number"], "failed": failure})


def _judged_here(request: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    try:
        return _judged(None, request, notes)
    except late_imports.Late:  # from now on the ranks import it at their start
        late_imports.fetch()
        return _judged(None, request, notes)


def _judged(origin: Nursery | None, request: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    from labkit.course.exercises.catalogue import problem
    from labkit.course.judge.case_run import run_from
    from labkit.course.judge.judge import judge

    try:
        it = problem(request["key"])
        run = functools.partial(run_from, origin)
        report = judge(it, request["source"], request["before"], request["seed"], run=run)
        return replace(report, notes=(*report.notes, *notes)).as_dict()
    except late_imports.Late:
        raise
    except BaseException:
        return {"failed": traceback.format_exc()}


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())
