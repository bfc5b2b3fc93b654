"""What this learner has done, in a file of theirs: every attempt at an exercise, every hint and solution opened.

    progress = Progress()                          in the user's data folder; Progress(path) elsewhere
    progress.add(report, source)                   an attempt; a stub that is not written yet is none
    progress.hint("03.2", 1); progress.hints("03.2")                          1
    progress.solution("03.2")                      ValueError before the first attempt
    progress.rows(problems())                      a Row for each exercise, in order
    there.load(progress.export())                  on another machine: nothing is lost, nothing is there twice

Order is that of the file, not of the clock, which may jump back; what is loaded comes after what was there. A file that
cannot be written for a while ends no check: what is to be kept waits for the next write, and `.note` tells it. What
happens to a file that is damaged or of a later labkit stands in store.py.
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
    full,
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
    """A verdict that was broken in an attempt; `cause` is "" where none was found."""

    key: str
    verdict: str
    cause: str
    when: datetime


@dataclass(frozen=True)
class Row:
    """How far a learner is with one exercise.

    tries, passed, starred    how many attempts, and whether one of them passed, or has earned the star
    hints, openings           how many of its hints were opened, and how often any was
    seen                      whether the solution was opened before the first attempt that passed
    first_passed              when that was, None if it was not
    minutes                   what it takes, as its author thinks
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
    """The events in one file; `clock` says what time it is."""

    def __init__(
        self, path: Path | str | None = None, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        """Open the file, make it where there is none. ValueError for a file of a later version of labkit."""
        self.store, self.clock = Store(NAME, STEPS, path, "progress"), clock
        self.log: Log[Event] = Log(self.store, "events", "event", event_of)

    @property
    def path(self) -> Path:
        """The file."""
        return self.store.path

    @property
    def note(self) -> str:
        """What happened to it, "" if nothing did."""
        return "; ".join(filter(None, (self.store.note, self.log.told)))

    def add(self, report: Report, source: str) -> Attempt | None:
        """Keep an attempt. Returns it; None for a stub that is not written yet, which is not kept."""
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
        """Keep that a hint was opened. Returns the highest level that was. ValueError if there is no such level."""
        if level not in LEVELS:
            raise ValueError(f"the hints of an exercise are 1, 2 and 3, got {level!r}")
        self.log.keep([Hint.model_validate({**self._begun(key), "level": int(level)})])
        try:
            return self.hints(key)
        except (OSError, ValueError):  # it is kept, and told in `note`
            return int(level)

    def hints(self, key: str) -> int:
        """The highest level of hint that was opened, 0 for none."""
        return max(self.openings(key), default=0)

    def openings(self, key: str) -> dict[int, int]:
        """Level -> how often that hint was opened."""
        return dict(Counter(event.level for event in self.events(key) if isinstance(event, Hint)))

    def solution(self, key: str) -> None:
        """Keep that the solution was opened. ValueError if the exercise was never tried."""
        if not self.attempts(key):
            raise ValueError(f"exercise {full(key)} has not been tried: try it once first, then look at the solution")
        self.log.keep([Solution.model_validate(self._begun(key))])

    def attempts(self, key: str = "") -> list[Attempt]:
        """Those at an exercise (at all of them without a key), in order."""
        return [event for event in self.events(key) if isinstance(event, Attempt)]

    def events(self, key: str = "") -> list[Event]:
        """All that was kept, in order; what another version has written in a way of its own is passed over."""
        wanted = full(key) if key else ""
        return [item for item in self.log.items() if wanted in ("", item.key)]

    def rows(self, problems: Iterable[Problem]) -> tuple[Row, ...]:
        """One for each of these exercises, in their order."""
        by_key: dict[str, list[Event]] = {}
        for event in self.events():
            by_key.setdefault(event.key, []).append(event)
        return tuple(_row(problem, by_key.get(problem.key, ())) for problem in problems)

    def failed_causes(self) -> tuple[Failed, ...]:
        """What was broken in the attempts that did not pass, in order."""
        return tuple(
            Failed(attempt.key, attempt.verdict, attempt.cause, attempt.at)
            for attempt in self.attempts()
            if attempt.verdict
        )

    @property
    def summary(self) -> str:
        """`3 attempts at 2 exercises, 1 passed, 0 starred, 4 hints, 1 solution`"""
        found = self.events()
        tries = [each for each in found if isinstance(each, Attempt)]
        hints = len({(each.key, each.level) for each in found if isinstance(each, Hint)})
        solutions = len({each.key for each in found if isinstance(each, Solution)})
        passed, starred = ({each.key for each in tries if getattr(each, what)} for what in ("passed", "starred"))
        return (
            f"{plural(len(tries), 'attempt')} at {plural(len({each.key for each in tries}), 'exercise')}, "
            f"{len(passed)} passed, {len(starred)} starred, {plural(hints, 'hint')}, {plural(solutions, 'solution')}"
        )

    def __repr__(self) -> str:
        return f"<progress: {self.summary}, in {self.path.name}{'; ' + self.note if self.note else ''}>"

    def export(self) -> dict[str, Any]:
        """All of it as plain data, for json."""
        return export_of(self.events())

    def load(self, plain: Mapping[str, Any]) -> int:
        """Take what `export` gave, but what is here already. Returns how much was new, all of which is kept or nothing.

        ValueError names the field that is not as it should be; OSError if the file cannot be written now."""
        return self.log.add(events_of(plain))

    def _begun(self, key: str) -> dict[str, Any]:
        return {"uid": uuid.uuid4().hex, "key": full(key), "at": self.clock()}


def not_written(report: Report) -> bool:
    """True if what was judged is still the stub."""
    broken = report.broken
    return broken is not None and broken.name == "rules" and broken.seen.endswith("is not written yet")


def _row(problem: Problem, events: Sequence[Event]) -> Row:
    tries = [event for event in events if isinstance(event, Attempt)]
    first = next((place for place, each in enumerate(events) if isinstance(each, Attempt) and each.passed), len(events))
    levels = [event.level for event in events if isinstance(event, Hint)]
    failed = next((each for each in reversed(tries) if not each.passed), None)
    return Row(
        problem.key, problem.title, problem.lab, problem.minutes, problem.difficulty, problem.importance,
        tries=len(tries), passed=first < len(events), starred=any(each.starred for each in tries),
        hints=len(set(levels)), openings=len(levels),
        seen=any(isinstance(event, Solution) for event in events[:first]),
        first_passed=events[first].at if first < len(events) else None,
        cause=(failed.cause or f"{failed.verdict or 'nothing'} broken") if failed else "")  # fmt: skip
