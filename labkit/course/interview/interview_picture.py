"""A mock interview as it went: the time of each question against its budget, and which parts of an answer came.

                                                 budget
    1  card        ring-bytes          |###########  |          1:35 of 2:00         5 of 6 points
    2  follow-up   ring-or-tree        |#############|######    3:10 of 2:00 over    2 of 7 points
    3  derivation  bubble              |---                     0:40 of 3:00         skipped

    the law, every symbol named        |########             |  4 of 6, missing in 2

Bars of time are shares of a question's own budget, so that long and short questions stand side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Protocol

from labkit.course.topics.design_cases import DesignCase
from labkit.course.whiteboard.derivation import Derivation
from labkit.view.svg import INK, PALETTE, Picture, box, cut, headline, line, text

KEY, LEFT, FULL, TIME, SCORE = 96.0, 312.0, 240.0, 562.0, 686.0
"""Where a question's name, its bar, its time and its points stand; FULL is twice the budget."""
ROW, MOST = 24.0, 60
WITHIN, OVER, CAME = PALETTE[2], PALETTE[6], PALETTE[0]


class Spoken(Protocol):
    """How one question went (interview_report.py)."""

    @property
    def kind(self) -> str:
        """A card, a follow-up, a derivation, a design case."""

    @property
    def key(self) -> str:
        """What it is called."""

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
        """The points of its rubric; none if it has a bare rating."""

    @property
    def rating(self) -> int:
        """1 to 5."""

    @property
    def skipped(self) -> bool:
        """Whether it was not answered."""


class Judged(Protocol):
    """What a typed answer has of a point (answered.py)."""

    @property
    def reached(self) -> bool | None:
        """Whether it is proposed as reached; None where a text cannot tell."""

    @property
    def evidence(self) -> Sequence[str]:
        """Words of the answer."""

    @property
    def missing(self) -> Sequence[str]:
        """What of the card does not come."""

    @property
    def told(self) -> Sequence[str]:
        """What is nearly right."""


class Told(Protocol):
    """The report of a session."""

    @property
    def asked(self) -> Sequence[Spoken]:
        """Every question, in order."""

    @property
    def by_part(self) -> Mapping[str, tuple[int, int]]:
        """Of each point of the rubrics: how often it came, of how often it could."""

    @property
    def named(self) -> Mapping[str, str]:
        """The same points in words."""

    @property
    def share(self) -> float:
        """What came of whole answers, from 0 to 1."""


class Question(Protocol):
    """What is asked (interview_questions.py)."""

    kind: str
    key: str
    words: str
    budget_s: float
    card: Any
    derivation: Derivation | None
    case: DesignCase | None


class Session(Protocol):
    """A mock interview (interview.py)."""

    minutes: float
    question: Any
    asked: Sequence[Any]

    @property
    def left_s(self) -> float:
        """Seconds left of the session."""

    @property
    def used_s(self) -> float:
        """Seconds of this question, until its answer was shown."""

    @property
    def rubric(self) -> Mapping[str, str]:
        """The points of a whole answer, in words."""

    @property
    def rated(self) -> bool:
        """Whether a formula was checked, which is the rating."""

    @property
    def note(self) -> str:
        """What happened to the clock."""

    def reveal(self) -> Mapping[str, str]:
        """A good answer, part by part."""

    def judge(self, typed: str) -> Mapping[str, Any]:
        """Which points a typed answer contains (Judged), before the answer is shown."""

    def answer(self, formula: str) -> Any:
        """The verdict on a formula."""

    def rate(self, points: Mapping[str, bool] | None = None) -> Any:
        """Rate, and go on."""

    def skip(self) -> Any:
        """Go on without an answer."""

    def end(self) -> None:
        """Stop."""

    def report(self) -> Any:
        """How it went."""


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
    for place, each in enumerate(asked[:MOST], 1):
        body += _question(place, each, y)
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
    told = [f"{each.key}: {_time(each)}, {_score(each)}" for each in asked]
    told += [f"{session.named[name]}: {_counted(*counts)}" for name, counts in parts.items()]
    return Picture("".join(body), y + 4, "; ".join([title, *told]))


def evidence(judged: Judged) -> str:
    """HTML beside a point: the words that say it, what is missing, and what is nearly right."""
    signs = {True: "✓", False: "✗", None: "?"}
    words = "; ".join(judged.evidence) or ("not judged" if judged.reached is None else "not seen in your words")
    lines = [words, *judged.told] if judged.evidence or not judged.told else list(judged.told)
    told = [f"{signs[judged.reached]} {escape(lines[0])}", *(escape(line) for line in lines[1:])]
    if judged.missing and not judged.reached:
        told.append(f"not there: {escape(', '.join(judged.missing))}")
    return "<br>".join(told)


def clock_text(seconds: float) -> str:
    """`1:35`, `62:00`."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02}"


def _question(place: int, each: Spoken, y: float) -> list[str]:
    share = each.seconds / each.budget_s
    wide = max(2.0, FULL * min(share, 2.0) / 2)
    fill = "none" if each.skipped else OVER if _late(each) else WITHIN
    bar = box(LEFT, y, wide, 17, fill, "", f"{each.words} {_time(each)}, {_score(each)}")
    body = [text(22, y + 13, place, "end", 12), text(28, y + 13, each.kind, size=12), bar]
    body.append(text(KEY, y + 13, cut(each.key, 29), size=12))
    if share > 2:  # the bar goes on beyond the page
        x, mid, ink = LEFT + wide, y + 8.5, "currentColor" if each.skipped else INK
        body.append(f"<path d='M{x - 9:g} {mid - 5:g}l7 5l-7 5z' fill='{ink}'/>")
    return [*body, text(TIME, y + 13, _time(each), size=12), text(SCORE, y + 13, _score(each), size=12)]


def _part(name: str, reached: int, of: int, y: float) -> list[str]:
    whole = box(LEFT, y, FULL, 17)
    came = box(LEFT, y, FULL * reached / of, 17, CAME) if reached else ""
    counted = _counted(reached, of)
    return [text(4, y + 13, cut(name, 44), size=12), whole, came, text(TIME, y + 13, counted, size=12)]


def _late(each: Spoken) -> bool:
    return each.seconds > each.budget_s


def _time(each: Spoken) -> str:
    return f"{clock_text(each.seconds)} of {clock_text(each.budget_s)}{' over' * _late(each)}"


def _score(each: Spoken) -> str:
    if each.skipped:
        return "skipped"
    if not each.points:
        return f"rated {each.rating} of 5"
    return f"{sum(each.points.values())} of {len(each.points)} points"


def _counted(reached: int, of: int) -> str:
    return f"{reached} of {of}" + (f", missing in {of - reached}" if reached < of else "")
