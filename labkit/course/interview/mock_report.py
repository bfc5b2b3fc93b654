"""The report of a mock interview, its place among the learner's own files, and the second try.

    report.phases            points and time of each phase           report.share      of all points, 0 to 1
    report.topics            {topic: (reached, of)}, the weakest first
    report.mends             the three weakest topics, each with the cards, labs and exercises that mend it
    MockLog().keep(report)   in the user's data folder, beside progress and cards
    MockLog().second_try()   another case of the same level with other changes, and from when on it is worth a try

Cards that mend a topic have it as a tag, and name cells of labs. Exercises that practise it are in mock_mends.yaml.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import yaml
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from labkit.course.cards.card_faces import formulas
from labkit.course.cards.deck import Deck, the_deck
from labkit.course.exercises.catalogue import folders
from labkit.course.interview.interview_picture import clock_text
from labkit.course.interview.mock_script import other
from labkit.course.learner.log import Log
from labkit.course.learner.store import Store
from labkit.course.numbers import number_of
from labkit.plan.words import plural

NAME = "interviews.sqlite3"
STEPS = (
    ("CREATE TABLE interviews (id INTEGER PRIMARY KEY AUTOINCREMENT, uid TEXT NOT NULL UNIQUE, said TEXT NOT NULL)",),
)
A_WEEK = timedelta(days=7)
MENDS = Path(__file__).with_name("mock_mends.yaml")
NAMES: Mapping[str, str] = MappingProxyType(
    {"deeper": "deeper on", "missed": "hint on", "what": "change", "mend": "repair of change"}
)
"""Words for the kind of a point that has one before its name."""
WEAKEST, MOST_CARDS, MOST_LABS, MOST_CELLS, MOST_EXERCISES = 3, 4, 2, 4, 3


@dataclass(frozen=True)
class ScoredPoint:
    """One point as it went: `reached` is 0, 1, or a half where it came with help."""

    name: str
    words: str
    topics: tuple[str, ...]
    reached: float


@dataclass(frozen=True)
class PhaseScore:
    """One phase as it went, with its seconds and all its points."""

    name: str
    title: str
    budget_s: float
    seconds: float
    points: tuple[ScoredPoint, ...]

    @property
    def reached(self) -> float:
        """The points that were reached."""
        return sum(point.reached for point in self.points)


class TopicMend(NamedTuple):
    """What mends a topic: `reached` of so many points, cards as (id, front), labs, cells of them, and exercises."""

    topic: str
    reached: float
    of: int
    cards: tuple[tuple[str, str], ...]
    labs: tuple[str, ...]
    cells: tuple[str, ...]
    exercises: tuple[str, ...]


class MockReport(BaseModel):
    """A mock interview as it went; it can be stored and read again."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    uid: str = Field(min_length=16, max_length=64)
    at: AwareDatetime
    case: str
    level: int
    seed: int
    changes: tuple[str, ...]
    phases: tuple[PhaseScore, ...]

    @property
    def share(self) -> float:
        """The share of all points that was reached, 0 to 1."""
        return sum(phase.reached for phase in self.phases) / max(1, sum(len(phase.points) for phase in self.phases))

    @property
    def topics(self) -> Mapping[str, tuple[float, int]]:
        """For each topic (points reached, points), the weakest first.

        A topic with one point says less than one with many, so that it is ranked nearer to a half."""
        counts: dict[str, tuple[float, int]] = {}
        for point in (point for phase in self.phases for point in phase.points):
            for topic in point.topics:
                reached, of = counts.get(topic, (0.0, 0))
                counts[topic] = (reached + point.reached, of + 1)
        return MappingProxyType(dict(sorted(counts.items(), key=lambda row: (row[1][0] + 1) / (row[1][1] + 2))))

    @property
    def mends(self) -> tuple[TopicMend, ...]:
        """The weakest topics, three at most, with what mends each; a topic of which nothing was missed is not weak."""
        deck = the_deck()
        weak = [(topic, *counts) for topic, counts in self.topics.items() if counts[0] < counts[1]]
        return tuple(mend_of(topic, deck, reached, of) for topic, reached, of in weak[:WEAKEST])

    @property
    def judgement(self) -> str:
        """The result in a paragraph."""
        if not self.phases:
            return "No phase is over yet."
        reached, of = sum(phase.reached for phase in self.phases), sum(len(phase.points) for phase in self.phases)
        seconds = sum(phase.seconds for phase in self.phases)
        sentences = [f"{reached:g} of {of} points, {self.share:.0%}, in {clock_text(seconds)}"]
        worst = min(self.phases, key=lambda phase: phase.reached / len(phase.points))
        if worst.reached < len(worst.points):
            sentences.append(f"Least came in {worst.title!r}: {worst.reached:g} of {len(worst.points)}")
        late = [phase for phase in self.phases if phase.seconds > phase.budget_s]
        sentences += [
            f"{phase.title!r} took {clock_text(phase.seconds)} of {clock_text(phase.budget_s)}" for phase in late
        ] or ["Every phase was within its time"]
        if names := [mend.topic for mend in self.mends]:
            sentences.append(f"Weakest: {', '.join(names)}")
        return ". ".join(sentences) + "."

    def __str__(self) -> str:
        rows = [
            f"{mend.topic} ({mend.reached:g} of {mend.of}): cards {', '.join(id for id, _ in mend.cards)}; "
            f"labs {', '.join(mend.labs)} ({', '.join(mend.cells)}); exercises {', '.join(mend.exercises) or 'none'}"
            for mend in self.mends
        ]
        return "\n".join([self.judgement, *rows])

    def _repr_html_(self) -> str:
        head = _cells("th", "phase", "points", "time", "missed")
        rows = "".join(f"<tr>{_cells('td', *_row(phase))}</tr>" for phase in self.phases)
        phases = f"<table style='border-collapse:collapse'><tr>{head}</tr>{rows}</table>"
        mends = "".join(_mended(mend) for mend in self.mends)
        return f"<div style='max-width:860px;line-height:1.4'><p>{escape(self.judgement)}</p>{phases}{mends}</div>"


@cache
def practised() -> Mapping[str, tuple[str, ...]]:
    """For each topic the keys of exercises that practise it, the plainest first."""
    topics = yaml.safe_load(MENDS.read_text(encoding="utf-8"))
    return MappingProxyType({topic: tuple(keys) for topic, keys in topics.items()})


def mend_of(topic: str, deck: Deck, reached: float = 0.0, of: int = 0) -> TopicMend:
    """What mends a topic: its easiest cards, the labs that most of its cards name, cells of these, and its exercises.

    ValueError, with the nearest tag, for a topic that no card has."""
    cards = sorted(deck.of({topic}), key=lambda card: card.difficulty)
    cells = Counter(cell for card in cards for cell in card.lab)
    by_lab = Counter(number_of(cell) for cell in cells.elements())
    labs = tuple(lab for lab, _ in by_lab.most_common(MOST_LABS))
    shown = tuple(cell for cell, _ in cells.most_common() if number_of(cell) in labs)[:MOST_CELLS]
    keys = practised().get(topic) or [key for lab in labs for key, _ in folders() if key.startswith(f"{lab}.")]
    fronts = tuple((card.id, card.as_sentence(card.front)) for card in cards[:MOST_CARDS])
    return TopicMend(topic, reached, of, fronts, labs, shown, tuple(keys[:MOST_EXERCISES]))


class SecondTry(NamedTuple):
    """What to try next: a case of the same level, the changes that were asked for already, and from when on."""

    case: str
    without: tuple[str, ...]
    due: datetime

    def words(self, now: datetime) -> str:
        """When to try again, in a sentence; `now` has a time zone."""
        days = -(-(self.due - now) // timedelta(days=1))
        when = f"in {days} day{'' if days == 1 else 's'}, on {self.due:%Y-%m-%d}" if days > 0 else "now"
        return f"Second try {when}: the case {self.case!r}, as difficult as the last one, with other changes."


class MockLog:
    """The mock interviews of this learner, in one file; `note` tells of problems with it."""

    def __init__(self, path: Path | str | None = None) -> None:
        """Open the file, or create it, in the user's data folder if `path` is None.

        ValueError for a file of a later version of labkit."""
        self.store = Store(NAME, STEPS, path, "list of mock interviews")
        self.log = Log(self.store, "interviews", "mock interview", MockReport.model_validate_json)

    @property
    def note(self) -> str:
        """Problems with the file; "" if there are none."""
        return "; ".join(filter(None, (self.store.note, self.log.note)))

    def keep(self, report: MockReport) -> None:
        """Store a report; the same one twice is stored once. ValueError for one in which no phase is over."""
        if not report.phases:
            raise ValueError("no phase of this interview is over: there is nothing to keep")
        self.log.keep([report])

    def reports(self) -> list[MockReport]:
        """All reports, in the order in which they were stored."""
        return self.log.items()

    def second_try(self) -> SecondTry:
        """What to try after the last interview. ValueError if there was none."""
        reports = self.reports()
        if not reports:
            raise ValueError("there was no mock interview yet: a second try comes after the first")
        last = reports[-1]
        return SecondTry(other(last.case), last.changes, last.at + A_WEEK)


def _cells(kind: str, *texts: str) -> str:
    return "".join(f"<{kind} style='text-align:left;vertical-align:top;padding:.15em .7em'>{text}</{kind}>"
                   for text in texts)  # fmt: skip


def _row(phase: PhaseScore) -> tuple[str, str, str, str]:
    times = f"{clock_text(phase.seconds)} of {clock_text(phase.budget_s)}"
    return escape(phase.title), f"{phase.reached:g} of {len(phase.points)}", times, _missed(phase.points)


def _missed(points: tuple[ScoredPoint, ...]) -> str:
    """The names of what did not come, and of what came with help; their words are folded below."""
    short = [point for point in points if point.reached < 1]
    if not short:
        return "nothing"
    parts = [
        words + ", ".join(_name(point) for point in short if (point.reached > 0) == helped)
        for words, helped in (("", False), ("with help: ", True))
        if any((point.reached > 0) == helped for point in short)
    ]
    rows = "".join(f"<li><b>{escape(_name(point))}</b>: {formulas(point.words)}</li>" for point in short)
    return f"<details><summary>{escape('; '.join(parts))}</summary><ul>{rows}</ul></details>"


def _name(point: ScoredPoint) -> str:
    """`links`, `deeper on links`, `hint on links`, `change 1`, `repair of change 1`."""
    kind, _, rest = point.name.partition(" ")
    return f"{NAMES[kind]} {rest}" if rest else point.name


def _mended(mend: TopicMend) -> str:
    cards = "".join(f"<li><code>{escape(id)}</code> {escape(front)}</li>" for id, front in mend.cards)
    cells = ", ".join(f"<a data-cell='{escape(cell)}'>{escape(cell)}</a>" for cell in mend.cells)
    exercises = ", ".join(f"<code>{escape(key)}</code>" for key in mend.exercises) or "none"
    return (
        f"<p><b>{escape(mend.topic)}</b>, {mend.reached:g} of {plural(mend.of, 'point')}. "
        f"Labs {escape(', '.join(mend.labs))}: {cells}. Exercises: {exercises}. Cards:</p><ul>{cards}</ul>"
    )
