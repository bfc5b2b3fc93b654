"""One call on its way: collect the answers, show the output, notice when it can never end, and free whoever is stuck.

    answers of all ranks                         -> replies
    one rank fails, others are still under way   -> a moment's grace, then free the others; root cause first
    a rank dies                                  -> the same; a fresh process takes its place
    ranks that wait for ever (watch.diagnose)    -> autopsy, free them
    no sign of life for timeout_s                -> autopsy, free them
    the stop button                              -> free them, KeyboardInterrupt in the cell

To free a rank: SIGINT for Python code, cut connections for collectives; after 2 s its stack is dumped and a fresh
process replaces it. Afterwards all ranks meet in a new generation, with their models and names.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Any

from labkit.launch import output, watch
from labkit.launch.blackbox import Position
from labkit.launch.crew import Crew
from labkit.launch.lines import Event
from labkit.launch.progress import CallBar
from labkit.launch.reply import Answer
from labkit.launch.warden import Ended

GRACE_S = 0.25
"""After the first failure the others may be failing for reasons of their own: hear them before freeing them."""
LOOK_S = 0.5
SURE_S = 1.0
"""A rank that waits for one that is gone is given up after this long; ranks that wait in a circle after twice that."""
STRAGGLER_S = 5.0
RELEASE_S = 2.0


class Call:
    """One function under way on `ranks`."""

    def __init__(self, crew: Crew, ranks: Sequence[int], call_id: int, timeout_s: float | None):
        self.crew, self.ranks, self.call_id, self.timeout_s = crew, tuple(ranks), call_id, timeout_s
        self.answers: dict[int, tuple[Answer, list[Any]]] = {}
        self.deaths: dict[int, Ended] = {}
        self.positions: dict[int, Position | None] = {}
        self.autopsy: watch.Autopsy | None = None
        self.reason: str | None = None
        self.freed = False
        self.replaced: Sequence[int] = ()
        self.started = self.life_at = time.monotonic()
        self.life: object = None
        self.stuck_since = 0.0
        self.stuck: object = None
        self.failed_at: float | None = None
        self.told_straggler = False
        self.bar = CallBar(len(ranks))

    @property
    def pending(self) -> list[int]:
        """Ranks that have neither answered nor died."""
        return [rank for rank in self.ranks if rank not in self.answers and rank not in self.deaths]

    def collect(self) -> None:
        """Run the loop until every rank has answered or nothing more can come."""
        look_at = self.started + LOOK_S
        while self.pending:
            self._take(self.crew.poll(0.05))
            now = time.monotonic()
            if now - self.started > 0.02:
                self.show()
            if self.failed_at is not None and now - self.failed_at > GRACE_S:
                break
            if now >= look_at:
                self._look(now)
                look_at = now + LOOK_S
                if self.reason is not None:
                    break
        if self.pending:
            self.snapshot()
            self.release()
        self.show(end=True)

    def _take(self, events: list[Event]) -> None:
        for event in events:
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
        output.show([(rank, line) for rank in self.ranks for line in self.crew.tails[rank].lines(end)])
        self.bar.update(self.crew.box, self.ranks, len(self.answers), time.monotonic() - self.started, end)

    # -- is it still going anywhere? ---------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        seen = self.seen()
        self.crew.ask(self.pending, "where")  # the answers serve the next look
        box, tails = self.crew.box, self.crew.tails
        life = (
            [(box.read(r).done, box.read(r).progress, tails[r].at, tails[r].hidden_bytes) for r in self.ranks],
            len(self.answers),
        )
        if life != self.life:
            self.life, self.life_at = life, now
        found = watch.diagnose(seen)
        stuck = found and [
            (w.rank, w.call, w.line, w.waits_for, box.read(w.rank).done) for w in found.ranks if w.rank in found.stuck
        ]
        if stuck != self.stuck:
            self.stuck, self.stuck_since = stuck, now
        if found is not None and now - self.stuck_since >= SURE_S * (1 if self._gone(found) else 2):
            self.autopsy, self.reason = found, found.headline
        elif self.timeout_s is not None and now - self.life_at > self.timeout_s:
            headline = f"Time-out: for {self.timeout_s:g} s no rank finished a verb, printed or returned."
            self.autopsy, self.reason = watch.Autopsy(headline, tuple(seen), tuple(self.pending)), headline
            self.reason += " If this is honest work, give the cluster a longer timeout_s."
        elif not self.told_straggler:
            self._straggler(seen)

    def _gone(self, found: watch.Autopsy) -> bool:
        return any(
            found.ranks[b].state in ("finished", "raised", "dead", "idle") for a, b in found.waits if a in found.stuck
        )

    def _straggler(self, seen: Sequence[watch.Whereabouts]) -> None:
        long = [each for each in seen if each.state == "waiting" and each.seconds > STRAGGLER_S and each.waits_for]
        if long:
            self.told_straggler = True
            late = [str(seen[rank]) for rank in long[0].waits_for if seen[rank].state == "running"]
            who = watch.name_ranks([each.rank for each in long])
            print(
                f"{who} waiting in {long[0].call} for {STRAGGLER_S:g} s: {'; '.join(late)}. Nothing is stopped.",
                flush=True,
            )

    def seen(self) -> list[watch.Whereabouts]:
        """The whereabouts of every rank of the cluster at this moment."""
        now = time.monotonic()
        found = []
        for rank in range(self.crew.n_ranks):
            state, detail = "running", ""
            if rank in self.deaths:
                state, detail = "dead", str(self.deaths[rank])
            elif rank in self.answers:
                failure = self.answers[rank][0].failure
                state = "finished" if failure is None else "raised"
                detail = "" if failure is None else str(failure)
            elif rank not in self.ranks:
                state = "idle"
            found.append(watch.observe(self.crew.box, rank, state, self.positions.get(rank), now, detail))
        return watch.join_torch(found)

    def snapshot(self) -> None:
        """Ask once more where everybody is, before anything is disturbed."""
        if self.autopsy is None:
            self.positions.clear()
            asked = self.pending
            self.crew.ask(asked, "where")
            deadline = time.monotonic() + 0.1
            while any(rank not in self.positions for rank in asked) and time.monotonic() < deadline:
                self._take(self.crew.poll(0.02))
            self.autopsy = watch.Autopsy("", tuple(self.seen()), ())

    # -- freeing the ranks -------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Get every rank out of whatever it is in, and let all meet again. Can be entered again if interrupted."""
        self.freed = True
        deadline = time.monotonic() + RELEASE_S
        while self.pending and time.monotonic() < deadline:
            self.crew.signal(self.pending, signal.SIGINT)
            self.crew.ask(self.pending, "cut", self.crew.endpoints())
            again = min(deadline, time.monotonic() + 0.4)
            while self.pending and time.monotonic() < again:
                self._take(self.crew.poll(0.05))
        if self.pending:
            self.crew.signal(self.pending, signal.SIGUSR2)  # the rank writes its stack, even from inside C
            time.sleep(0.05)
            for rank in self.pending:
                self.deaths[rank] = Ended(
                    rank, self.crew.pids.get(rank, 0), None, "SIGKILL by labkit, since nothing else freed it", None
                )
            self.crew.kill(list(self.deaths))
        self.replaced = self.crew.heal() or self.replaced
