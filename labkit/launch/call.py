"""One call: collect the answers, show the output, notice when it can never end, free the ranks that are stuck, name the
cause.

    answers of all ranks                         -> replies
    one rank fails, others are still under way   -> a moment's grace, then free the others; root cause first
    a rank dies                                  -> the same; a fresh process takes its place
    ranks that wait for ever (hang_diagnosis.py) -> autopsy, free them
    no sign of life for timeout_s                -> autopsy, free them
    the stop button                              -> free them, KeyboardInterrupt in the cell

To free a rank: SIGINT for Python code, cut connections for collectives; after 2 s its stack is dumped and a fresh
process replaces it. Afterwards all ranks meet in a new generation, with their models and names.

A finished call is either no error or one error that begins with the root cause:

    a mistake in the learner's code    before    a rank that died    before    connections that broke because of either
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from labkit.launch import hang_diagnosis
from labkit.launch.advice import DEVICE_LOST, advice
from labkit.launch.blackbox import CodePosition
from labkit.launch.debug_session import ReadLine
from labkit.launch.progress import CallBar
from labkit.launch.ranks import RankMessage, Ranks
from labkit.launch.reply import Answer, Failure, WorkerError
from labkit.launch.warden import Ended
from labkit.launch.watch import Watch, any_failure, culprit, delay_words, delayed, same_failure

GRACE_S = 0.25
"""The seconds for which other answers are awaited after the first failure: they may fail for their own reasons."""
LOOK_S = 0.5
SURE_S = 1.0
"""A rank that waits for a rank that is gone is given up after this long; ranks that wait in a circle after twice
that."""
STRAGGLER_S = 5.0
RELEASE_S = 2.0


class Call(Watch):
    """One function under way on `ranks`."""

    positions: dict[int, CodePosition | None]

    def __init__(
        self, processes: Ranks, ranks: Sequence[int], call_id: int, timeout_s: float | None,
        read_line: ReadLine | None = None,
    ):  # fmt: skip
        super().__init__(processes, ranks, timeout_s, read_line)
        self.call_id = call_id
        self.answers: dict[int, tuple[Answer, list[Any]]] = {}
        self.deaths: dict[int, Ended] = {}
        self.freed = False
        self.replaced: Sequence[int] = ()
        self.told_straggler = False
        self.bar = CallBar(len(ranks))

    @property
    def pending(self) -> list[int]:
        """Ranks that have neither answered nor died."""
        return [rank for rank in self.ranks if rank not in self.answers and rank not in self.deaths]

    def collect(self) -> None:
        """Run the loop until every rank has answered or nothing more can come."""
        self.watch(LOOK_S, GRACE_S)
        if self.pending:
            self.snapshot()
            self.release()
        self.debugger.end()
        self.show(end=True)

    def _take(self, events: Sequence[RankMessage]) -> None:
        for event in events:
            self.debugger.take(event)
            if event.kind == "answer" and event.what[0] == self.call_id:
                answer: Answer = event.what[1]
                self.answers[event.rank] = (answer, event.frames)
                if answer.failure is not None and self.failed_at is None:
                    self.failed_at = time.monotonic()
            elif event.kind == "ended":
                self.deaths[event.rank] = event.what[0]
                self.failed_at = self.failed_at or time.monotonic()
            elif event.kind == "where":
                self.positions[event.rank] = event.what[0]

    def show(self, end: bool = False) -> None:
        """Print what the ranks have printed since the last time, and draw the progress bar."""
        seconds = time.monotonic() - self.started
        if end or seconds > 0.02:
            super().show(end)
            if end or self.debugger.rank is None:  # a bar would come between a person and the debugger
                self.bar.update(self.processes.box, self.ranks, len(self.answers), seconds, end)

    def hide_bar(self) -> None:
        """Take the bar of a terminal away."""
        self.bar.bar.hide()

    # -- is it still going anywhere? ---------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        seen = self.whereabouts()
        self.processes.ask(self.pending, "where")  # the answers serve the next look
        box, tails = self.processes.box, self.processes.tails
        life = (
            [(box.read(r).done, box.read(r).progress, tails[r].at, tails[r].hidden_bytes) for r in self.ranks],
            len(self.answers),
        )
        autopsy = self.diagnose(seen, life, now)
        if autopsy is not None and now - self.stuck_since >= SURE_S * (1 if self._gone(autopsy) else 2):
            self.autopsy, self.reason = autopsy, autopsy.headline
        elif self.silent(now):
            headline = f"Time-out: for {self.timeout_s:g} s no rank finished a verb, printed or returned."
            self.autopsy, self.reason = hang_diagnosis.Autopsy(headline, tuple(seen), tuple(self.pending)), headline
            self.reason += " If this is honest work, give the cluster a longer timeout_s."
        elif not self.told_straggler and self.debugger.rank is None:
            self._straggler(seen)

    def _gone(self, autopsy: hang_diagnosis.Autopsy) -> bool:
        """True if a rank that is stuck waits for one that will never come."""
        awaited = {b for a, b in autopsy.waits if a in autopsy.stuck}
        return any(autopsy.ranks[rank].state in ("finished", "raised", "dead", "idle") for rank in awaited)

    def _straggler(self, seen: Sequence[hang_diagnosis.Whereabouts]) -> None:
        waiting, late = delayed(seen, STRAGGLER_S)
        if waiting:
            self.told_straggler = True
            print(delay_words(waiting, late, STRAGGLER_S), flush=True)

    def _finished(self, rank: int) -> int:
        return self.processes.box.read(rank).done

    def whereabouts(self) -> list[hang_diagnosis.Whereabouts]:
        """The whereabouts of every rank of the cluster at this moment."""
        now = time.monotonic()
        whereabouts = []
        for rank in range(self.processes.n_ranks):
            state, detail = "running", ""
            if rank in self.deaths:
                state, detail = "dead", str(self.deaths[rank])
            elif rank in self.answers:
                failure = self.answers[rank][0].failure
                state = "finished" if failure is None else "raised"
                detail = "" if failure is None else str(failure)
            elif rank not in self.ranks:
                state = "idle"
            position, box = self.positions.get(rank), self.processes.box
            whereabouts.append(hang_diagnosis.observe(box, rank, state, position, now, detail, self.call_id))
        return self.stopped_in_debugger(hang_diagnosis.join_torch(whereabouts))

    @property
    def without_device(self) -> list[int]:
        """Ranks whose failure has left them a GPU that answers no more."""
        failures = {rank: answer.failure for rank, (answer, _) in self.answers.items()}
        return [rank for rank, failure in failures.items() if failure is not None and failure.device_lost]

    def snapshot(self) -> None:
        """Ask once more where everybody is, before anything is disturbed."""
        if self.autopsy is None:
            self.ask_where(self.pending, 0.1)
            self.autopsy = hang_diagnosis.Autopsy("", tuple(self.whereabouts()), ())

    # -- freeing the ranks -------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Get every rank out of whatever it is in, and let all meet again. Can be entered again if interrupted."""
        self.freed = True
        self.debugger.end()
        deadline = time.monotonic() + RELEASE_S
        while self.pending and time.monotonic() < deadline:
            self.processes.signal(self.pending, signal.SIGINT)
            self.processes.ask(self.pending, "cut", (self.processes.generation, self.processes.endpoints()))
            until = min(deadline, time.monotonic() + 0.4)
            while self.pending and time.monotonic() < until:
                self._take(self.processes.poll(0.05))
        if self.pending:
            self.processes.signal(self.pending, signal.SIGUSR2)  # the rank writes its stack, even from inside C
            time.sleep(0.05)
            for rank in self.pending:
                self.deaths[rank] = self.processes.lost(rank) or Ended(
                    rank, self.processes.pids.get(rank, 0), None, "SIGKILL by labkit, since nothing else freed it", None
                )
            self.processes.kill(list(self.deaths))
        if self.without_device:
            self.processes.kill(self.without_device)
        self.replaced = self.processes.heal() or self.replaced


# What a finished call comes to


def stopped(call: Call) -> str:
    """The words that are printed after the stop button: where each rank was, and what is left of it."""
    stood = call.autopsy.ranks if call.autopsy else ()
    lines = [
        "Stopped.",
        *(f"  {line}" for line in hang_diagnosis.lines(stance for stance in stood if stance.rank in call.ranks)),
    ]
    if call.replaced:
        left = (
            "; the others kept their names" if len(call.replaced) < call.processes.n_ranks else ": their names are gone"
        )
        return "\n".join([*lines, f"{hang_diagnosis.name_ranks(call.replaced)} had to be replaced{left}."])
    return "\n".join([*lines, "All ranks are still there, with their names."])


def undelivered(call: Call) -> dict[tuple[int, int], int]:
    """The number of messages that were sent and not received, by (source, to)."""
    lost: Counter[tuple[int, int]] = Counter()
    for rank, (answer, _) in call.answers.items():
        lost.update((rank, transfer.to) for transfer in answer.ledger if transfer.to is not None)
        lost.subtract({(source, rank): count for source, count in answer.ledger.received.items()})
    return {pair: count for pair, count in lost.items() if count > 0}


def error_of(call: Call) -> WorkerError | None:
    """None if every rank answered well; else the error, root cause first."""
    failures = {rank: answer.failure for rank, (answer, _) in call.answers.items() if answer.failure is not None}
    if not failures and not call.deaths and call.reason is None:
        return None
    autopsy = call.autopsy or hang_diagnosis.Autopsy("", tuple(call.whereabouts()), ())
    rank, reason = _root(call, failures, autopsy)
    if not autopsy.headline:
        autopsy = hang_diagnosis.Autopsy(reason, autopsy.ranks, autopsy.stuck)
    notes = []
    if call.replaced:
        names = hang_diagnosis.name_ranks(call.replaced)
        notes.append(f"A fresh process took the place of {names} (its names are gone); the other ranks kept theirs.")
    if call.without_device:
        notes.append(DEVICE_LOST.format(ranks=hang_diagnosis.name_ranks(call.without_device)))
    if rank in failures:
        notes += advice(failures[rank].message)
    cause = {rank: failures[rank]} if rank in failures and _is_cause(rank, failures[rank], autopsy) else {}
    return WorkerError(rank, reason, {**{r: f for r, f in failures.items() if r != rank}, **cause}, autopsy, notes)


def _is_cause(rank: int, failure: Failure, autopsy: hang_diagnosis.Autopsy) -> bool:
    return not failure.collateral and autopsy.ranks[rank].state == "raised"


def _root(call: Call, failures: dict[int, Failure], autopsy: hang_diagnosis.Autopsy) -> tuple[int, str]:
    if call.reason is not None:
        return culprit(autopsy, call.ranks[0]), call.reason
    own = [r for r in failures if _is_cause(r, failures[r], autopsy)]
    if own:
        first = failures[own[0]]
        same = same_failure(own, failures)
        where = call.processes.where(own[0]) if len(same) == 1 else ""
        return own[0], f"{hang_diagnosis.name_ranks(same)}{where} raised {first.kind}: {first.cause or first.message}"
    if call.deaths:
        rank, ended = next(iter(call.deaths.items()))
        suspicion = _suspicion(ended, autopsy, call.processes.devices[rank])
        return rank, f"rank {rank}{call.processes.where(rank)} {ended}{suspicion}"
    return any_failure(failures)


def _suspicion(ended: Ended, autopsy: hang_diagnosis.Autopsy, device: str) -> str:
    if ended.signal != "SIGABRT" or device != "cpu":
        return ""
    last = "; ".join(f"rank {stance.rank} in {stance.call} {stance.shape}" for stance in autopsy.ranks if stance.call)
    return (
        ". On gloo this is nearly always a collective of torch itself whose tensors differ in shape or dtype"
        f"{f' ({last})' if last else ''}: verbs of the group, or Cluster(strict=True), name both shapes"
    )
