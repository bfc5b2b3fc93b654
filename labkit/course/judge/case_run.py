"""A case run: one attempt on one case. Starts the ranks, hands out inputs, collects results, ends every process.

    start ranks ─> draw inputs ─> each rank gets its own ─> switch ─> outputs, memory, faults ─> RunRecord

A run ends when every rank has reported, when no rank can go on (a deadlock, noticed at once), or when its time is up.
Each rank is then asked for its stack. Ranks are ended by their process ids, whatever they are doing.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import psutil
import torch

from labkit.course.exercises.problem import Problem
from labkit.course.judge import late_imports
from labkit.course.judge.case import Case
from labkit.course.judge.judge_wire import ATTEMPT
from labkit.course.judge.page_memory import Outside, return_at_once, trim
from labkit.course.judge.run_record import Fault, Memory, RunRecord, Wait
from labkit.course.judge.sandbox import fingerprint
from labkit.course.judge.sandboxed_rank import Program, become_rank
from labkit.course.judge.switch import Flood, Switch
from labkit.launch import executed, system

RunCase = Callable[[Problem, Program, Case], RunRecord]
PATIENCE_S = 0.3
"""After a rank has raised, the others get this long to report their own errors, and longer while they are computing."""
LOOKS, LOOK_S = 10, 0.03
"""How often, and how far apart, ranks are looked at before they count as idle."""
AT_WORK = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
"""A rank in one of these states may only be slow: it waits for a processor, or for a page of memory."""
OFTEN_S = 0.05
"""Seconds between two looks at whether the run has gone on for too long."""
LATEST = 20
"""A run ends after this many times the limit of its problem, whatever its ranks are doing."""
BURNING_S = 1.0
"""After a rank has raised, a rank that has computed for this much processor time is not waited for."""


def run_case(problem: Problem, program: Program, case: Case) -> RunRecord:
    """Run an attempt on one case and record what happened."""
    late_imports.fetch()
    return run_with_what_is_here(problem, program, case)


def run_with_what_is_here(problem: Problem, program: Program, case: Case) -> RunRecord:
    """The same without any import before. `Late` if a rank needs one and torch's compiler is not here yet."""
    began = time.perf_counter()
    with Ranks(problem, program, case.n_ranks) as ranks:
        inputs = list(problem.inputs(case))
        ended = ranks.run([tuple(args) for args in inputs])
        switch, stacks = ranks.switch, ranks.stacks() if ended == "time-out" else {}
    return RunRecord(
        case=case,
        events=tuple(switch.events),
        outputs=tuple(_output(switch.last.get(rank)) for rank in range(case.n_ranks)),
        expected=tuple(problem.answer(case, inputs)),
        memory=tuple(_memory(switch.last.get(rank), ranks.outside, rank) for rank in range(case.n_ranks)),
        faults=ranks.faults,
        ended=ended,
        waits={**stacks, **switch.waits()} if ended in ("deadlock", "time-out") else {},
        undelivered=switch.undelivered() if ended == "finished" else {},
        unanswered=switch.unanswered() if ended == "finished" else {},
        unwaited=switch.unwaited() if ended == "finished" else {},
        races=tuple(switch.races),
        flood=ranks.flood,
        mismatch=switch.mismatch,
        damaged={
            rank: damage for rank in range(case.n_ranks) if (damage := _told(switch.last.get(rank)).get("damaged"))
        },
        printed=tuple(switch.printed),
        input_bytes=tuple(_told(switch.last.get(rank)).get("input_bytes", 0) for rank in range(case.n_ranks)),
        seconds=time.perf_counter() - began,
    )


def remembering() -> RunCase:
    """A `run_case` that keeps its records: a program runs once on a case, however many mutants are compared with it."""
    known: dict[Any, RunRecord] = {}

    def run(problem: Problem, program: Program, case: Case) -> RunRecord:
        key = (problem.key, program, str(case), case.seed)
        if key not in known:
            known[key] = run_case(problem, program, case)
        return known[key]

    return run


class Ranks:
    """Fresh processes, one for each rank, which live as long as this context."""

    def __init__(self, problem: Problem, program: Program, n_ranks: int):
        self.problem, self.program, self.n_ranks = problem, program, n_ranks
        self.pids: list[int] = []
        self.lines: list[Connection] = []
        self.dumps: list[int] = []
        self.spent_before: list[float] = []
        self.faults: dict[int, Fault] = {}
        self.flood = ""

    def __enter__(self) -> Ranks:
        return_at_once()  # or free places of large blocks are inherited, which nobody gives back
        trim()
        start = self._forking() if system.forks() else self._execute
        for rank in range(self.n_ranks):
            ours, theirs = Pipe()
            read, write = os.pipe()
            pid = start(rank, ours, theirs, read, write)
            theirs.close()
            os.close(write)
            self.pids.append(pid)
            self.lines.append(ours)
            self.dumps.append(read)
        if not system.forks():
            self._await()
        self.spent_before = [self._spent(pid) for pid in self.pids]
        self.outside = Outside(self.pids)
        self.switch = Switch(self.lines, self.outside.look)
        return self

    def _forking(self) -> Callable[[int, Connection, Connection, int, int], int]:
        parent, known = os.getpid(), fingerprint()  # once for all of them

        def fork(rank: int, ours: Connection, theirs: Connection, read: int, write: int) -> int:
            pid = os.fork()
            if pid == 0:
                for fd in (ours.fileno(), read, *(line.fileno() for line in self.lines), *self.dumps):
                    os.close(fd)
                become_rank(theirs, self.problem, self.program, rank, self.n_ranks, parent, write, known)
            return pid

        return fork

    def _execute(self, rank: int, ours: Connection, theirs: Connection, read: int, write: int) -> int:
        keep = theirs.fileno(), write
        known = self.problem.key, tuple(self.program), rank, self.n_ranks, late_imports.here()
        return executed.child("labkit.course.judge.executed_rank", "main", *keep, os.getpid(), keep=keep, known=known)

    def _await(self) -> None:
        for line in self.lines:
            with contextlib.suppress(EOFError, ConnectionError):  # it has ended, which is told when it is listened to
                line.recv_bytes()

    @staticmethod
    def _spent(pid: int) -> float:
        """Seconds of processor time of this process."""
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def __exit__(self, *_: object) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for line in self.lines:
            line.close()
        for fd in self.dumps:
            os.close(fd)

    def run(self, inputs: Sequence[tuple[Any, ...]]) -> str:
        """Hand out the inputs and wait. Returns how the run ended: "finished", "raised", "deadlock", "time-out" or
        "flood"."""
        for line, args in zip(self.lines, inputs, strict=True):
            with contextlib.suppress(BrokenPipeError):
                line.send_bytes(pickle.dumps(args))
        running = {line: rank for rank, line in enumerate(self.lines)}
        deadline = time.monotonic() + self.problem.timeout_s
        latest = time.monotonic() + LATEST * self.problem.timeout_s
        look, judged = 0.0, 0.0
        while running:
            tick = self.outside.tick_s()
            for line in [ready for ready in wait(list(running), timeout=tick) if isinstance(ready, Connection)]:
                self._take(line, running)
            if self.flood:
                return "flood"
            if time.monotonic() > look:
                look = time.monotonic() + self.outside.tick_s()
                for rank in running.values():
                    self.outside.look(rank)
            if self.switch.stuck:
                return "raised" if self.faults else "deadlock"
            if self.faults and time.monotonic() < deadline:
                deadline = min(deadline, time.monotonic() + PATIENCE_S)
            now = time.monotonic()
            if now < judged:  # what follows asks the system about every rank, which takes longer
                continue
            judged = now + OFTEN_S
            if running and (
                self._burning(running.values()) or now > latest or (now > deadline and self._idle(running))
            ):
                return "raised" if self.faults else "time-out"
        return "raised" if self.faults else "finished"

    def _take(self, line: Connection, running: dict[Connection, int]) -> None:
        rank = running[line]
        try:
            if not self.switch.take(rank):
                return
            head, _ = self.switch.last[rank]
            if head[0] == "failed":
                self.faults[rank] = Fault(*head[1:])
        except late_imports.Late:
            raise
        except Flood as flood:
            self.flood = str(flood)
        except Exception as error:  # the rank is gone, or it has sent something that makes no sense
            self.switch.last[rank] = (["failed"], b"")
            self.faults[rank] = Fault("Ended", f"the process is gone ({self._how(rank)}; {type(error).__name__})", 0)
        del running[line]

    def _how(self, rank: int) -> str:
        pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
        if not pid:
            return "it said what a rank cannot say"
        code = os.waitstatus_to_exitcode(status)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _burning(self, ranks: Any) -> bool:
        """True if a rank has used too much processor time: this finds an endless loop even on a busy machine."""
        limit = (
            BURNING_S if self.faults else 1.5 * self.problem.timeout_s
        )  # a slow machine may compute three times as long
        return any(self._spent(self.pids[rank]) - self.spent_before[rank] > limit for rank in ranks)

    def _idle(self, running: dict[Connection, int]) -> bool:
        """True if no rank computes and none has sent anything, in LOOKS looks one after the other.

        One look is not enough, since a rank that computes also waits now and then. The states of the processes alone
        are not enough either: on a busy machine ranks wait for this process to read their messages."""
        for _ in range(LOOKS):
            for rank in running.values():
                if system.state(self.pids[rank]) in AT_WORK:
                    return False
            if wait(list(running), LOOK_S):
                return False
        return True

    def stacks(self) -> dict[int, Wait]:
        """For each rank that has not reported, the line of the attempt that it executes; 0 if none is seen."""
        waits = {}
        for rank, pid in enumerate(self.pids):
            if rank in self.switch.last:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
                os.set_blocking(self.dumps[rank], False)
                line = self._dumped(rank)
                waits[rank] = Wait("it was still computing" if line else "it was still at work", line)
        return waits

    def _dumped(self, rank: int) -> int:
        deadline, text = time.monotonic() + 0.5, ""
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                text += os.read(self.dumps[rank], 65536).decode(errors="replace")
            if lines := re.findall(rf'File "{ATTEMPT}", line (\d+)', text):
                return int(lines[0])
            time.sleep(0.01)
        return 0


def _told(last: tuple[list[Any], bytes] | None) -> dict[str, Any]:
    return last[0][1] if last is not None and last[0][0] == "result" else {}


def _memory(last: tuple[list[Any], bytes] | None, outside: Outside, rank: int) -> Memory | None:
    memory = _told(last).get("memory")
    if memory is None:
        return None
    names = ("peak", "now", "timeline", "python_bytes", "scalars")
    seen = {name: memory[name] for name in names}
    return Memory(**seen, pages=outside.peak.get(rank), weighed_pages=outside.weighed.get(rank))


def _output(last: tuple[list[Any], bytes] | None) -> Any:
    if last is None or last[0][0] != "result":
        return None
    try:
        return torch.load(io.BytesIO(last[1]), weights_only=True)
    except Exception as error:  # a rank may send anything
        return f"cannot be read: {type(error).__name__}"
