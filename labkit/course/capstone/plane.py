"""The capstone's picture: attempts by seconds and by bytes, lines of equal score, the cap, and the predictions.

       bytes of the fullest rank      both axes are logarithmic, so lines of equal seconds x bytes are straight:
         |  \\   x law  \\             from one line to the next the score doubles, and down to the left is better
     cap -+---\\-o-------\\-------     above the cap nothing finishes
         |     \\    #    \\
         +-------------------- seconds of a step
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from labkit.plan.breakdown import Breakdown
from labkit.view.axes import Axes
from labkit.view.svg import PALETTE, Picture, Room, box, headline, line, text, width_of

LEFT, TOP, RIGHT, BOTTOM = 78, 64, 560, 372
HEIGHT = 436
KINDS = ("yours", "reference", "law")
COLOURS = ("#0072B2", "#D55E00", "#999999")
STACK = (("parameters", 0), ("gradients", 1), ("optimizer", 2), ("activations", 4), ("other", 7))
"""The kinds of memory, and their colours in the palette."""


class Mark(NamedTuple):
    """A point in the picture: `kind` is one of KINDS; `told` is shown when the pointer rests on it."""

    name: str
    seconds: float
    n_bytes: float
    kind: str = "yours"
    told: str = ""


def plane(
    marks: Sequence[Mark], cap_bytes: float, title: str, chosen: Mark | None = None, memory: Breakdown | None = None
) -> Picture:
    """Marks by seconds and peak bytes; `chosen` is a diamond, and `memory` its bytes by kind, drawn beside the cap.

    Marks that are not finite are left out. ValueError if none is left."""
    shown = [mark for mark in marks if math.isfinite(mark.seconds * mark.n_bytes) and mark.seconds * mark.n_bytes > 0]
    points = [*shown, *([chosen] if chosen else [])]
    if not points:
        raise ValueError("there is no attempt to draw: run one first")
    x = _ends([mark.seconds for mark in points])
    y = _ends([*(mark.n_bytes for mark in points), *([cap_bytes] if _near(cap_bytes, points) else [])])
    axes = Axes(LEFT, TOP, RIGHT, BOTTOM, x, y, log_x=True, log_y=True)
    room, scores = Room(LEFT, TOP - 14, 800, BOTTOM), _scores(axes)
    for mark in points:
        centre = axes.at(mark.seconds, mark.n_bytes)
        room.keep(centre[0] - 9, centre[1] - 9, 18, 18)
    for _, a, b, c, d in scores:
        room.keep_path([(a, b), (c, d)])
    cap = axes.at(1, cap_bytes)[1] if axes.y[0] <= cap_bytes <= axes.y[1] else None
    if cap is not None:
        room.keep(LEFT, cap - 2, RIGHT - LEFT, 4)
    body = [headline(title), *_frame(axes), *_cap(cap, cap_bytes, axes, room)]
    for number, mark in enumerate(points):
        body += _mark(axes, mark, room, diamond=chosen is not None and number == len(points) - 1)
    body += _score_lines(scores, room) + _legend(shown, chosen)
    if memory is not None:
        body += _stack(memory, cap_bytes)
    return Picture("".join(body), HEIGHT, f"{title}: " + "; ".join(map(words_of, points)))


def words_of(mark: Mark) -> str:
    """A mark in words: `shards (law): 0.62 s x 3.78 MB = 2.34 MB s`"""
    score = score_text(mark.seconds * mark.n_bytes)
    return f"{mark.name} ({mark.kind}): {mark.seconds:.3g} s x {mark.n_bytes / 1e6:.3g} MB = {score}"


def score_text(byte_seconds: float) -> str:
    """A score in words: `2.34 MB s`, or `no score` for an infinite one."""
    return f"{byte_seconds / 1e6:.3g} MB s" if math.isfinite(byte_seconds) else "no score"


def _ends(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values) / 1.25, max(values) * 1.25
    if high / low < 4:
        middle = math.sqrt(low * high)
        low, high = middle / 2, middle * 2
    return low, high


def _near(cap_bytes: float, points: Sequence[Mark]) -> bool:
    """True if the cap is near enough to the marks to be drawn."""
    held = [mark.n_bytes for mark in points]
    return min(held) / 8 < cap_bytes < max(held) * 8


def _round(ends: tuple[float, float], unit: float = 1.0) -> list[float]:
    low, high = (end / unit for end in ends)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [
        tick * unit
        for power in powers
        for tick in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)
        if low <= tick <= high
    ]


def _frame(axes: Axes) -> list[str]:
    words = text(4, TOP - 16, "bytes of the fullest rank", size=12)
    marks = _round(axes.x), _round(axes.y, 1e6)
    return [
        words,
        *axes.frame("seconds of a step", lambda s: f"{s:.3g} s", lambda b: f"{b / 1e6:.3g} MB", *marks),
    ]


def _scores(axes: Axes) -> list[tuple[str, float, float, float, float]]:
    """Lines of equal score, each twice the one before: the label, and the left and right end on the page."""
    (x0, x1), (y0, y1) = axes.x, axes.y
    first, last = math.ceil(math.log2(x0 * y0 / 1e6)), math.floor(math.log2(x1 * y1 / 1e6))
    out = []
    for power in range(first, last + 1):
        score = 2.0**power * 1e6
        left, right = max(x0, score / y1), min(x1, score / y0)
        if right / left < 1.05:
            continue
        out.append((f"{2.0**power:g} MB s", *axes.at(left, score / left), *axes.at(right, score / right)))
    return out


def _score_lines(scores: Sequence[tuple[str, float, float, float, float]], room: Room) -> list[str]:
    """The lines with their labels: beyond the right end, or above them, where they cross no line and no mark."""
    out = []
    for label, a, b, c, d in scores:
        out.append(line(a, b, c, d, "6 5", 1, "#888"))
        wide, shares = width_of(label, 11), [step / 12 for step in range(12)]
        above = [(a + (c - a) * share + 4, b + (d - b) * share - 14) for share in shares]
        ends = [(RIGHT + 4, d - 8)] if RIGHT - c < 2 else []
        if spot := room.first([*ends, *above], wide, 12):
            out.append(text(spot[0], spot[1] + 10, label, size=11))
    return out


def _cap(y: float | None, cap_bytes: float, axes: Axes, room: Room) -> list[str]:
    """The cap's line at `y`, with its label in a free place; for None a remark that the cap lies outside."""
    if y is None:
        side = "above" if cap_bytes > axes.y[1] else "below"
        return [text(RIGHT, TOP - 16, f"the cap, {cap_bytes / 1e6:.3g} MB, lies {side} this picture", "end", 12)]
    label = f"cap {cap_bytes / 1e6:.3g} MB"
    wide = width_of(label, 12, bold=True)
    places = [(RIGHT - wide - 2 - step, y + dy) for step in range(0, int(RIGHT - LEFT - wide), 20) for dy in (-16, 4)]
    places.append((RIGHT + 4, y - 7))
    spot = room.first(places, wide, 13) or places[0]
    words = text(spot[0], spot[1] + 11, label, size=12, bold=True)
    return [line(LEFT, y, RIGHT, y, "", 2.5, COLOURS[1]), words]


def _mark(axes: Axes, mark: Mark, room: Room, diamond: bool) -> list[str]:
    colour, tooltip = COLOURS[KINDS.index(mark.kind)], escape(mark.told or words_of(mark))
    (x, y) = axes.at(mark.seconds, mark.n_bytes)
    if diamond:
        shape = f"<g><title>{tooltip}</title>{axes.diamond(mark.seconds, mark.n_bytes, PALETTE[4])}</g>"
    elif mark.kind == "law":
        shape = axes.cross(mark.seconds, mark.n_bytes, colour, tooltip)
    elif mark.kind == "reference":
        shape = f"<g><title>{tooltip}</title>{box(x - 5, y - 5, 10, 10, colour)}</g>"
    else:
        shape = axes.dot(mark.seconds, mark.n_bytes, colour, tooltip)
    wide = width_of(mark.name, 12)
    corners = [
        (x + side * far - (wide if side < 0 else 0), y - 6 + dy)
        for far, dys in ((10, (0, -8, 8, -15, 15)), (20, (0, -12, 12, -24, 24)), (34, (0, -20, 20, -34, 34)))
        for dy in dys
        for side in (1, -1)
    ]
    inside = [(a, b) for a, b in [*corners, (x - wide / 2, y - 23), (x - wide / 2, y + 11)] if a + wide <= RIGHT]
    spot = room.first(inside, wide, 13)
    return [shape] + ([text(spot[0], spot[1] + 10, mark.name, size=12)] if spot else [])


def _legend(shown: Sequence[Mark], chosen: Mark | None) -> list[str]:
    out, x, y = [], LEFT, HEIGHT - 10
    named = {"yours": "measured by you", "reference": "measured, the reference", "law": "predicted"}
    for kind in (kind for kind in KINDS if any(mark.kind == kind for mark in shown)):
        colour = COLOURS[KINDS.index(kind)]
        shapes = {
            "yours": f'<circle cx="{x}" cy="{y - 4}" r="5" fill="{colour}" stroke="#fff"/>',
            "reference": box(x - 5, y - 9, 10, 10, colour),
            "law": f'<path d="M{x - 5} {y - 9}l10 10M{x - 5} {y + 1}l10 -10" stroke="{colour}" stroke-width="3"/>',
        }
        out += [shapes[kind], text(x + 10, y, named[kind], size=12)]
        x += 30 + int(width_of(named[kind], 12))
    if chosen is not None:
        out += [f'<path d="M{x} {y - 12}l8 8l-8 8l-8-8z" fill="{PALETTE[4]}" stroke="currentColor"/>']
        out += [text(x + 13, y, "predicted, what is chosen", size=12)]
    return out


def _stack(memory: Breakdown, cap_bytes: float) -> list[str]:
    """The bytes of the chosen way by kind, stacked, beside the cap."""
    left, wide, foot, top = 644, 40, BOTTOM, TOP + 20
    high = max(memory.total, cap_bytes if cap_bytes < 4 * memory.total else 0) * 1.08
    out, y = [text(left - 20, TOP - 16, "predicted bytes", size=12)], float(foot)
    scale, floor = (foot - top) / high, math.inf
    for kind, colour in STACK:
        n_bytes = dict(memory).get(kind, 0.0)
        tall = n_bytes * scale
        y -= tall
        tooltip = f"{kind}: {n_bytes:,.0f} B"
        out.append(box(left, y, wide, tall, PALETTE[colour], title=tooltip) if tall > 0.5 else "")
        if tall > 0.5:
            floor = min(floor - 13, y + tall / 2 + 4)
            out.append(text(left + wide + 5, floor, f"{kind} {n_bytes / 1e6:.2f}", size=11))
    out.append(text(left + wide / 2, foot + 18, f"{memory.total / 1e6:.3g} MB", "middle", 12))
    if cap_bytes <= high:
        cap_y = foot - cap_bytes * scale
        out.append(line(left - 14, cap_y, left + wide + 6, cap_y, "", 2.5, COLOURS[1]))
        out.append(text(left - 18, cap_y + 4, "cap", "end", 12))
    return out
