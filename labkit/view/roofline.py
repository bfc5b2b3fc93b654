"""The roofline as a picture: the roof of a device, and where each op of a model lies below it.

    Tflop/s  |        ______________  794 Tflop/s, large products in bf16
             |      /|    a b         letters are ops; the table below the picture has their numbers
             |    / c|                filled: predicted, hollow: measured
             |  /    |
             +-------+-------------   flop / byte
              ridge 279

Both axes are logarithmic. Memory limits an op left of the ridge, arithmetic one right of it, and the time to start a
kernel one far below the roof. (Laws: labkit.plan.step.roofline; Williams, Waterman and Patterson 2009.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.collections import LineCollection

from labkit.plan.machine.hardware import PRECISIONS, Hardware
from labkit.plan.step.roofline import Operation, attainable, ridge
from labkit.view import chart
from labkit.view.svg import INK, PALETTE, Room, cut, width_of
from labkit.view.units import bytes_text, metric_text, seconds_text

LEFT, RIGHT, TOP, BOTTOM = 86.0, 780.0, 66.0, 350.0
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MOST = 16
"""The most ops that are drawn, each with a letter; of more, those that take longest."""
TURNS = (0.0, 0.7, -0.7, 1.2, -1.2)
"""Angles from straight down at which a letter may stand, all below its op: the roof and its words are above."""
BESIDE = ((-17.0, 3.0), (-32.0, 18.0), (-47.0, 33.0), (-62.0, 48.0))
"""Heights (above, below) its line at which a roof's number may begin, nearest first."""
ROOF = chart.LINES[0]


@chart.style()
def roofline(
    hardware: Hardware,
    operations: Sequence[Operation] = (),
    precision: str = "bf16",
    measured: Mapping[str, float] | None = None,
    title: str = "",
) -> chart.Chart:
    """The roof of `hardware` in one precision, thin roofs for other precisions, and the ops below.

    `operations` as from labkit.plan.step.roofline.operations; an op without flops has no place and is named in a note.
    `measured` maps an op's name to the seconds of one run, drawn beside the prediction. ValueError for an unknown
    precision, for a measured op that is not among `operations`, and for seconds that are not above 0."""
    seen = dict(measured or {})
    unknown = sorted(set(seen) - {op.name for op in operations})
    if unknown or any(not 0 < took < math.inf for took in seen.values()):
        raise ValueError(
            f"measured= is op -> seconds above 0, of the ops that are drawn; got {unknown or seen} "
            f"for {', '.join(op.name for op in operations) or 'no ops'}"
        )
    placed = [op for op in operations if op.flops > 0]
    slow = sorted(placed, key=lambda op: -op.count * op.seconds(hardware, precision))[:MOST]
    drawn = [op for op in placed if op in slow]
    top, corner = hardware.rate(precision), ridge(hardware, precision)
    rates = [op.flops / op.seconds(hardware, precision) for op in drawn]
    rates += [op.flops / seen[op.name] for op in drawn if op.name in seen]
    low = min([corner / 100, *(op.intensity / 2 for op in drawn)])
    high = max([corner * 30, *(op.intensity * 2 for op in drawn)])
    floor = min([attainable(hardware, low, precision), *(rate / 2 for rate in rates)])
    peak = max(top, *(hardware.rate(item.name) for item in hardware.flops if item.name in PRECISIONS), *rates)
    head = title or f"roofline of {hardware.name} in {precision}"
    facts = (
        f"ridge at {corner:.3g} flop/byte = {metric_text(top, 'flop/s')} / "
        f"{metric_text(hardware.reachable_bytes_per_s, 'B/s')}: left of it an op waits for memory, right for arithmetic"
    )
    label = "".join(
        f"; {op.name}: {op.intensity:.3g} flop/byte, {seconds_text(op.seconds(hardware, precision))}, "
        f"bound by {op.bound(hardware, precision)}"
        for op in drawn
    )
    without = [op for op in operations if not op.flops]
    notes = _notes(drawn, seen, hardware, precision, len(placed), without)
    height = BOTTOM + 72 + 19 * len(drawn) + 21 * len(notes) if drawn else BOTTOM + 50
    figure = chart.Chart(height, head, f"{head}: {facts}{label}")
    figure.words(4, 42, cut(facts, 112))
    axes = figure.panel(
        LEFT, TOP, RIGHT, BOTTOM, xscale="log", yscale="log", xlim=(low, high), ylim=(floor, peak * 2.5)
    )
    axes.set_xlabel("intensity: flops for each byte that is moved")
    room = Room(LEFT + 2, TOP - 14, RIGHT, BOTTOM - 2)
    marks = _marks(axes, drawn, seen, hardware, precision)
    for mark in marks:
        room.keep(mark.x - 7, mark.y - 7, 14, 14)
    _grid(axes, hardware, corner, room)
    roofs = _flat_roofs(hardware, precision)
    for rate in roofs:
        x, y = chart.on_page(axes, rate / hardware.reachable_bytes_per_s, rate)
        room.keep(x, y - 2, RIGHT - x, 4)
    _letters(axes, marks, room)  # letters have fewer possible places than the roofs' numbers, so they are placed first
    _roofs(figure, axes, hardware, precision, roofs, room)
    if drawn:
        _table(figure, drawn, seen, hardware, precision)
        for k, note in enumerate(notes, 1):
            figure.words(10, BOTTOM + 62 + 19 * len(drawn) + 21 * k, cut(note, 126), fontsize=12)
    return figure


def _grid(axes: chart.Axes, hardware: Hardware, corner: float, room: Room) -> None:
    """Mark powers of ten; draw their dotted lines only up to the slope of memory, so that no words lie on them."""
    (low, high), (floor, ceiling) = axes.get_xlim(), axes.get_ylim()
    first, last = math.ceil(math.log10(floor)), math.floor(math.log10(ceiling))
    rates = [10.0**power for power in range(first, last + 1, 1 + (last - first) // 9)]
    ends = [min(rate / hardware.reachable_bytes_per_s, corner) for rate in rates]
    for rate, end in zip(rates, ends, strict=True):
        x, y = chart.on_page(axes, end, rate)
        room.take(LEFT + 2, y - 1, x - LEFT - 2, 2)
    axes.hlines(rates, low, ends, "black", chart.STYLE["grid.linestyle"], linewidth=1)
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    chart.marks(axes, [10.0**power for power in powers], rates, "{:,.9g}".format, lambda r: metric_text(r, "flop/s"))
    axes.grid(False)
    axes.tick_params("y", left=True, length=4, pad=2)


def _flat_roofs(hardware: Hardware, precision: str) -> dict[float, list[str]]:
    """Rate of large products -> the precisions that have it; that of `precision` comes first."""
    roofs: dict[float, list[str]] = {hardware.rate(precision): [precision]}
    for item in hardware.flops:
        if item.name not in PRECISIONS:  # no op of the picture multiplies 8-bit copies
            continue
        names = roofs.setdefault(hardware.rate(item.name), [])
        if names != [precision]:
            names.append(item.name)
    return roofs


def _roofs(
    figure: chart.Chart,
    axes: chart.Axes,
    hardware: Hardware,
    precision: str,
    roofs: Mapping[float, Sequence[str]],
    room: Room,
) -> None:
    """The slope of memory, the flat roof of large products, and the roofs of other precisions."""
    (low, high), top, corner = axes.get_xlim(), hardware.rate(precision), ridge(hardware, precision)
    start, middle = chart.on_page(axes, low, attainable(hardware, low, precision)), chart.on_page(axes, corner, top)
    corners = [attainable(hardware, low, precision), top, top]
    axes.plot([low, corner, high], corners, color=ROOF, linestyle="-", linewidth=3, zorder=1.5, label=precision)
    axes.plot(
        [corner, corner], [axes.get_ylim()[0], top], color="black", linestyle=(0, (5, 4)), linewidth=1, zorder=1.5
    )
    room.keep_path([start, middle, (middle[0], BOTTOM)])
    # the number of a roof goes above or below it, as far right as no mark and no other roof is in the way
    for rate, names in roofs.items():
        bend, y = chart.on_page(axes, rate / hardware.reachable_bytes_per_s, rate)
        if rate != top:
            ends = [rate / hardware.reachable_bytes_per_s, high]
            axes.plot(
                ends,
                [rate, rate],
                color="black",
                linestyle=(0, (7, 5)),
                linewidth=1,
                zorder=1.5,
                label=", ".join(names),
            )
        words, bold = f"{metric_text(rate, 'flop/s')}, {', '.join(names)}", rate == top
        wide = width_of(words, 12, bold)
        steps = range(max(1, int((RIGHT - wide - bend) / 12)))
        places = [(RIGHT - wide - 2 - 12 * step, y + dy) for dys in BESIDE for step in steps for dy in dys]
        figure.put(room, places, words, bold=bold)
    figure.put(room, [(middle[0] + 5, BOTTOM - 20), (middle[0] - 80, BOTTOM - 20)], f"ridge {corner:.3g}", bold=True)
    words = f"{metric_text(hardware.reachable_bytes_per_s, 'B/s')} x intensity"
    left = width_of(words, 12) + 12
    slope = [
        (start[0] + share * (middle[0] - start[0]) - left, start[1] + share * (middle[1] - start[1]) - 14)
        for share in (0.75, 0.85, 0.6, 0.95)
    ]
    figure.put(room, slope, words)


@dataclass(frozen=True)
class Mark:
    """An op's dot (predicted) or ring (measured): its letter, flops for each byte, flops a second, place on the page,
    and the text `hover` under the pointer."""

    letter: str
    measured: bool
    intensity: float
    rate: float
    x: float
    y: float
    hover: str


def _marks(
    axes: chart.Axes, drawn: Sequence[Operation], seen: Mapping[str, float], hardware: Hardware, precision: str
) -> list[Mark]:
    """A mark for each prediction, and one for each measurement."""
    marks = []
    for k, op in enumerate(drawn):
        took = op.seconds(hardware, precision)
        for seconds, origin in ((took, "predicted"), (seen.get(op.name), "measured")):
            if seconds is not None:
                rate = op.flops / seconds
                hover = f"{op.name}, {origin}: {metric_text(rate, 'flop/s')}, {seconds_text(seconds)}"
                place = chart.on_page(axes, op.intensity, rate)
                marks.append(Mark(LETTERS[k], origin == "measured", op.intensity, rate, *place, hover))
    return marks


def _letters(axes: chart.Axes, marks: Sequence[Mark], room: Room) -> None:
    """A dot for each prediction, a ring for each measurement, and the op's letter where there is room beside it.

    The lines from marks to letters come first, so that none is drawn over the letter of another."""
    to_data = axes.transData.inverted().transform
    high = axes.figure.bbox.height
    plates, lines = [], []
    for mark in marks:
        turns = [(r, angle) for r in (15, 24, 34, 46, 60, 76) for angle in TURNS]
        near = [(mark.x + r * math.sin(angle) - 7, mark.y + r * math.cos(angle) - 7) for r, angle in turns]
        if spot := room.first(near, 14, 14):
            plate = spot[0] + 7, spot[1] + 7
            room.keep_path([(mark.x, mark.y), plate])
            plates.append((*to_data((plate[0], high - plate[1])), mark.letter))
            lines.append([(mark.intensity, mark.rate), plates[-1][:2]])
    axes.add_collection(LineCollection(lines, colors="black", linewidths=0.6), autolim=False)
    for mark in marks:
        edge = {"markeredgecolor": "black", "markeredgewidth": 2.5} if mark.measured else {"markeredgecolor": INK}
        axes.plot([mark.intensity], [mark.rate], "o", color="none" if mark.measured else PALETTE[1], markersize=9,
                  gid=mark.hover, **edge)  # fmt: skip
    axes.plot([x for x, _, _ in plates], [y for _, y, _ in plates], "o", color="white", markersize=15,
              markeredgecolor=INK, markeredgewidth=0.6)  # fmt: skip
    for x, y, letter in plates:
        axes.text(x, y, letter, fontsize=11, ha="center", va="center_baseline", color=INK)


def _table(
    figure: chart.Chart, drawn: Sequence[Operation], seen: Mapping[str, float], hardware: Hardware, precision: str
) -> None:
    """The table of the ops' numbers, by letter."""
    y = BOTTOM + 62
    columns = (
        (10.0, "", "center"), (30.0, "op, how often", "left"), (300.0, "flops", "right"), (375.0, "bytes", "right"),
        (455.0, "flop/byte", "right"), (530.0, "takes", "right"), (538.0, "bound by", "left"),
        (612.0, "measured" if seen else "", "left"))  # fmt: skip
    for x, word, anchor in columns:
        figure.words(x, y, word, anchor, weight="bold", fontsize=12)
    figure.rule(y + 6)
    for letter, op in zip(LETTERS, drawn, strict=False):
        y += 19
        took = op.seconds(hardware, precision)
        name = cut(op.name, 24) + (f" x {op.count}" if op.count > 1 else "")
        ratio = f"{op.intensity:.3g}" if op.intensity < 1000 else f"{op.intensity:,.0f}"
        cells = [letter, name, metric_text(op.flops, "flop"), bytes_text(op.n_bytes), ratio, seconds_text(took)]
        cells.append(op.bound(hardware, precision))
        if op.name in seen:
            cells.append(f"{seconds_text(seen[op.name])}, {_off(took, seen[op.name])}")
        for (x, _, anchor), cell in zip(columns, cells, strict=False):
            figure.words(x, y, cell, anchor, fontsize=12, weight="bold" if cell == letter else "normal")


def _notes(
    drawn: Sequence[Operation],
    seen: Mapping[str, float],
    hardware: Hardware,
    precision: str,
    n_placed: int,
    without: Sequence[Operation],
) -> list[str]:
    """The notes below the table: which ops are not in it, and how to read the marks."""
    notes = []
    if n_placed > len(drawn):
        notes.append(f"the {len(drawn)} ops that take longest are drawn; {n_placed - len(drawn)} more are not")
    if without:
        alone = sum(op.count * op.seconds(hardware, precision) for op in without)
        notes.append(
            f"{len(without)} ops do no flops and have no place, such as {without[0].name}: {seconds_text(alone)} in all"
        )
    if seen:
        notes.append("a dot: predicted; a ring: measured, with how much slower or faster that is than predicted")
    return notes


def _off(predicted: float, measured: float) -> str:
    """The distance of a measurement from the prediction, in words: `32.5% slower`, `4.07 times as long`."""
    ratio = measured / predicted
    if 0.5 <= ratio <= 2:
        return f"{100 * abs(ratio - 1):.3g}% {'slower' if ratio >= 1 else 'faster'}"
    return f"{ratio:,.3g} times as long"
