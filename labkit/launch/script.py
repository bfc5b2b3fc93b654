"""Anybody's torchrun-style script on ranks of this machine: started, watched, explained.

    labkit script train.py -n 4 --lr 0.1

    command  --->  zygote (torch is imported once)  --->  warden  --->  rank 0 ... n-1   each runs train.py as __main__
                                                                  --->  keeper           the store of env://

The ranks get torchrun's environment and find each other by themselves. What this process knows of them: what they
print, how each ended, and what torch's flight recorder keeps of every collective, which the control thread of each rank
sends before it is overwritten. Nothing of that is in the way of the script.

    all ranks end well                        -> ScriptRun
    one raises, exits with an error, dies     -> a moment's grace, where are the others?, root cause first, all ended
    ranks that can never go on                -> an autopsy within seconds; all are ended
    ranks that wait for one that still runs   -> a line that says for whom and where it is; nothing is stopped
    no sign of life for timeout_s             -> an autopsy; all are ended

Long because what ranks, their system and their dumps tell is heard in one place, and in one order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from labkit.comm.dumps import Dump, Frame, GroupMade, Message, load, read
from labkit.comm.libraries import within
from labkit.comm.rendezvous_store import HOST
from labkit.comm.slow_rank import Noise
from labkit.comm.traffic_by_line import Share, Tally
from labkit.launch import hang_diagnosis, system, working_folders
from labkit.launch.blackbox import CodePosition
from labkit.launch.core_shortage import CoreShortage
from labkit.launch.debug_session import ReadLine, checked
from labkit.launch.device_choice import choose
from labkit.launch.life_line import LifeLine, memory_words
from labkit.launch.long_messages import HEADLINE, brief
from labkit.launch.partings import parting_of_groups, parting_of_reduce
from labkit.launch.postmortem import Stand, missed, reasons, stalled, whereabouts
from labkit.launch.rank_processes import RankMessage, RankProcesses
from labkit.launch.rank_spec import ScriptSpec
from labkit.launch.reply import Failure, WorkerError
from labkit.launch.warden import Ended
from labkit.launch.watch import Watch, any_failure, culprit, delay_words, delayed, same_failure
from labkit.plan.checks import is_number, is_whole

START_S = 120.0
LOOK_S = 0.5
SURE_S = 2.0
"""Ranks that can never go on are given up when they have stood like this for so long."""
GRACE_S = 1.0
"""Seconds for which the others may still end for reasons of their own, after the first failure."""
STRAGGLER_S = 5.0
LEAVE_S = 20.0
"""Seconds that a rank may take from the end of its script to the end of its process."""
IMPORTS = ("labkit.launch.script_rank", "torch._dynamo", "torch._inductor.codecache")
"""Modules that nearly every rank needs, imported once for all: an optimizer and DTensor import torch._dynamo, and torch
imports the last one where it puts the flight recorder's stacks into words. That happens in the control thread: if
the script imported torch._dynamo at the same moment, each would wait for the other's half, and the script would see a
module without its names."""
OUTPUT_BYTES = 64 << 20
MEMORY_WORDS = ("can't allocate memory", "out of memory", "Cannot allocate memory", "bad_alloc")


@dataclass(frozen=True)
class ScriptRun:
    """What is known at the end of a script: how it went, and everything that was seen of it.

    error     None if all ranks ended well, else the root cause first
    found_s   seconds from the last sign of life to the explanation of a hang, from the first failure for the rest
    seen      rank -> what the observer in that rank saw
    complete  ranks of which every record has come
    noise     what the machine did to the ranks: seconds without a core
    messages  (verb, line) -> rank -> what that rank sent or received there; ranks whose script came to an end
    """

    path: str
    arguments: tuple[str, ...]
    n_ranks: int
    seconds: float
    codes: dict[int, int | None]
    tally: Tally = field(repr=False)
    seen: dict[int, Any] = field(repr=False)
    messages: dict[tuple[str, Frame], dict[int, Share]] = field(repr=False)
    noise: Noise = field(repr=False)
    complete: tuple[int, ...]
    error: WorkerError | None = None
    autopsy: hang_diagnosis.Autopsy | None = None
    found_s: float | None = None

    @property
    def well(self) -> bool:
        """True if every rank ended with exit code 0."""
        return self.error is None


def watch_script(
    path: str | Path,
    n_ranks: int = 4,
    arguments: Sequence[str | float | Path] = (),
    timeout_s: float | None = 300.0,
    observe: str | None = None,
    record: bool = True,
    quiet: bool = False,
    break_on_error: int | None = None,
    read_line: ReadLine | None = None,
) -> ScriptRun:
    """Run a script on `n_ranks` ranks to its end, whatever that is, and leave no process behind.

    `observe` names what looks on from inside (launch/observer.py), such as "labkit.probe.sampled.Sampled"; without
    `record` no records are fetched. `break_on_error` is a rank whose debugger opens where its script raises an
    exception; `read_line` is where the lines of debuggers come from, None for `input`. Raises ValueError for a script
    or a rank that is not there and for arguments that are no words, KeyboardInterrupt after all ranks have been ended:
    on the stop button, and when a debugger was left by `q`."""
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"there is no script {path}: name a Python file, as for torchrun")
    if isinstance(arguments, str) or not all(isinstance(word, str | int | float | Path) for word in arguments):
        raise ValueError(f'a script gets words and numbers, each by itself, such as "--lr", 0.1; got {arguments!r}')
    words = tuple(str(word) for word in arguments)
    if timeout_s is not None and not is_number(timeout_s, above=True):
        raise ValueError(f"timeout_s must be a number of more than 0 seconds, or None for no limit, got {timeout_s!r}")
    read_line = checked(read_line)
    working_folders.check()
    choice = choose(n_ranks, "cpu")
    if break_on_error is not None and not (is_whole(break_on_error, 0) and break_on_error < n_ranks):
        raise ValueError(f"break_on_error={break_on_error!r}: the ranks of this script are 0 to {n_ranks - 1}")
    processes = RankProcesses(n_ranks + 1, choice._replace(devices=("cpu",) * (n_ranks + 1)), False, False)
    watched = WatchedScript(processes, n_ranks, timeout_s, read_line)
    try:
        if not quiet:
            print(f"{file.name} on {n_ranks} rank{'s' if n_ranks > 1 else ''} of this machine", flush=True)
        watched.start(str(file), words, observe, record, break_on_error)
        watched.collect()
        return watched.run(str(file), words)
    except KeyboardInterrupt:
        watched.show(end=True)
        print("\n".join(["Stopped.", *(f"  {line}" for line in hang_diagnosis.lines(watched.stances))]), flush=True)
        raise
    finally:
        processes.close()


class WatchedScript(Watch):
    """The ranks of one script while it runs."""

    processes: RankProcesses
    positions: dict[int, tuple[CodePosition | None, list[Message], Dump | None]]

    def __init__(
        self, processes: RankProcesses, n_ranks: int, timeout_s: float | None, read_line: ReadLine | None = None
    ):
        super().__init__(processes, range(n_ranks), timeout_s, read_line)
        self.n_ranks = n_ranks
        self.tally = Tally(n_ranks)
        self.over: dict[int, tuple[int, Failure | None]] = {}
        self.over_at: dict[int, float] = {}
        self.ended: dict[int, Ended] = {}
        self.seen: dict[int, Any] = {}
        self.complete: set[int] = set()
        self.shortage = CoreShortage(n_ranks)
        self.messages: dict[tuple[str, Frame], dict[int, Share]] = {}
        self.made: dict[int, tuple[GroupMade, ...]] = {}
        self.still: dict[int, int] = dict.fromkeys(range(n_ranks), 0)
        self.stances: tuple[hang_diagnosis.Whereabouts, ...] = ()
        self.port: int | None = None
        self.found_s: float | None = None
        self.told_straggler: object = None
        self.life_line, self.memory = LifeLine(), list[str]()
        for tail in processes.tails:
            tail.budget_bytes = OUTPUT_BYTES

    def print_lines(self, lines: list[tuple[int, str]]) -> None:
        """Print lines of ranks, above the line of life."""
        self.life_line.print_lines(lines)

    def show(self, end: bool = False) -> None:
        """Print what the ranks have printed since the last time, and draw the line of life, or take it away."""
        super().show(end)
        if end:
            self.life_line.end()
            return
        if self.debugger.rank is not None:  # the line would come between a person and the debugger
            return
        n_steps = max((seen.get("n_steps", 0) for seen in self.seen.values()), default=0)
        bars = {rank: bar for rank in self.ranks if (bar := self.processes.tails[rank].bar)}
        self.life_line.draw([f"step {n_steps:,}"] * (n_steps > 0) + self.memory, bars)

    def hide_bar(self) -> None:
        """Take the line of life away."""
        self.life_line.bar.hide()

    @property
    def pending(self) -> list[int]:
        """Ranks whose process is there."""
        return [rank for rank in range(self.n_ranks) if rank not in self.ended]

    def start(
        self, path: str, arguments: tuple[str, ...], observe: str | None, record: bool, break_on_error: int | None
    ) -> None:
        """Start the keeper of the store, then the ranks. RuntimeError if the store does not come up."""
        processes, n = self.processes, self.n_ranks
        threads = max(1, (os.cpu_count() or 1) // n)
        words = os.path.join(processes.folder, "last_words")
        script = ScriptSpec(n, path, arguments, observe, record, words, break_on_error=break_on_error)
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "KINETO_LOG_LEVEL": "6",
        }  # 5 is where torch's profiler says that it starts
        processes.spec = replace(
            processes.spec,
            module="labkit.launch.script_rank",
            imports=(*IMPORTS, *([observe.rpartition(".")[0]] if observe else [])),
            n_ranks=n,
            threads=threads,
            environment={**processes.spec.environment, **environment},
            script=script,
        )
        processes.start([n])
        deadline = time.monotonic() + START_S
        while self.port is None and n not in self.ended and time.monotonic() < deadline:
            self._take(processes.poll(0.05))
        if self.port is None:
            printed = "\n".join(processes.tails[n].lines(end=True)[-5:])
            raise RuntimeError(
                f"the store in which the ranks of {path} are to meet did not come up\n{printed}".rstrip()
            )
        torchrun = {
            "MASTER_ADDR": HOST, "MASTER_PORT": str(self.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "labkit", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default", "ROLE_WORLD_SIZE": str(n),
        }  # fmt: skip
        processes.spec = replace(processes.spec, script=replace(script, torchrun=torchrun))
        processes.start(range(n))
        self.started = self.life_at = time.monotonic()

    def collect(self) -> None:
        """Watch until every rank has ended, or until it is known why it never will; then end what is left."""
        self.watch(LOOK_S, GRACE_S)
        if self.reason is not None or self.failed_at is not None:
            asked = [rank for rank in self.pending if rank not in self.over]
            self.ask_where(asked, LOOK_S, True)  # and all that the recorder has
        if self.failed_at is not None:
            self.stances = tuple(self.whereabouts())
            self.found_s = time.monotonic() - self.failed_at
        self.processes.kill(self.pending)
        self._take(self.processes.poll(0.05))
        self.show(end=True)

    def run(self, path: str, arguments: tuple[str, ...]) -> ScriptRun:
        """Everything that is known at the end."""
        error = self._error()
        codes = {rank: self.ended[rank].code if rank in self.ended else None for rank in range(self.n_ranks)}
        none = dict.fromkeys(sorted(self.over), Share(0, 0))
        messages = {key: none | shares for key, shares in self.messages.items()}
        return ScriptRun(
            path, arguments, self.n_ranks, time.monotonic() - self.started, codes, self.tally, self.seen, messages,
            self.shortage.noise, tuple(sorted(self.complete)), error,
            error.autopsy if error else None, self.found_s,
        )  # fmt: skip

    # -- what the ranks tell -----------------------------------------------------------------------------------------

    def _take(self, events: Sequence[RankMessage]) -> None:
        for event in events:
            self.debugger.take(event)
            if event.kind == "store":
                self.port = event.what[0]
            elif event.kind == "ended":
                self._end(event.rank, event.what[0])
            elif event.kind == "fetched":
                self._add(event.rank, event.frames[0], event.what[0])
            elif event.kind == "where":
                position, messages, members, made, whole, news = event.what
                self.made[event.rank] = tuple(made)
                self._see(event.rank, news)
                dump = self._dump(event.rank, event.frames[0], members, after=-1)
                if whole and dump is not None:
                    self.tally.add(dump)
                    self.complete.add(event.rank)
                self.positions[event.rank] = position, messages, dump
            elif event.kind == "over":
                code, failure, seen, messages, members, made = event.what
                self.made[event.rank] = tuple(made)
                self.over[event.rank], self.over_at[event.rank] = (code, failure), time.monotonic()
                self._see(event.rank, seen or {})
                self.complete.add(event.rank)
                for verb, frame, n, n_bytes in messages:
                    sent = n_bytes if verb == "send" else 0
                    self.messages.setdefault((verb, frame), {})[event.rank] = Share(n, sent)
                self._add(event.rank, event.frames[0], members)
                self.shortage.measure(self.processes.pids, [event.rank])
                self.processes.tell(event.rank, "leave")
                if code:
                    self._failed()

    def _end(self, rank: int, ended: Ended) -> None:
        self.ended[rank] = ended
        if rank < self.n_ranks and (ended.code != 0 or rank not in self.over):
            self._failed()
            with suppress(OSError):
                words = Path(self.processes.folder, f"last_words{rank}").read_bytes()
                self._add(rank, words, {})

    def _failed(self) -> None:
        if self.failed_at is None and self.reason is None:
            self.failed_at = time.monotonic()

    def _add(self, rank: int, data: Any, members: dict[str, tuple[int, ...]]) -> None:
        dump = self._dump(rank, data, members, self.tally.newest[rank])
        if dump is not None:
            self.tally.add(dump)

    def _dump(self, rank: int, data: Any, members: dict[str, tuple[int, ...]], after: int) -> Dump | None:
        if not data:
            return None
        with suppress(ValueError):  # a process that died in the middle of a word
            return read(load(bytes(data)), rank, members, after, within)
        return None

    def _see(self, rank: int, news: dict[str, Any]) -> None:
        if news:
            self.seen[rank] = {**self.seen.get(rank, {}), **news}

    # -- is it still going anywhere? ---------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        for rank in self.pending:
            self.still[rank] = self.still[rank] + 1 if _sleeps(self.processes.pids.get(rank)) else 0
        running = [rank for rank in self.pending if rank not in self.over]
        self.shortage.measure(self.processes.pids, running)
        self.memory = memory_words({rank: pid for rank, pid in self.processes.pids.items() if rank in running})
        for rank, since in self.over_at.items():
            if rank in self.pending and now - since > LEAVE_S:
                self.reason = (
                    f"rank {rank} ended its script {LEAVE_S:g} s ago, and its process does not end: it waits for a "
                    "thread or a child process"
                )
        self.stances = tuple(self.whereabouts())
        life = (
            [position[2].last if position[2] else None for position in self.positions.values()],
            [(tail.at, tail.hidden_bytes) for tail in self.processes.tails],
            sorted(self.ended),
        )
        autopsy = self.diagnose(self.stances, life, now)
        if autopsy is not None and self.failed_at is None and now - self.stuck_since >= SURE_S:
            because = reasons(self._dumps())[:1]
            self.reason = " ".join([autopsy.headline, *(f"The {because[0]}." for _ in because)])
            self.autopsy = hang_diagnosis.Autopsy(self.reason, autopsy.ranks, autopsy.stuck)
            self.found_s = now - self.life_at
        elif self.silent(now):
            together = stalled([self.stances[rank] for rank in self.pending])
            self.reason = (
                f"Time-out: for {self.timeout_s:g} s no rank has called a collective, printed or ended. "
                f"{together or 'If this is honest work, give it a longer --timeout.'}"
            )
            self.autopsy = hang_diagnosis.Autopsy(self.reason, self.stances, tuple(self.pending))
        elif self.debugger.rank is None:
            self._straggler()
        self.processes.ask([rank for rank in self.pending if rank not in self.over], "where")

    def _dumps(self) -> list[Dump]:
        return self.tally.dumps([position[2] for position in self.positions.values() if position[2] is not None])

    def ask_all(self) -> list[hang_diagnosis.Whereabouts]:
        """Ask all ranks where they are, and wait a moment for the answers."""
        stances = super().ask_all()
        self.stances = tuple(stances)
        return stances

    def whereabouts(self) -> list[hang_diagnosis.Whereabouts]:
        """The place of every rank in the script at this moment, by the latest answers of the ranks."""
        stands = []
        for rank in range(self.n_ranks):
            state, detail = "running", ""
            code, failure = self.over.get(rank, (None, None))
            if failure is not None:
                state, detail = "raised", str(failure)
            elif code:
                state, detail = "raised", f"ended with exit code {code} (sys.exit)"
            elif code == 0:
                state = "finished"
            elif rank in self.ended:
                state, detail = "dead", str(self.ended[rank])
            position, messages, dump = self.positions.get(rank, (None, [], None))
            asleep = bool(self.debugger.prompts) and _sleeps(self.processes.pids.get(rank))
            still = asleep or self.still[rank] > 1 or self.failed_at is not None
            made = self.made.get(rank, ())
            stands.append(Stand(rank, state, detail, still, position, tuple(messages), dump, made))
        return self.stopped_in_debugger(whereabouts(stands, self._dumps(), time.time_ns(), time.monotonic()))

    def _straggler(self) -> None:
        waiting, late = delayed(self.stances, STRAGGLER_S)
        if late and self.told_straggler != (waiting[0].call, waiting[0].waits_for):
            self.told_straggler = waiting[0].call, waiting[0].waits_for
            together = [s for s in waiting if (s.axis, s.seq) == (waiting[0].axis, waiting[0].seq)]
            self.life_line.say(delay_words(together, late, STRAGGLER_S))

    # -- what it comes to --------------------------------------------------------------------------------------------

    def _error(self) -> WorkerError | None:
        failures = {rank: failure for rank, (_, failure) in self.over.items() if failure is not None}
        if self.reason is not None:
            autopsy = self.autopsy or hang_diagnosis.Autopsy(self.reason, self.stances, ())
            return WorkerError(culprit(autopsy, 0), self._with_parting(self.reason), failures, autopsy)
        rank, reason = self._root(failures)
        if rank is None:
            return None
        if rank not in failures or failures[rank].collateral:  # else its own exception is the cause
            reason = self._with_parting(reason)
        own = {rank: failures[rank]} if rank in failures else {}
        others = {r: f for r, f in failures.items() if r != rank}
        return WorkerError(rank, reason, {**others, **own}, hang_diagnosis.Autopsy(reason, self.stances, ()))

    def _with_parting(self, reason: str) -> str:
        """The reason, and the first thing that ranks have done differently before it, if that is known."""
        parting = parting_of_groups(self.made, self.n_ranks) or parting_of_reduce(self._dumps())
        end = "" if not parting or reason.endswith(".") else "."
        return f"{reason}{end} {parting}".rstrip()

    def _root(self, failures: dict[int, Failure]) -> tuple[int | None, str]:
        own = [rank for rank, failure in failures.items() if not failure.collateral]
        killed = [r for r, e in self.ended.items() if r < self.n_ranks and e.signal and r not in self.over]
        killed = [r for r in killed if self.stances and self.stances[r].state == "dead"]  # not those that we ended
        if own:
            failure = failures[own[0]]
            same = same_failure(own, failures)
            starved = "ran out of memory: " if _of_memory(failure) else ""
            what = failure.cause or brief(failure.message, HEADLINE)
            return own[0], f"{hang_diagnosis.name_ranks(same)} {starved}raised {failure.kind}: {what}"
        if killed:
            because = "".join(f": {reason}" for reason in reasons(self._dumps())[:1])
            return killed[0], f"rank {killed[0]} {self.ended[killed[0]]}{because}"
        for rank, (code, raised) in self.over.items():
            if code and raised is None:
                same = [r for r, over in self.over.items() if over == (code, None)]
                return rank, f"{hang_diagnosis.name_ranks(sorted(same))} ended with exit code {code} (sys.exit)"
        for rank, ended in self.ended.items():
            if rank < self.n_ranks and ended.code and rank not in self.over:
                return rank, f"rank {rank} {ended}"
        for rank, ended in self.ended.items():
            if rank < self.n_ranks and rank not in self.over and ended.code == 0:
                return rank, f"rank {rank} {ended}, before the end of its script"
        if failures:
            broken = missed(self._dumps(), tuple(failures))
            if broken is not None:
                rank, without = broken
                return rank, f"rank {rank} has ended its script {without}"
            ends = list(self.over)  # in the order in which they came
            gone = [rank for rank in ends[: ends.index(next(iter(failures)))] if rank not in failures]
            if gone:
                early, others = map(hang_diagnosis.name_ranks, (sorted(gone), sorted(failures)))
                return gone[0], f"{early} ended the script first, and then the connections of {others} broke"
            return any_failure(failures)
        return None, ""


def _of_memory(failure: Failure) -> bool:
    return failure.kind == "MemoryError" or any(words in failure.message for words in MEMORY_WORDS)


def _sleeps(pid: int | None) -> bool:
    """True if the main thread of a process waits for something; False while it computes, or would if it could."""
    return pid is not None and system.state(pid) == psutil.STATUS_SLEEPING
