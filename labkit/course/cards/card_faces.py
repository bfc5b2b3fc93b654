"""Cards for people: both faces of a card, and a picture of the learner's reviews.

front(card), back(card)                      HTML
habits(days, coming, asked, today)           a Picture: past weeks, the next two, and expected against actual recall
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta
from html import escape
from types import MappingProxyType
from typing import Any, Protocol

from labkit.course.claims.claims_picture import Shown, brief
from labkit.course.numbers import number_of
from labkit.view.svg import PALETTE, Drawing, Picture, text

TITLES = MappingProxyType(
    {"claim": "", "reason": "why", "law": "law", "number": "number", "costs": "trade-off", "limits": "when not"}
)
CLAIM = "style='font-size:15px;font-weight:600;margin:4px 0 10px'"
CELL = "style='text-align:left;vertical-align:top;padding:2px 14px 3px 0;line-height:1.4'"
NAME = "style='text-align:left;vertical-align:top;padding:2px 14px 3px 0;font-weight:400;opacity:.7;white-space:nowrap'"
WEEKS, BINS = 15, (0.0, 0.7, 0.8, 0.9, 1.0)


class Face(Protocol):
    """The fields of a card (card.py) that its two faces show."""

    front: str
    axes: tuple[str, ...]
    wrong: Any
    lab: tuple[str, ...]
    derive: str
    tags: tuple[str, ...]

    @property
    def rows(self) -> Mapping[str, tuple[str, ...]]:
        """The rows of its table by name; each has a cell for each of `axes`."""

    def as_sentence(self, text: str) -> str:
        """A text with its figures filled in."""

    def parts(self) -> dict[str, str]:
        """The answer, part by part."""

    def audited(self) -> tuple[Shown, ...]:
        """Results of the audited claims behind the card."""

    def drawn(self) -> Drawing | None:
        """The card's picture, None if it has none."""


class Asked(Protocol):
    """A review: the expected recall, and whether the learner knew the card."""

    @property
    def expected(self) -> float:
        """The probability of recall, from 0 to 1."""

    @property
    def came(self) -> bool:
        """True if the card was remembered."""


def front(card: Face) -> str:
    """The question."""
    return f'<div class="lk-card-front">{formulas(card.as_sentence(card.front))}</div>'


def back(card: Face) -> str:
    """The answer: claim first, then its parts, a table where things are compared, the wrong claim that one often hears,
    and the results of the audit."""
    parts = card.parts()
    body = [f'<p class="lk-card-claim" {CLAIM}>{formulas(parts.pop("claim"))}</p>']
    if card.axes:
        body.append(_table(card))
    rows = "".join(
        f"<tr><th scope='row' {NAME}>{TITLES[name]}</th><td {CELL}>{formulas(words)}</td></tr>"
        for name, words in parts.items()
    )
    if card.wrong:
        myth, but = (formulas(card.as_sentence(words)) for words in (card.wrong.myth, card.wrong.but))
        rows += (
            f"<tr class='lk-card-wrong'><th scope='row' {NAME}>often heard</th><td {CELL}><q>{myth}</q> {but}</td></tr>"
        )
    if proofs := evidence(card.audited()):
        rows += f"<tr class='lk-card-tested'><th scope='row' {NAME}>tested</th><td {CELL}>{proofs}</td></tr>"
    body.append(f"<table>{rows}</table>{card.drawn() or ''}")
    places = [f'<a data-cell="{escape(cell)}">lab {number_of(cell)}, cell {escape(cell)}</a>' for cell in card.lab]
    if card.derive:
        places.append(f"whiteboard: {escape(card.derive)}")
    if places:
        body.append(f'<p class="lk-card-lab">shown by {"; ".join(places)}</p>')
    return "".join(body)


def habits(days: Mapping[date, int], coming: Sequence[int], asked: Sequence[Asked], today: date) -> Picture:
    """Reviews of each day of the past weeks; cards due today and on the next days; expected against actual recall.

    The third part shows whether the schedule fits this learner: of the cards that FSRS expected to be known with 80 to
    90 percent, 80 to 90 percent should have been known."""
    total, late = sum(days.values()), len(coming)
    known = (
        f"{sum(review.came for review in asked) / len(asked):.0%} of {len(asked)} remembered" if asked else "none yet"
    )
    body = [text(4, 18, f"{total:,} reviews", bold=True), *_calendar(days, today),
            text(300, 18, f"{sum(coming)} due in {late} days", bold=True), *_forecast(coming),
            text(566, 18, known, bold=True), *_retention(asked)]  # fmt: skip
    stats = "; ".join(f"{words}: {recalled:.0%} of {count}" for words, _, recalled, count in _bins(asked) if count)
    label = (
        f"{total} reviews in {WEEKS} weeks; due by day: {', '.join(map(str, coming))}; expected and remembered: {stats}"
    )
    return Picture("".join(body), 196, label)


def _calendar(days: Mapping[date, int], today: date) -> list[str]:
    """A square for each day, a column for each week, darker with more reviews."""
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
    """Two bars for each bin: the recall that FSRS expected, and the actual one."""
    shapes = [text(566, 182, "expected by FSRS, and remembered", size=12)]
    for place, (words, expected, recalled, count) in enumerate(_bins(asked)):
        x = 566 + place * 58
        shapes.append(text(x + 22, 166, words, "middle", 11))
        for shift, share, fill in ((0, expected, PALETTE[7]), (22, recalled, PALETTE[2])) if count else ():
            tall = 104 * share
            shapes.append(f'<rect x="{x + shift}" y="{152 - tall:.1f}" width="20" height="{tall:.1f}" fill="{fill}">'
                          f"<title>{words} expected, {count} reviews: {share:.0%}</title></rect>")  # fmt: skip
            shapes.append(text(x + shift + 10, 148 - tall, f"{share:.0%}"[:-1], "middle", 11))
    return shapes


def _bins(asked: Sequence[Asked]) -> list[tuple[str, float, float, int]]:
    """The reviews in bins of expected recall: (words, mean expected, share that was known, how many)."""
    rows = []
    for low, high in zip(BINS, BINS[1:], strict=False):
        reviews = [review for review in asked if low <= review.expected < high or (high == 1 and review.expected == 1)]
        n = max(1, len(reviews))
        words = f"< {high:.0%}" if low == 0 else f"{low * 100:.0f}–{high:.0%}"
        rows.append(
            (
                words,
                sum(review.expected for review in reviews) / n,
                sum(review.came for review in reviews) / n,
                len(reviews),
            )
        )
    return rows


def evidence(results: Iterable[Shown]) -> str:
    """The audit's results on a card, a line for each claim; "" if there are none."""
    return "".join(f"<div>{escape(brief(result), quote=False)}</div>" for result in results)


def _table(card: Face) -> str:
    head = "".join(f"<th scope='col' {CELL}>{formulas(card.as_sentence(axis))}</th>" for axis in card.axes)
    rows = ""
    for name, cells in card.rows.items():
        rows += f"<tr><th scope='row' {CELL}>{formulas(card.as_sentence(name))}</th>"
        rows += "".join(f"<td {CELL}>{formulas(card.as_sentence(cell))}</td>" for cell in cells) + "</tr>"
    return f'<table class="lk-card-axes"><tr><td></td>{head}</tr>{rows}</table>'


def formulas(text: str) -> str:
    """Text as HTML, with what stands in backticks as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text, quote=False))
