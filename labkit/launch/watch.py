"""What a call (call.py) and a script (script.py) have in common: ranks under way together, looked at again and again.

    every moment   what has come is taken in, what was printed is shown
    a debugger     of a rank waits for a line: it is read (debug_session.py), and nobody is late or stuck meanwhile
    LOOK_S         are there signs of life? who waits for whom, and for how long in the same place?
    GRACE_S        the moment that the others have after the first failure

Each says what its ranks tell, what a sign of life is, how long it takes to be sure, and what is done then.
"""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from labkit.launch import hang_diagnosis, output
from labkit.launch.debug_session import DebugSession, ReadLine
from labkit.launch.hang_diagnosis import Autopsy, Whereabouts
from labkit.launch.ranks import RankMessage, Ranks
from labkit.launch.reply import Failure

ASK_S = 0.3
"""The most seconds that the answers of ranks are awaited where a person has asked for them."""


class WatchSteps(Protocol):
    """The steps of a watch that differ between a call and a script."""

    @property
    @abstractmethod
    def pending(self) -> list[int]:
        """Ranks that are still under way."""

    @abstractmethod
    def _take(self, events: Sequence[RankMessage]) -> None:
        """Take in what the ranks tell."""

    @abstractmethod
    def whereabouts(self) -> list[Whereabouts]:
        """The place of every rank in its code at this moment, by the latest answers of the ranks."""

    @abstractmethod
    def hide_bar(self) -> None:
        """Take the bar of a terminal away, since something is printed below it."""

    @abstractmethod
    def _look(self, now: float) -> None:
        """See whether it is still going anywhere; if not, set `reason` and `autopsy`."""


class Watch(WatchSteps):
    """`ranks` under way together.

    reason     why they are given up; None while they are not
    autopsy    where each was then
    failed_at  when the first of them failed; None while none has
    life_at    when there was the last sign of life
    debugger   the debuggers that ranks have opened
    """

    def __init__(
        self, processes: Ranks, ranks: Sequence[int], timeout_s: float | None, read_line: ReadLine | None = None
    ):
        self.processes, self.ranks, self.timeout_s = processes, tuple(ranks), timeout_s
        self.debugger = DebugSession(processes, read_line)
        self.positions: dict[int, Any] = {}
        self.autopsy: Autopsy | None = None
        self.reason: str | None = None
        self.failed_at: float | None = None
        self.started = self.life_at = self.stuck_since = time.monotonic()
        self.life: object = None
        self.stuck: object = None

    def show(self, end: bool = False) -> None:
        """Print what the ranks have printed since the last time."""
        self.print_lines([(rank, line) for rank in self.ranks for line in self.processes.tails[rank].lines(end)])

    def print_lines(self, lines: list[tuple[int, str]]) -> None:
        """Print lines of ranks."""
        output.show(lines)

    def _finished(self, rank: int) -> int:
        """What a rank has finished so far: if it grows, the rank stands in the same line and is not stuck."""
        return 0

    def watch(self, look_s: float, grace_s: float) -> None:
        """Go on until no rank is pending, `reason` is known, or the first failure is `grace_s` seconds old."""
        look_at = self.started + look_s
        while self.pending and self.reason is None:
            self.hear()
            self.debugger.check()
            self.show()
            now = time.monotonic()
            if self.debugger.prompts:
                self._debug()
                look_at = time.monotonic() + look_s
                continue
            if self.failed_at is not None and now - self.failed_at > grace_s:
                break
            if now >= look_at:
                self._look(now)
                look_at = now + look_s

    def hear(self) -> None:
        """Take in what the ranks tell; wait a moment for it."""
        self._take(self.processes.poll(0.05))

    def _debug(self) -> None:
        """Let a person type into a debugger. Seconds count anew afterwards."""
        self.hide_bar()
        self.debugger.serve(self)
        self.life_at = self.stuck_since = time.monotonic()
        self.failed_at = self.failed_at and self.life_at

    def ask_all(self) -> list[Whereabouts]:
        """Ask all ranks where they are, and wait a moment for the answers."""
        self.ask_where(self.pending, ASK_S)
        return self.whereabouts()

    def stopped_in_debugger(self, stances: Sequence[Whereabouts]) -> list[Whereabouts]:
        """The same, with the place and words for the ranks whose debuggers wait for a line."""
        prompts = self.debugger.prompts
        words: dict[str, Any] = {"state": "running", "detail": "is stopped in the debugger", "waits_for": ()}
        return [
            replace(s, **words, file=asked.file, line=asked.line, source=asked.source, seconds=None)
            if (asked := prompts.get(s.rank)) is not None
            else s
            for s in stances
        ]

    def ask_where(self, ranks: Sequence[int], timeout_s: float, detail: Any = None) -> None:
        """Ask `ranks` anew where they are, and wait `timeout_s` seconds at most for those that are still there."""
        self.positions.clear()
        self.processes.ask(ranks, "where", detail)
        deadline = time.monotonic() + timeout_s
        while any(rank not in self.positions and rank in self.pending for rank in ranks):
            self._take(self.processes.poll(0.02))
            if time.monotonic() > deadline:
                return

    def diagnose(self, stances: Sequence[Whereabouts], life: object, now: float) -> Autopsy | None:
        """The autopsy if ranks wait for ever; `stuck_since` is when they were first seen so. `life` is all that changes
        while there is life."""
        if life != self.life:
            self.life, self.life_at = life, now
        autopsy = hang_diagnosis.diagnose(stances)
        stuck = autopsy and [
            (s.rank, s.call, s.line, s.waits_for, self._finished(s.rank))
            for s in autopsy.ranks
            if s.rank in autopsy.stuck
        ]
        if stuck != self.stuck:
            self.stuck, self.stuck_since = stuck, now
        return autopsy

    def silent(self, now: float) -> bool:
        """True if there has been no sign of life for longer than `timeout_s`."""
        return self.timeout_s is not None and now - self.life_at > self.timeout_s


def delayed(stances: Sequence[Whereabouts], longer_s: float) -> tuple[list[Whereabouts], list[Whereabouts]]:
    """The ranks that have waited for `longer_s` seconds, and those that still run of whom the first of these waits."""
    waiting = [stance for stance in stances if stance.state == "waiting" and (stance.seconds or 0.0) > longer_s]
    waiting = [stance for stance in waiting if stance.waits_for]
    awaited = waiting[0].waits_for if waiting else ()
    return waiting, [stances[rank] for rank in awaited if stances[rank].state == "running"]


def delay_words(waiting: Sequence[Whereabouts], late: Sequence[Whereabouts], longer_s: float) -> str:
    """The line that says who waits for whom, of what `delayed` returns."""
    names = hang_diagnosis.name_ranks([stance.rank for stance in waiting])
    return f"{names} waiting in {waiting[0].call} for {longer_s:g} s: {'; '.join(map(str, late))}. Nothing is stopped."


def culprit(autopsy: Autopsy, otherwise: int) -> int:
    """The rank that is named for a hang: one that will not come, else the first that is stuck, else `otherwise`."""
    gone = [awaited for rank, awaited in autopsy.waits if rank in autopsy.stuck and awaited not in autopsy.stuck]
    return (gone or list(autopsy.stuck) or [otherwise])[0]


def same_failure(ranks: Sequence[int], failures: Mapping[int, Failure]) -> list[int]:
    """Those of `ranks` that have failed by the same error as the first of them, but for their own numbers in it."""
    errors = {
        rank: (
            failures[rank].kind,
            failures[rank].cause or re.sub(rf"\brank ?{rank}\b", "rank", failures[rank].message),
        )
        for rank in ranks
    }
    return [rank for rank in ranks if errors[rank] == errors[ranks[0]]]


def any_failure(failures: Mapping[int, Failure]) -> tuple[int, str]:
    """The first rank that has failed, and the words for it, where no failure is known to be the cause of the others."""
    rank, failure = next(iter(failures.items()))
    return rank, f"rank {rank} raised {failure.kind}: {failure.cause or failure.message}"
