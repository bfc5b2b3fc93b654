"""What this learner has done, in a file of theirs: every attempt at an exercise, every hint and solution opened.

    progress = Progress()                          in the user's data folder; Progress(path) elsewhere
    progress.add(report, source)                   an attempt; a stub that is not written yet is none
    progress.hint("03.2", 1); progress.hints("03.2")                          1
    progress.solution("03.2")                      ValueError before the first attempt
    progress.rows(problems())                      a Standing for each exercise, in order
    other.load(progress.export())                  on another machine: nothing is lost, and nothing comes twice

The order is that of the file, not of the clock, which may jump back; what is loaded comes after what was there. A file
that cannot be written for a while does not stop a check: the event waits for the next write, and `.note` says so. For
files that are damaged or of a later labkit see store.py.
"""

from __future__ import annotations

import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.course.learner.events import (
    LEVELS,
    Attempt,
    Event,
    Hint,
    Solution,
    event_of,
    events_of,
    export_of,
    full_key,
    sound,
)
from labkit.course.learner.log import Log
from labkit.course.learner.store import Store
from labkit.view.units import plural

if TYPE_CHECKING:
    from labkit.course.exercises.problem import Problem
    from labkit.course.judge.report import Report

NAME = "progress.sqlite3"
TABLE = "CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, uid TEXT NOT NULL UNIQUE, said TEXT NOT NULL)"
STEPS = ((TABLE,),)


class Failed(NamedTuple):
    """A verdict that was broken in an attempt; `cause` is "" if none is known."""

    key: str
    verdict: str
    cause: str
    when: datetime


@dataclass(frozen=True)
class Standing:
    """A learner's standing in one exercise.

    tries                     the number of attempts
    passed, starred           True if one of them passed, True if one of them earned the star
    hints, openings           the number of its hints that were opened, and of all openings of a hint
    seen                      True if the solution was opened before the first attempt that passed
    first_passed              the time of that attempt, None if there is none
    minutes                   the time that its author expects it to take
    cause                     of the last attempt that did not pass: the likely cause, or the verdict
    """

    key: str
    title: str
    lab: str
    minutes: int
    difficulty: int
    importance: int
    tries: int = 0
    passed: bool = False
    starred: bool = False
    hints: int = 0
    openings: int = 0
    seen: bool = False
    first_passed: datetime | None = None
    cause: str = ""


class Progress:
    """The events in one file; `clock` tells the time."""

    def __init__(
        self, path: Path | str | None = None, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        """Open the file, or create it. ValueError for a file of a later version of labkit."""
        self.store, self.clock = Store(NAME, STEPS, path, "progress"), clock
        self.log: Log[Event] = Log(self.store, "events", "event", event_of)

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.store.path

    @property
    def note(self) -> str:
        """Problems with the file; "" if there are none."""
        return "; ".join(filter(None, (self.store.note, self.log.note)))

    def add(self, report: Report, source: str) -> Attempt | None:
        """Store an attempt and return it; a stub that is not written yet is not stored and gives None."""
        if not_written(report):
            return None
        broken = report.broken
        verdict, cause = (broken.name, broken.cause) if broken else ("", "")
        version = str(vars(sys.modules[__name__.partition(".")[0]]).get("__version__", ""))
        attempt = Attempt(
            **self._begun(report.key), passed=report.passed, starred=report.starred, verdict=verdict,
            cause=sound(cause), seconds=report.seconds, source=sound(source), labkit=version)  # fmt: skip
        self.log.keep([attempt])
        return attempt

    def hint(self, key: str, level: int) -> int:
        """Store that a hint was opened. Returns the highest level opened. ValueError for an unknown level."""
        if level not in LEVELS:
            raise ValueError(f"the hints of an exercise are 1, 2 and 3, got {level!r}")
        self.log.keep([Hint.model_validate({**self._begun(key), "level": int(level)})])
        try:
            return self.hints(key)
        except (OSError, ValueError):  # the hint is kept for the next write, and `note` says so
            return int(level)

    def hints(self, key: str) -> int:
        """The highest level of hint that was opened, 0 for none."""
        return max(self.openings(key), default=0)

    def openings(self, key: str) -> dict[int, int]:
        """The number of times that the hint of each level was opened: {level: count}."""
        return dict(Counter(event.level for event in self.events(key) if isinstance(event, Hint)))

    def solution(self, key: str) -> None:
        """Store that the solution was opened. ValueError if the exercise was never tried."""
        if not self.attempts(key):
            raise ValueError(
                f"exercise {full_key(key)} has not been tried: try it once first, then look at the solution"
            )
        self.log.keep([Solution.model_validate(self._begun(key))])

    def attempts(self, key: str = "") -> list[Attempt]:
        """The attempts at an exercise, or at all of them without a key, in order."""
        return [event for event in self.events(key) if isinstance(event, Attempt)]

    def events(self, key: str = "") -> list[Event]:
        """All stored events, in order; those that another version wrote in its own way are skipped."""
        wanted = full_key(key) if key else ""
        return [item for item in self.log.items() if wanted in ("", item.key)]

    def rows(self, problems: Iterable[Problem]) -> tuple[Standing, ...]:
        """A row for each of these exercises, in their order."""
        by_key: dict[str, list[Event]] = {}
        for event in self.events():
            by_key.setdefault(event.key, []).append(event)
        return tuple(_row(problem, by_key.get(problem.key, ())) for problem in problems)

    def failed_causes(self) -> tuple[Failed, ...]:
        """The broken verdicts of the attempts that did not pass, in order."""
        return tuple(
            Failed(attempt.key, attempt.verdict, attempt.cause, attempt.at)
            for attempt in self.attempts()
            if attempt.verdict
        )

    @property
    def summary(self) -> str:
        """The sums in words: `3 attempts at 2 exercises, 1 passed, 0 starred, 4 hints, 1 solution`"""
        events = self.events()
        tries = [event for event in events if isinstance(event, Attempt)]
        hints = len({(event.key, event.level) for event in events if isinstance(event, Hint)})
        solutions = len({event.key for event in events if isinstance(event, Solution)})
        passed, starred = ({event.key for event in tries if getattr(event, flag)} for flag in ("passed", "starred"))
        return (
            f"{plural(len(tries), 'attempt')} at {plural(len({event.key for event in tries}), 'exercise')}, "
            f"{len(passed)} passed, {len(starred)} starred, {plural(hints, 'hint')}, {plural(solutions, 'solution')}"
        )

    def __repr__(self) -> str:
        return f"<progress: {self.summary}, in {self.path.name}{'; ' + self.note if self.note else ''}>"

    def export(self) -> dict[str, Any]:
        """All events as plain data, for json."""
        return export_of(self.events())

    def load(self, plain: Mapping[str, Any]) -> int:
        """Add the events that `export` gave, unless they are here already. Stores all new ones, or none; returns their
        number.

        ValueError names the field that is wrong; OSError if the file cannot be written now."""
        return self.log.add(events_of(plain))

    def _begun(self, key: str) -> dict[str, Any]:
        return {"uid": uuid.uuid4().hex, "key": full_key(key), "at": self.clock()}


def not_written(report: Report) -> bool:
    """True if the stub itself was judged."""
    broken = report.broken
    return broken is not None and broken.name == "rules" and broken.seen.endswith("is not written yet")


def _row(problem: Problem, events: Sequence[Event]) -> Standing:
    tries = [event for event in events if isinstance(event, Attempt)]
    first = next(
        (place for place, event in enumerate(events) if isinstance(event, Attempt) and event.passed), len(events)
    )
    levels = [event.level for event in events if isinstance(event, Hint)]
    failed = next((attempt for attempt in reversed(tries) if not attempt.passed), None)
    return Standing(
        problem.key, problem.title, problem.lab, problem.minutes, problem.difficulty, problem.importance,
        tries=len(tries), passed=first < len(events), starred=any(attempt.starred for attempt in tries),
        hints=len(set(levels)), openings=len(levels),
        seen=any(isinstance(event, Solution) for event in events[:first]),
        first_passed=events[first].at if first < len(events) else None,
        cause=(failed.cause or f"{failed.verdict or 'nothing'} broken") if failed else "")  # fmt: skip
