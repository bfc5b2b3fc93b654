"""A learner's progress: a row for each lab, a box for each exercise, and what to do next.

    lab 03     ┌ 03.1   ✓ ┐ ┌ 03.2   ★ ┐ ┌╌03.3╌╌╌◐╌┐ ┌╌03.4╌╌╌╌╌┐
    2 of 4     │ done, 2  │ │ star, 5  │ ╎ tried, 3 ╎ ╎ not yet   ╎     a number: attempts; ▴ a hint was opened
               └──────────┘ └──────────┘ └╌╌╌╌╌╌╌╌╌╌┘ └╌╌╌╌╌╌╌╌╌╌╌┘     ◇ the solution was seen before passing

A word, a sign and the edge of the box say the same as its colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import partial
from html import escape
from typing import Protocol

from labkit.view.panels import Panel, below, beside, page, phrase, rule
from labkit.view.svg import INK, PALETTE, Picture, box, cut, text
from labkit.view.units import plural

DONE, STARRED, TRIED, NOT_YET = "done", "starred", "tried", "not yet"
STATES = (DONE, STARRED, TRIED, NOT_YET)
COLOURS = (PALETTE[0], PALETTE[4], PALETTE[1], "none")
NAME, WIDE, TALL, PER_LINE = 68.0, 97.0, 42.0, 7
"""The width of a lab's name, the width and height of an exercise's box, and the boxes in a line."""
EASY = ("", "very easy", "easy", "medium", "hard", "very hard")


class Standing(Protocol):
    """A learner's standing in one exercise; `labkit.course.learner.progress.Standing` is one."""

    @property
    def key(self) -> str:
        """Lab and place, "03.2"."""

    @property
    def title(self) -> str:
        """The title of the exercise."""

    @property
    def lab(self) -> str:
        """The lab, "03"."""

    @property
    def minutes(self) -> int:
        """The minutes that the exercise should take."""

    @property
    def difficulty(self) -> int:
        """The difficulty, from 1 to 5."""

    @property
    def importance(self) -> int:
        """The importance, from 1 to 5."""

    @property
    def tries(self) -> int:
        """The number of attempts."""

    @property
    def passed(self) -> bool:
        """True if one of the attempts passed."""

    @property
    def starred(self) -> bool:
        """True if one of the attempts has earned the star."""

    @property
    def hints(self) -> int:
        """The number of hints that were opened."""

    @property
    def seen(self) -> bool:
        """True if the solution was opened before an attempt passed."""

    @property
    def first_passed(self) -> datetime | None:
        """The time at which an attempt first passed; None if none has."""

    @property
    def cause(self) -> str:
        """The cause that the judge named for the last attempt that failed."""


def standing(row: Standing) -> str:
    """The state of an exercise: `done`, `starred`, `tried` or `not yet`."""
    if row.starred:
        return STARRED
    return DONE if row.passed else TRIED if row.tries else NOT_YET


def next_up(rows: Iterable[Standing], count: int = 5) -> list[Standing]:
    """Up to `count` exercises to do next: those tried but not passed first, then the most important, of equally
    important ones the easiest, and equally easy ones in the order of the labs."""
    left = [row for row in rows if not row.passed]
    return sorted(left, key=lambda row: (not row.tries, -row.importance, row.difficulty))[:count]


def totals(rows: Sequence[Standing]) -> str:
    """The totals in a line: `2 of 5 exercises done, 1 starred, 1 tried; 3 hints; about 45 min to go`."""
    done, tried = sum(row.passed for row in rows), sum(standing(row) == TRIED for row in rows)
    hints, starred = sum(row.hints for row in rows), sum(row.starred for row in rows)
    left = sum(row.minutes for row in rows if not row.passed)
    words = f"{done} of {plural(len(rows), 'exercise')} done, {starred} starred, {tried} tried; {plural(hints, 'hint')}"
    return words + (f"; about {_time(left)} to go" if left else "; nothing is left" if rows else "")


def progress(rows: Sequence[Standing], title: str = "", n_next: int = 5) -> Picture:
    """The totals, all labs of these exercises, and below them up to `n_next` exercises to do next."""
    words = totals(rows)
    labs = []
    for lab in dict.fromkeys(row.lab for row in rows):
        lab_rows = [row for row in rows if row.lab == lab]
        count = f"{sum(row.passed for row in lab_rows)} of {len(lab_rows)}"
        name = below(phrase(f"lab {lab}", bold=True, width=NAME), phrase(count, 12))
        boxes = [Panel(WIDE, TALL, partial(_box, row)) for row in lab_rows]
        lines = (beside(*boxes[k : k + PER_LINE], gap=6) for k in range(0, len(boxes), PER_LINE))
        labs.append(beside(name, below(*lines, gap=5), top=True))
    coming = next_up(rows, n_next)
    steps = []
    for place, row in enumerate(coming, 1):
        steps.append(phrase(cut(f"{place}. {_why(row)}", 110), 12))
        if row.cause:
            steps.append(phrase(cut(f"last time: {row.cause}", 110), 12).padded(left=14))
    what_next = [rule(stroke=0.5), phrase("What next", bold=True), below(*steps, gap=2)] if coming else []
    row_words = "; ".join(_words(row) for row in rows)
    after = f" Next: {', '.join(row.key for row in coming)}." if coming else ""
    return page(
        f"{title}: {words}" if title else words,
        below(*labs, gap=10) if rows else phrase("There is no exercise here.", 12),
        _legend(),
        *what_next,
        label=f"{title + ': ' if title else ''}{words}. {row_words}.{after}".replace(". .", "."),
    )


def table(rows: Sequence[Standing]) -> str:
    """The same as an HTML table, which screen readers can read, too."""
    cell = "style='text-align:left;vertical-align:top;padding:.1em .7em'"
    names = ("exercise", "", "state", "tries", "hints", "star", "solution seen", "passed", "minutes", "last cause")
    head = "".join(f"<th scope='col' {cell}>{name}</th>" for name in names)
    lines = []
    for row in rows:
        when = f"{row.first_passed:%Y-%m-%d}" if row.first_passed else ""
        seen = ("before passing" if row.passed else "yes") if row.seen else ""
        star = "★" if row.starred else ""
        rest = (row.title, standing(row), row.tries, row.hints, star, seen, when, row.minutes, row.cause)
        cells = "".join(f"<td {cell}>{escape(str(cell_value))}</td>" for cell_value in rest)
        lines.append(f"<tr><th scope='row' {cell}>{escape(row.key)}</th>{cells}</tr>")
    caption = f"<caption style='text-align:left'>{escape(totals(rows))}</caption>"
    return f"<table style='border-collapse:collapse'>{caption}<tr>{head}</tr>{''.join(lines)}</table>"


def _box(row: Standing, x: float, y: float) -> str:
    state = standing(row)
    ink = INK if state != NOT_YET else "currentColor"
    tries = str(row.tries) if row.tries < 100 else "99+"
    count = f"{'star' if state == STARRED else state}, {tries}" if row.tries else state
    key = text(x + 7, y + 17, row.key, bold=True)
    words = f"<g fill='{ink}'>{key}{text(x + 7, y + 34, count, size=12)}</g>"
    return f"<g><title>{escape(_words(row))}</title>{_edge(state, x, y, WIDE, TALL)}{words}{_marks(row, x, y, ink)}</g>"


def _edge(state: str, x: float, y: float, w: float, h: float) -> str:
    """The box of a state without its words: coloured if passed or tried, with a dashed edge until it is passed."""
    colour = COLOURS[STATES.index(state)]
    if state in (DONE, STARRED):
        return box(x, y, w, h, colour, width=3 if state == STARRED else 1)
    ground = f"<rect x='{x:g}' y='{y:g}' width='{w:g}' height='{h:g}' rx='3' fill='{colour}' stroke='currentColor'"
    return f"{ground} stroke-dasharray='4 3'/>"


def _marks(row: Standing, x: float, y: float, ink: str) -> str:
    """At the upper right the sign of the state and a diamond for the solution, below it triangles for hints."""
    out = _sign(standing(row), x + WIDE - 15, y + 13, ink)
    left = x + WIDE - 10
    for k in range(row.hints):
        out += f"<path d='M{left - 8 * k - 3.5:g} {y + 34:g}l3.5 -7l3.5 7z' fill='{ink}'/>"
    if row.seen:
        out += _diamond(x + WIDE - 31, y + 13, ink)
    return out


def _sign(state: str, x: float, y: float, ink: str) -> str:
    """The sign of a state around (x, y): a tick, a star, half a disc or nothing."""
    if state == STARRED:
        star = "M0 -8l2.4 5l5.4 .7l-4 3.8l1 5.4l-4.8 -2.6l-4.8 2.6l1 -5.4l-4 -3.8l5.4 -.7z"
        return f"<path transform='translate({x:g} {y:g})' d='{star}' fill='{ink}'/>"
    if state == DONE:
        return f"<path d='M{x - 6:g} {y:g}l4 5l8 -10' fill='none' stroke='{ink}' stroke-width='2.5'/>"
    if state == TRIED:
        half = f"<path d='M{x:g} {y - 6:g}a6 6 0 0 0 0 12z' fill='{ink}'/>"
        return half + f"<circle cx='{x:g}' cy='{y:g}' r='6' fill='none' stroke='{ink}' stroke-width='1.5'/>"
    return ""


def _diamond(x: float, y: float, ink: str) -> str:
    return f"<path d='M{x:g} {y - 4.5:g}l4 4.5l-4 4.5l-4 -4.5z' fill='none' stroke='{ink}' stroke-width='1.5'/>"


def _legend() -> Panel:
    named = ("done, n tries", "with a star", "tried, not passed", "not yet")
    keys = [(Panel(26.0, 16.0, partial(_key, state)), words) for state, words in zip(STATES, named, strict=True)]
    keys.append((Panel(7.0, 16.0, lambda x, y: f"<path d='M{x:g} {y + 12:g}l3.5 -7l3.5 7z'/>"), "a hint"))
    keys.append((Panel(8.0, 16.0, lambda x, y: _diamond(x + 4, y + 8.5, "currentColor")), "solution seen"))
    return beside(*(beside(drawn, phrase(words, 12), gap=5) for drawn, words in keys), gap=14)


def _key(state: str, x: float, y: float) -> str:
    return _edge(state, x, y, 26, 16) + _sign(state, x + 13, y + 8, INK)


def _words(row: Standing) -> str:
    """A row in words: `03.2 A ring: tried, 3 attempts, 2 hints, last: nothing is added`."""
    parts = [
        standing(row),
        plural(row.tries, "attempt") * bool(row.tries),
        plural(row.hints, "hint") * bool(row.hints),
    ]
    parts += ["solution seen before passing" if row.seen else "", f"last: {row.cause}" if row.cause else ""]
    return f"{row.key} {row.title}: {', '.join(part for part in parts if part)}"


def _why(row: Standing) -> str:
    """An exercise to do next, with the reasons: `03.2 A ring (tried 3 times; importance 5 of 5, medium, 20 min)`."""
    tried = f"tried {'once' if row.tries == 1 else f'{row.tries} times'}; " if row.tries else ""
    easy = EASY[min(5, max(0, row.difficulty))]
    return f"{row.key} {row.title} ({tried}importance {row.importance} of 5, {easy}, {row.minutes} min)"


def _time(minutes: int) -> str:
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.0f} h"
