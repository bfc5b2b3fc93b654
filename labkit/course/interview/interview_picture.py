"""A mock interview as it went: the time of each question against its budget, and the parts of answers that came.

                                                 budget
    1  card        ring-bytes          |###########  |          1:35 of 2:00         5 of 6 points
    2  follow-up   ring-or-tree        |#############|######    3:10 of 2:00 over    2 of 7 points
    3  derivation  bubble              |---                     0:40 of 3:00         skipped

    the law, every symbol named        |########             |  4 of 6, missing in 2

Bars of time are shares of a question's own budget, so that long and short questions can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from labkit.view.panels import Column, Panel, over, page, phrase, rule, table, tile
from labkit.view.svg import INK, PALETTE, Picture, box, cut, line

FULL, MOST = 240.0, 60
"""The width of a bar of twice the budget, and the most questions that are drawn."""
QUESTIONS = (Column(width=18, anchor="end"), Column(width=66), Column(width=200), Column("budget", "middle", FULL),
             Column("time"), Column())  # fmt: skip
PARTS = (Column(width=312), Column(width=FULL), Column())
WITHIN, OVER, CAME = PALETTE[2], PALETTE[6], PALETTE[0]


class Spoken(Protocol):
    """One question as it went; `Spoken` in interview_report.py is one.

    It cannot be imported here, since interview_report.py imports this file."""

    @property
    def kind(self) -> str:
        """The kind of question: "card", "follow-up", "derivation" or "design case"."""

    @property
    def key(self) -> str:
        """The id of its card, or the name of its derivation or case."""

    @property
    def words(self) -> str:
        """The question."""

    @property
    def budget_s(self) -> float:
        """Seconds that it may take."""

    @property
    def seconds(self) -> float:
        """Seconds that it took."""

    @property
    def points(self) -> Mapping[str, bool]:
        """The points of its rubric, True for each that was reached; empty if it only has a rating."""

    @property
    def rating(self) -> int:
        """The rating, from 1 to 5."""

    @property
    def skipped(self) -> bool:
        """True if the question was not answered."""


class Told(Protocol):
    """The report of a session; `InterviewReport` in interview_report.py is one, and imports this file."""

    @property
    def asked(self) -> Sequence[Spoken]:
        """Every question, in order."""

    @property
    def by_part(self) -> Mapping[str, tuple[int, int]]:
        """For each point of the rubrics: how often it was reached, and how often it could have been."""

    @property
    def named(self) -> Mapping[str, str]:
        """The same points in words."""

    @property
    def share(self) -> float:
        """Points reached, as a share of all points, from 0 to 1."""


def spoken(session: Told) -> Picture:
    """Time against budget, question by question; below it the points, part by part."""
    asked, parts = session.asked, session.by_part
    many = f"{len(asked)} question{'' if len(asked) == 1 else 's'}"
    title = (
        f"Mock interview: {many}, {session.share:.0%} of whole answers" if asked else "Mock interview: no answer yet"
    )
    drawn = []
    if asked:
        rows = [_question(place, question) for place, question in enumerate(asked[:MOST], 1)]
        drawn.append(table(QUESTIONS, rows, 12, gap=6, lead=1))
    if len(asked) > MOST:
        drawn.append(phrase(f"... and {len(asked) - MOST} more", 12))
    if parts:
        drawn += [rule(stroke=0.5), phrase("What came of a whole answer", bold=True)]
        drawn.append(
            table(PARTS, (_part(session.named[name], *counts) for name, counts in parts.items()), 12, gap=6, lead=7)
        )
    facts = [f"{question.key}: {_time(question)}, {_score(question)}" for question in asked]
    facts += [f"{session.named[name]}: {_counted(*counts)}" for name, counts in parts.items()]
    return page(title, *drawn, label="; ".join([title, *facts]))


def clock_text(seconds: float) -> str:
    """Seconds as minutes and seconds: `1:35`, `62:00`."""
    n_seconds = round(seconds)
    return f"{n_seconds // 60}:{n_seconds % 60:02}"


def _question(place: int, question: Spoken) -> tuple[str | Panel, ...]:
    share = question.seconds / question.budget_s
    wide, beyond = max(2.0, FULL * min(share, 2.0) / 2), share > 2
    fill = "none" if question.skipped else OVER if _late(question) else WITHIN
    ink = "currentColor" if question.skipped else INK
    hover = f"{question.words} {_time(question)}, {_score(question)}"

    def bar(x: float, y: float) -> str:
        """The time, with a mark at the budget, and an arrowhead where it goes on beyond the page."""
        budget = line(x + FULL / 2, y, x + FULL / 2, y + 23, "4 3", 1.5)
        head = f"<path d='M{x + wide - 9:g} {y + 6.5:g}l7 5l-7 5z' fill='{ink}'/>" if beyond else ""
        return box(x, y + 3, wide, 17, fill, "", hover) + head + budget

    key = cut(question.key, 29)
    return f"{place}", question.kind, key, Panel(FULL, 23.0, bar), _time(question), _score(question)


def _part(name: str, reached: int, of: int) -> tuple[str | Panel, ...]:
    frame, came = tile(FULL, 17), tile(FULL * reached / of, 17, CAME)
    return cut(name, 44), over(frame, came) if reached else frame, _counted(reached, of)


def _late(question: Spoken) -> bool:
    return question.seconds > question.budget_s


def _time(question: Spoken) -> str:
    return f"{clock_text(question.seconds)} of {clock_text(question.budget_s)}{' over' * _late(question)}"


def _score(question: Spoken) -> str:
    if question.skipped:
        return "skipped"
    if not question.points:
        return f"rated {question.rating} of 5"
    return f"{sum(question.points.values())} of {len(question.points)} points"


def _counted(reached: int, of: int) -> str:
    return f"{reached} of {of}" + (f", missing in {of - reached}" if reached < of else "")
