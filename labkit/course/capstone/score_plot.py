"""The capstone's plane: attempts by seconds and by bytes, lines of equal score, the cap, and what the laws say.

       bytes of the fullest rank      both axes logarithmic, so that seconds x bytes = constant is a straight line:
         |  \\   x law  \\             from one line to the next the score doubles, and down to the left is better
     cap -+---\\-o-------\\-------     above the cap nothing finishes
         |     \\    #    \\
         +-------------------- seconds of a step
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from labkit.plan.breakdown import Breakdown
from labkit.view import chart
from labkit.view.svg import PALETTE, WIDTH, Room, width_of

LEFT, TOP, RIGHT, BOTTOM = 78, 64, 560, 372
HEIGHT = 436
KINDS = ("yours", "reference", "law")
NAMES = ("measured by you", "measured, the reference", "predicted")
COLOURS = ("#0072B2", "#D55E00", "#999999")
STACK = (("parameters", 0), ("gradients", 1), ("optimizer", 2), ("activations", 4), ("other", 7))
"""Kinds of memory, and their colours in the palette."""


class Mark(NamedTuple):
    """A point of the plane: `kind` is one of KINDS; `hover` shows when the pointer rests on it."""

    name: str
    seconds: float
    n_bytes: float
    kind: str = "yours"
    hover: str = ""


@chart.style()
def plane(
    marks: Sequence[Mark], cap_bytes: float, title: str, chosen: Mark | None = None, memory: Breakdown | None = None
) -> chart.Chart:
    """Marks on the plane time x peak; `chosen` is a diamond, and `memory` the bytes that it is made of, beside the cap.

    Marks that are not finite are left out. ValueError if nothing is left."""
    shown = [mark for mark in marks if math.isfinite(mark.seconds * mark.n_bytes) and mark.seconds * mark.n_bytes > 0]
    points = [*shown, *([chosen] if chosen else [])]
    if not points:
        raise ValueError("there is no attempt to draw: run one first")
    held = [*(mark.n_bytes for mark in points), *([cap_bytes] if _near(cap_bytes, points) else [])]
    figure = chart.Chart(HEIGHT, title, f"{title}: " + "; ".join(map(words_of, points)))
    axes = figure.panel(LEFT, TOP, RIGHT, BOTTOM, xscale="log", yscale="log", xlabel="seconds of a step")
    axes.set(xlim=_ends([mark.seconds for mark in points]), ylim=_ends(held))
    across, up = _round(axes.get_xlim()), _round(axes.get_ylim(), 1e6)
    chart.marks(axes, across, up, lambda seconds: f"{seconds:.3g} s", lambda n_bytes: f"{n_bytes / 1e6:.3g} MB")
    chart.upward(axes, "bytes of the fullest rank")
    room, scores = Room(LEFT, TOP - 8, WIDTH, BOTTOM), _scores(axes)
    for mark in points:
        x, y = chart.on_page(axes, mark.seconds, mark.n_bytes)
        room.keep(x - 9, y - 9, 18, 18)
    for _, ends in scores:
        room.keep_path([chart.on_page(axes, *end) for end in ends])
    _cap(figure, axes, cap_bytes, room)
    for number, mark in enumerate(points):
        _mark(figure, axes, mark, room, chosen is not None and number == len(points) - 1)
    _score_lines(figure, axes, scores, room)
    handles = {handle.get_label(): handle for handle in axes.get_legend_handles_labels()[0]}
    figure.keys(LEFT, HEIGHT - 14, axes, handles=[*handles.values()], ncols=4)
    if memory is not None:
        _stack(figure, memory, cap_bytes)
    return figure


def words_of(mark: Mark) -> str:
    """`shards (law): 0.62 s x 3.78 MB = 2.34 MB s`"""
    score = score_text(mark.seconds * mark.n_bytes)
    return f"{mark.name} ({mark.kind}): {mark.seconds:.3g} s x {mark.n_bytes / 1e6:.3g} MB = {score}"


def score_text(byte_seconds: float) -> str:
    """`2.34 MB s`, `no score` for an infinite one."""
    return f"{byte_seconds / 1e6:.3g} MB s" if math.isfinite(byte_seconds) else "no score"


def _ends(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values) / 1.25, max(values) * 1.25
    if high / low < 4:
        middle = math.sqrt(low * high)
        low, high = middle / 2, middle * 2
    return low, high


def _near(cap_bytes: float, points: Sequence[Mark]) -> bool:
    """True if the cap lies within a factor of 8 of the marks: then the axis of bytes reaches it."""
    held = [mark.n_bytes for mark in points]
    return min(held) / 8 < cap_bytes < max(held) * 8


def _round(ends: tuple[float, float], unit: float = 1.0) -> list[float]:
    low, high = (value / unit for value in ends)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [value * unit for p in powers for value in (10.0**p, 2 * 10.0**p, 5 * 10.0**p) if low <= value <= high]


def _scores(axes: chart.Axes) -> list[tuple[str, list[tuple[float, float]]]]:
    """Lines of equal score, each twice the one before: (its words, [left end, right end])."""
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    powers = range(math.ceil(math.log2(x0 * y0 / 1e6)), math.floor(math.log2(x1 * y1 / 1e6)) + 1)
    out = []
    for score in (2.0**power for power in powers):
        left, right = max(x0, score * 1e6 / y1), min(x1, score * 1e6 / y0)
        if right / left >= 1.05:
            out.append((f"{score:g} MB s", [(left, score * 1e6 / left), (right, score * 1e6 / right)]))
    return out


def _score_lines(
    figure: chart.Chart, axes: chart.Axes, scores: Sequence[tuple[str, list[tuple[float, float]]]], room: Room
) -> None:
    """Draw the lines of equal score, with their words beyond the right end, or above them where nothing is crossed."""
    for words, ends in scores:
        axes.plot(*zip(*ends, strict=True), color="#888888", linestyle=(0, (6, 5)), linewidth=1, zorder=0.9)
        (a, b), (c, d) = (chart.on_page(axes, *end) for end in ends)
        above = [(a + (c - a) * k / 12 + 4, b + (d - b) * k / 12 - 14) for k in range(12)]
        figure.put(room, [*([(RIGHT + 4, d - 8)] if RIGHT - c < 2 else []), *above], words, 11)


def _cap(figure: chart.Chart, axes: chart.Axes, cap_bytes: float, room: Room) -> None:
    """Draw the cap as a line with its words at a free place; if it lies outside the axes, only words say so."""
    low, high = axes.get_ylim()
    words = f"cap {cap_bytes / 1e6:.3g} MB"
    if not low <= cap_bytes <= high:
        side = "above" if cap_bytes > high else "below"
        figure.words(
            RIGHT, TOP - 16, f"the {words.replace(' ', ', ', 1)}, lies {side} this picture", "right", fontsize=12
        )
        return
    y, wide = chart.on_page(axes, 1, cap_bytes)[1], width_of(words, 12, bold=True)
    room.keep(LEFT, y - 2, RIGHT - LEFT, 4)
    axes.axhline(cap_bytes, color=COLOURS[1], linestyle="-", linewidth=2.5)
    places = [(RIGHT - wide - 2 - step, y + dy) for step in range(0, int(RIGHT - LEFT - wide), 20) for dy in (-16, 4)]
    figure.put(room, [*places, (RIGHT + 4, y - 7)], words, bold=True)


def _mark(figure: chart.Chart, axes: chart.Axes, mark: Mark, room: Room, chosen: bool) -> None:
    """Draw a mark as a dot, square, cross or diamond, with its name beside it where there is room."""
    style = {"color": COLOURS[KINDS.index(mark.kind)], "marker": dict(zip(KINDS, "osx", strict=True))[mark.kind]}
    label = "predicted, what is chosen" if chosen else NAMES[KINDS.index(mark.kind)]
    hover = mark.hover or words_of(mark)
    chart.dot(axes, mark.seconds, mark.n_bytes, hover, label, **(chart.CHOSEN if chosen else style))
    (x, y), wide = chart.on_page(axes, mark.seconds, mark.n_bytes), width_of(mark.name, 12)
    corners = [
        (x + side * far - (wide if side < 0 else 0), y - 6 + dy)
        for far, dys in ((10, (0, -8, 8, -15, 15)), (20, (0, -12, 12, -24, 24)), (34, (0, -20, 20, -34, 34)))
        for dy in dys
        for side in (1, -1)
    ]
    places = [*corners, (x - wide / 2, y - 23), (x - wide / 2, y + 11)]
    figure.put(room, [(left, top) for left, top in places if left + wide <= RIGHT], mark.name)


def _stack(figure: chart.Chart, memory: Breakdown, cap_bytes: float) -> None:
    """Draw the bytes of the chosen way as a stack of kinds, beside the cap."""
    high = max(memory.total, cap_bytes if cap_bytes < 4 * memory.total else 0) * 1.08
    axes = figure.panel(644, TOP + 20, 684, BOTTOM, xlim=(0, 1), ylim=(0, high))
    axes.set_axis_off()
    figure.words(624, TOP - 16, "predicted bytes", fontsize=12)
    low, floor = 0.0, math.inf
    for kind, colour in STACK:
        n_bytes = dict(memory).get(kind, 0.0)
        if n_bytes * (BOTTOM - TOP - 20) / high > 0.5:
            chart.box(axes, 0, low, 1, n_bytes, PALETTE[colour], "", f"{kind}: {n_bytes:,.0f} B")
            floor = min(floor - 13, chart.on_page(axes, 0, low + n_bytes / 2)[1] + 4)
            figure.words(689, floor, f"{kind} {n_bytes / 1e6:.2f}", fontsize=11)
        low += n_bytes
    figure.words(664, BOTTOM + 18, f"{memory.total / 1e6:.3g} MB", "center", fontsize=12)
    if cap_bytes <= high:
        axes.plot([-0.35, 1.15], [cap_bytes] * 2, color=COLOURS[1], linestyle="-", clip_on=False)
        axes.annotate("cap", (-0.35, cap_bytes), (-4, -4), textcoords="offset points", ha="right",
                      annotation_clip=False)  # fmt: skip
