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

from labkit.view.svg import INK, PALETTE, Picture, box, cut, headline, line, text

KEY, LEFT, FULL, TIME, SCORE = 96.0, 312.0, 240.0, 562.0, 686.0
"""Where a question's name, bar, time and points begin. FULL is the width of a bar of twice the budget."""
ROW, MOST = 24.0, 60
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
    body, y = [headline(title)], 54.0
    if asked:
        body += [text(LEFT + FULL / 2, 44, "budget", "middle", 12), text(TIME, 44, "time", size=12)]
    for place, question in enumerate(asked[:MOST], 1):
        body += _question(place, question, y)
        y += ROW
    if asked:
        body.append(line(LEFT + FULL / 2, 48, LEFT + FULL / 2, y - 4, "4 3", 1.5))
    if len(asked) > MOST:
        body.append(text(KEY, y + 12, f"... and {len(asked) - MOST} more", size=12))
        y += ROW
    if parts:
        body += [line(4, y + 4, 796, y + 4, width=0.5), text(4, y + 26, "What came of a whole answer", bold=True)]
        y += 38
    for name, (reached, of) in parts.items():
        body += _part(session.named[name], reached, of, y)
        y += ROW
    facts = [f"{question.key}: {_time(question)}, {_score(question)}" for question in asked]
    facts += [f"{session.named[name]}: {_counted(*counts)}" for name, counts in parts.items()]
    return Picture("".join(body), y + 4, "; ".join([title, *facts]))


def clock_text(seconds: float) -> str:
    """Seconds as minutes and seconds: `1:35`, `62:00`."""
    n_seconds = round(seconds)
    return f"{n_seconds // 60}:{n_seconds % 60:02}"


def _question(place: int, question: Spoken, y: float) -> list[str]:
    share = question.seconds / question.budget_s
    wide = max(2.0, FULL * min(share, 2.0) / 2)
    fill = "none" if question.skipped else OVER if _late(question) else WITHIN
    bar = box(LEFT, y, wide, 17, fill, "", f"{question.words} {_time(question)}, {_score(question)}")
    body = [text(22, y + 13, place, "end", 12), text(28, y + 13, question.kind, size=12), bar]
    body.append(text(KEY, y + 13, cut(question.key, 29), size=12))
    if share > 2:  # the bar goes on beyond the page
        x, mid, ink = LEFT + wide, y + 8.5, "currentColor" if question.skipped else INK
        body.append(f"<path d='M{x - 9:g} {mid - 5:g}l7 5l-7 5z' fill='{ink}'/>")
    return [*body, text(TIME, y + 13, _time(question), size=12), text(SCORE, y + 13, _score(question), size=12)]


def _part(name: str, reached: int, of: int, y: float) -> list[str]:
    frame = box(LEFT, y, FULL, 17)
    came = box(LEFT, y, FULL * reached / of, 17, CAME) if reached else ""
    counted = _counted(reached, of)
    return [text(4, y + 13, cut(name, 44), size=12), frame, came, text(TIME, y + 13, counted, size=12)]


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
