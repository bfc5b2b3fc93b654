"""Cards for people: both faces of one, and pictures of a habit: days, what is coming, and whether it stays.

front(card), back(card)                      HTML
habits(days, coming, asked, today)           a Picture: the last weeks, the next two, expected against remembered
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta
from html import escape
from types import MappingProxyType
from typing import Any, Protocol

from labkit.course.claims.claims_picture import Shown, brief
from labkit.view.svg import PALETTE, Drawing, Picture, text

TITLES = MappingProxyType(
    {"claim": "", "reason": "why", "law": "law", "number": "number", "costs": "trade-off", "limits": "when not"}
)
CLAIM = "style='font-size:15px;font-weight:600;margin:4px 0 10px'"
CELL = "style='text-align:left;vertical-align:top;padding:2px 14px 3px 0;line-height:1.4'"
NAME = "style='text-align:left;vertical-align:top;padding:2px 14px 3px 0;font-weight:400;opacity:.7;white-space:nowrap'"
WEEKS, BINS = 15, (0.0, 0.7, 0.8, 0.9, 1.0)


class Face(Protocol):
    """What a card shows (card.py)."""

    front: str
    axes: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]
    wrong: Any
    lab: tuple[str, ...]
    derive: str
    tags: tuple[str, ...]

    def said(self, text: str) -> str:
        """A text with its figures."""

    def parts(self) -> dict[str, str]:
        """The answer, part by part."""

    def audited(self) -> tuple[Shown, ...]:
        """Claims on what it says that were put to the test."""

    def drawn(self) -> Drawing | None:
        """Its picture, None if it has none."""


class Asked(Protocol):
    """A review: how likely it was that the card was known, and whether it was."""

    @property
    def expected(self) -> float:
        """From 0 to 1."""

    @property
    def came(self) -> bool:
        """It was remembered."""


def front(card: Face) -> str:
    """The question."""
    return f'<div class="lk-card-front">{formulas(card.said(card.front))}</div>'


def back(card: Face) -> str:
    """The answer: claim first, then its parts, a table where things are compared, what one often hears instead, and
    what came of it when it was put to the test."""
    parts = card.parts()
    body = [f'<p class="lk-card-claim" {CLAIM}>{formulas(parts.pop("claim"))}</p>']
    if card.axes:
        body.append(_table(card))
    rows = "".join(
        f"<tr><th scope='row' {NAME}>{TITLES[name]}</th><td {CELL}>{formulas(said)}</td></tr>"
        for name, said in parts.items()
    )
    if card.wrong:
        said, but = (formulas(card.said(words)) for words in (card.wrong.said, card.wrong.but))
        rows += (
            f"<tr class='lk-card-wrong'><th scope='row' {NAME}>often heard</th><td {CELL}><q>{said}</q> {but}</td></tr>"
        )
    if proofs := evidence(card.audited()):
        rows += f"<tr class='lk-card-tested'><th scope='row' {NAME}>tested</th><td {CELL}>{proofs}</td></tr>"
    body.append(f"<table>{rows}</table>{card.drawn() or ''}")
    places = [f'<a data-cell="{escape(cell)}">lab {cell[:2]}, cell {escape(cell)}</a>' for cell in card.lab]
    if card.derive:
        places.append(f"whiteboard: {escape(card.derive)}")
    if places:
        body.append(f'<p class="lk-card-lab">shown by {"; ".join(places)}</p>')
    return "".join(body)


def habits(days: Mapping[date, int], coming: Sequence[int], asked: Sequence[Asked], today: date) -> Picture:
    """Reviews of each day of the last weeks; cards due today and on the days after; expected against remembered.

    The third says whether the schedule fits this learner: of the cards that FSRS expected to be known with 80 to 90
    percent, 80 to 90 percent should have been."""
    total, late = sum(days.values()), len(coming)
    known = f"{sum(each.came for each in asked) / len(asked):.0%} of {len(asked)} remembered" if asked else "none yet"
    body = [text(4, 18, f"{total:,} reviews", bold=True), *_calendar(days, today),
            text(300, 18, f"{sum(coming)} due in {late} days", bold=True), *_forecast(coming),
            text(566, 18, known, bold=True), *_retention(asked)]  # fmt: skip
    told = "; ".join(f"{words}: {came:.0%} of {count}" for words, _, came, count in _bins(asked) if count)
    label = (
        f"{total} reviews in {WEEKS} weeks; due by day: {', '.join(map(str, coming))}; expected and remembered: {told}"
    )
    return Picture("".join(body), 196, label)


def _calendar(days: Mapping[date, int], today: date) -> list[str]:
    """A square a day, a column a week, darker with more reviews."""
    first = today - timedelta(days=today.weekday() + 7 * (WEEKS - 1))
    most, shapes = max(days.values(), default=0), []
    for place in range((today - first).days + 1):
        day = first + timedelta(days=place)
        count = days.get(day, 0)
        words = f"{day:%a %d %b %Y}: {count} review{'' if count == 1 else 's'}"
        opacity = 0.15 + 0.85 * count / most if count else 0.12
        fill = PALETTE[2] if count else "currentColor"
        x, y = 4 + place // 7 * 18, 34 + place % 7 * 18
        shapes.append(f'<rect x="{x}" y="{y}" width="15" height="15" rx="3" fill="{fill}" fill-opacity="{opacity:.2f}">'
                      f"<title>{words}</title></rect>")  # fmt: skip
    return [*shapes, text(4, 182, "a square a day, today last", size=12)]


def _forecast(coming: Sequence[int]) -> list[str]:
    most, wide = max([*coming, 1]), 232 / max(1, len(coming))
    shapes = []
    for place, count in enumerate(coming):
        tall, fill = 110 * count / most, PALETTE[5] if place else PALETTE[6]
        x, when = 300 + place * wide, "today" if place == 0 else f"in {place} day{'s' * (place > 1)}"
        shapes.append(f'<rect x="{x:.1f}" y="{158 - tall:.1f}" width="{wide - 3:.1f}" height="{tall + 1:.1f}" '
                      f'fill="{fill}"><title>{when}: {count}</title></rect>')  # fmt: skip
        if count:
            shapes.append(text(x + wide / 2 - 1.5, 153 - tall, count, "middle", 11))
    return [*shapes, text(300, 176, "today", size=12), text(529, 176, f"+{len(coming) - 1} days", "end", 12)]


def _retention(asked: Sequence[Asked]) -> list[str]:
    """Two bars a bin: what FSRS expected, and what came."""
    shapes = [text(566, 182, "expected by FSRS, and remembered", size=12)]
    for place, (words, expected, came, count) in enumerate(_bins(asked)):
        x = 566 + place * 58
        shapes.append(text(x + 22, 166, words, "middle", 11))
        for shift, share, fill in ((0, expected, PALETTE[7]), (22, came, PALETTE[2])) if count else ():
            tall = 104 * share
            shapes.append(f'<rect x="{x + shift}" y="{152 - tall:.1f}" width="20" height="{tall:.1f}" fill="{fill}">'
                          f"<title>{words} expected, {count} reviews: {share:.0%}</title></rect>")  # fmt: skip
            shapes.append(text(x + shift + 10, 148 - tall, f"{share:.0%}"[:-1], "middle", 11))
    return shapes


def _bins(asked: Sequence[Asked]) -> list[tuple[str, float, float, int]]:
    """By what was expected: (words, mean expected, share that came, how many)."""
    found = []
    for low, high in zip(BINS, BINS[1:], strict=False):
        mine = [each for each in asked if low <= each.expected < high or (high == 1 and each.expected == 1)]
        n = max(1, len(mine))
        words = f"< {high:.0%}" if low == 0 else f"{low * 100:.0f}–{high:.0%}"
        found.append((words, sum(each.expected for each in mine) / n, sum(each.came for each in mine) / n, len(mine)))
    return found


def evidence(results: Iterable[Shown]) -> str:
    """What the audit found on what a card says, a line for each claim; "" if there is none."""
    return "".join(f"<div>{escape(brief(each), quote=False)}</div>" for each in results)


def _table(card: Face) -> str:
    head = "".join(f"<th scope='col' {CELL}>{formulas(card.said(axis))}</th>" for axis in card.axes)
    rows = ""
    for name, cells in card.rows.items():
        rows += f"<tr><th scope='row' {CELL}>{formulas(card.said(name))}</th>"
        rows += "".join(f"<td {CELL}>{formulas(card.said(cell))}</td>" for cell in cells) + "</tr>"
    return f'<table class="lk-card-axes"><tr><td></td>{head}</tr>{rows}</table>'


def formulas(said: str) -> str:
    """Text as HTML, with what stands between backticks as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(said, quote=False))
