"""A case run: one attempt on one case. Starts the ranks, hands out inputs, collects results, ends every process.

    start ranks ─> draw inputs ─> each rank gets its own ─> switch ─> outputs, memory, faults ─> RunRecord

The ranks come from a process that knows nothing of the exercise (nursery.py). What they say is read with limits: who
says what a rank cannot say is at fault, and the others are judged all the same.

A run ends when every rank has reported, when no rank can go on (a deadlock, noticed at once), or when its time is up.
Each rank is then asked for its stack, and all are ended, whatever they are doing.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import psutil

from labkit.course.exercises.problem import Problem
from labkit.course.judge import late_imports
from labkit.course.judge.case import Case
from labkit.course.judge.executed_rank import ExecutedRanks
from labkit.course.judge.judge_wire import ATTEMPT
from labkit.course.judge.last_word import LastWord, last_word_of
from labkit.course.judge.nursery import Nursery, Processes, nursery
from labkit.course.judge.page_memory import Outside
from labkit.course.judge.part import part_of
from labkit.course.judge.run_record import Fault, Memory, RunRecord, Wait
from labkit.course.judge.sandboxed_rank import Program
from labkit.course.judge.switch import Flood, Switch
from labkit.launch import system

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
    """Run an attempt on one case and record what happened. The ranks come from this process's own nursery."""
    late_imports.fetch()
    origin = nursery() if system.forks() else None
    if origin is not None:
        origin.fetch()
    return run_from(origin, problem, program, case)


def run_from(origin: Nursery | None, problem: Problem, program: Program, case: Case) -> RunRecord:
    """The same with ranks from this nursery (None: where nothing may be forked) and without any import before. `Late`
    if a rank needs one and torch's compiler is not here yet."""
    began = time.perf_counter()
    with Ranks(origin, problem, program, case.n_ranks) as ranks:
        inputs = list(problem.inputs(case))
        ended = ranks.run([tuple(args) for args in inputs])
        switch, stacks = ranks.switch, ranks.stacks() if ended == "time-out" else {}
    words = [ranks.words.get(rank, LastWord()) for rank in range(case.n_ranks)]
    return RunRecord(
        case=case,
        events=tuple(switch.events),
        outputs=tuple(report.answer for report in words),
        expected=tuple(problem.answer(case, inputs)),
        memory=tuple(_memory(report, ranks.outside, rank) for rank, report in enumerate(words)),
        faults=ranks.faults,
        ended=ended,
        waits={**stacks, **switch.waits()} if ended in ("deadlock", "time-out") else {},
        undelivered=switch.undelivered() if ended == "finished" else {},
        unanswered=switch.unanswered() if ended == "finished" else {},
        unwaited=switch.unwaited() if ended == "finished" else {},
        races=tuple(switch.races),
        flood=ranks.flood,
        mismatch=switch.mismatch,
        damaged={rank: report.damaged for rank, report in enumerate(words) if report.damaged},
        printed=tuple(switch.printed),
        input_bytes=tuple(report.input_bytes for report in words),
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

    def __init__(self, origin: Nursery | None, problem: Problem, program: Program, n_ranks: int):
        self.origin, self.problem, self.program, self.n_ranks = origin, problem, program, n_ranks
        self.lines: list[Connection] = []
        self.dumps: list[int] = []
        self.spent_before: list[float] = []
        self.words: dict[int, LastWord] = {}
        self.faults: dict[int, Fault] = {}
        self.flood = ""

    def __enter__(self) -> Ranks:
        theirs = []
        for _ in range(self.n_ranks):
            line, their_line = Pipe()
            read, write = os.pipe()
            self.lines.append(line)
            self.dumps.append(read)
            theirs.append((their_line, write))
        part, ends = part_of(self.problem), [(line.fileno(), dump) for line, dump in theirs]
        self.processes: Processes = (
            self.origin.ranks(part, self.program, ends) if self.origin else ExecutedRanks(part, self.program, ends)
        )
        self.pids = self.processes.pids
        for line, dump in theirs:
            line.close()
            os.close(dump)
        if self.origin is None:
            self._await()
        self.spent_before = [self._spent(pid) for pid in self.pids]
        self.outside = Outside(self.pids)
        self.switch = Switch(self.lines, self.outside.look)
        return self

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
        self.processes.end()
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
            report = last_word_of(*self.switch.last[rank])
            if isinstance(report, Fault):
                self.faults[rank] = report
            else:
                self.words[rank] = report
        except late_imports.Late:
            raise
        except Flood as flood:
            self.flood = str(flood)
        except Exception as error:  # the rank is gone, or it has sent something that makes no sense
            self.switch.last[rank] = (["failed"], b"")
            self.faults[rank] = Fault("Ended", f"the process is gone ({self._how(rank)}; {type(error).__name__})", 0)
        del running[line]

    def _how(self, rank: int) -> str:
        code = self.processes.how(rank)
        if code is None:
            return "it said what a rank cannot say"
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
        for rank in range(self.n_ranks):
            if rank in self.switch.last:
                continue
            self.processes.stack(rank)
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


def _memory(report: LastWord, outside: Outside, rank: int) -> Memory | None:
    if report.memory is None:
        return None
    return report.memory._replace(pages=outside.peak.get(rank), weighed_pages=outside.weighed.get(rank))
