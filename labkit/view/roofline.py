"""The roofline as a picture: the roof of a device, and where each op of a model stands below it.

    Tflop/s  |        ______________  794 Tflop/s, large products in bf16
             |      /|    a b         letters are ops; the table below the picture tells their numbers
             |    / c|                filled: predicted, hollow: measured
             |  /    |
             +-------+-------------   flop / byte
              ridge 279

Both axes are logarithmic. An op left of the ridge waits for memory, one right of it for arithmetic, and one that is far
below the roof waits for its start. (Laws: labkit.plan.roofline; Williams, Waterman and Patterson 2009.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labkit.plan.hardware import Hardware
from labkit.plan.roofline import Operation, attainable, ridge
from labkit.view.svg import INK, PALETTE, WIDTH, Picture, Room, cut, headline, line, text, width_of
from labkit.view.units import bytes_text, metric_text, seconds_text

LEFT, RIGHT, TOP, BOTTOM = 86.0, 780.0, 66.0, 350.0
MOST = 16
"""Ops with a letter; of more, those that take longest."""
TURNS = (0.0, 0.7, -0.7, 1.2, -1.2)
"""Where a letter may stand: below its op, for above it is the roof with its words."""
BESIDE = ((-17.0, 3.0), (-32.0, 18.0), (-47.0, 33.0), (-62.0, 48.0))
"""Where a roof's number may begin: right above or below its line, or further off where that is taken."""
ROOF = "#2B8CD6"
"""A lighter blue than the palette's: a thin line of that one is lost on a dark page."""


@dataclass(frozen=True)
class Axes:
    """Two logarithmic axes: from flops a byte and flop/s to a place in the picture."""

    low: float
    high: float
    floor: float
    ceiling: float

    def at(self, intensity: float, rate: float) -> tuple[float, float]:
        """The place of a point; one outside is moved to the edge."""
        across = math.log(min(max(intensity, self.low), self.high) / self.low) / math.log(self.high / self.low)
        up = math.log(min(max(rate, self.floor), self.ceiling) / self.floor) / math.log(self.ceiling / self.floor)
        return LEFT + across * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)


def roofline(
    hardware: Hardware,
    operations: Sequence[Operation] = (),
    precision: str = "bf16",
    measured: Mapping[str, float] | None = None,
    title: str = "",
) -> Picture:
    """The roof of `hardware` in one precision (those of the others thin), and the ops below it.

    `operations` as of labkit.plan.roofline.operations; what does no flops has no place and is told in words.
    `measured` is op's name -> seconds of one run, drawn beside the prediction. ValueError for an unknown precision, a
    measured op that is not among `operations`, and seconds that are not above 0."""
    seen = dict(measured or {})
    unknown = sorted(set(seen) - {each.name for each in operations})
    if unknown or any(not 0 < each < math.inf for each in seen.values()):
        raise ValueError(
            f"measured= is op -> seconds above 0, of the ops that are drawn; got {unknown or seen} "
            f"for {', '.join(each.name for each in operations) or 'no ops'}"
        )
    placed = [each for each in operations if each.flops > 0]
    slow = sorted(placed, key=lambda each: -each.count * each.seconds(hardware, precision))[:MOST]
    drawn = [each for each in placed if each in slow]
    top, corner = hardware.rate(precision), ridge(hardware, precision)
    rates = [each.flops / each.seconds(hardware, precision) for each in drawn]
    rates += [each.flops / seen[each.name] for each in drawn if each.name in seen]
    low = min([corner / 100, *(each.intensity / 2 for each in drawn)])
    high = max([corner * 30, *(each.intensity * 2 for each in drawn)])
    peak = max(top, *(hardware.rate(item.name) for item in hardware.flops), *rates)
    axes = Axes(low, high, min([attainable(hardware, low, precision), *(rate / 2 for rate in rates)]), peak * 2.5)
    head = title or f"roofline of {hardware.name} in {precision}"
    said = (
        f"ridge at {corner:.3g} flop/byte = {metric_text(top, 'flop/s')} / "
        f"{metric_text(hardware.reachable_bytes_per_s, 'B/s')}: left of it an op waits for memory, right for arithmetic"
    )
    body = [headline(head), text(4, 42, cut(said, 112))]
    room = Room(LEFT + 2, TOP - 14, RIGHT, BOTTOM - 2)
    marks = _marks(axes, drawn, seen, hardware, precision)
    for mark in marks:
        room.keep(mark.x - 7, mark.y - 7, 14, 14)
    body += _grid(axes, hardware, corner, room)
    flat = _flat(axes, hardware, precision)
    for bend, y, _, _ in flat:
        room.keep(bend, y - 2, RIGHT - bend, 4)
    points = _points(marks, room)  # letters have fewer places than the roofs' numbers, and choose before them
    body += [*_roof(axes, hardware, precision, flat, room), *points]
    rows, bottom = _table(drawn, seen, hardware, precision, len(placed), [e for e in operations if not e.flops])
    told = "; ".join(
        f"{each.name}: {each.intensity:.3g} flop/byte, {seconds_text(each.seconds(hardware, precision))}, "
        f"bound by {each.bound(hardware, precision)}"
        for each in drawn
    )
    return Picture("".join([*body, *rows]), bottom + 10, f"{head}: {said}" + (f"; {told}" if told else ""))


def _grid(axes: Axes, hardware: Hardware, corner: float, room: Room) -> list[str]:
    """Powers of ten, with their numbers; dots as far as the slope of memory, so that no words lie on them."""
    out = [line(LEFT, BOTTOM, RIGHT, BOTTOM), line(LEFT, TOP, LEFT, BOTTOM)]
    for power in range(math.ceil(math.log10(axes.low)), math.floor(math.log10(axes.high)) + 1):
        x, _ = axes.at(10.0**power, axes.floor)
        said = f"{10.0**power:,.9g}"
        out += [line(x, BOTTOM, x, BOTTOM + 5), text(x, BOTTOM + 19, said, "middle", 12)]
    first, last = math.ceil(math.log10(axes.floor)), math.floor(math.log10(axes.ceiling))
    for power in range(first, last + 1, 1 + (last - first) // 9):
        _, y = axes.at(axes.low, 10.0**power)
        end, _ = axes.at(min(10.0**power / hardware.reachable_bytes_per_s, corner), axes.floor)
        room.take(LEFT + 2, y - 1, end - LEFT - 2, 2)
        out += [line(LEFT - 4, y, LEFT, y), line(LEFT, y, end, y, "1 5")]
        out.append(text(LEFT - 6, y + 4, metric_text(10.0**power, "flop/s"), "end", 12))
    middle = (LEFT + RIGHT) / 2
    return [*out, text(middle, BOTTOM + 36, "intensity: flops for each byte that is moved", "middle", 12)]


def _flat(axes: Axes, hardware: Hardware, precision: str) -> list[tuple[float, float, str, str]]:
    """The flat roofs, that of `precision` first: where each begins, what it says, and its dash, "" for that one."""
    top = hardware.rate(precision)
    roofs: dict[float, list[str]] = {top: [precision]}
    for item in hardware.flops:
        rate = hardware.rate(item.name)
        if item.name != precision and rate != top:
            roofs.setdefault(rate, []).append(item.name)
    return [
        (
            *axes.at(rate / hardware.reachable_bytes_per_s, rate),
            f"{metric_text(rate, 'flop/s')}, {', '.join(names)}",
            "" if rate == top else "7 5",
        )
        for rate, names in roofs.items()
    ]


def _roof(
    axes: Axes, hardware: Hardware, precision: str, flat: list[tuple[float, float, str, str]], room: Room
) -> list[str]:
    """The slope of memory, the flat roof of large products, and the roofs of other precisions."""
    top, corner = hardware.rate(precision), ridge(hardware, precision)
    start = axes.at(axes.low, attainable(hardware, axes.low, precision))
    middle, end = axes.at(corner, top), axes.at(axes.high, top)
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (start, middle, end))
    out = [f'<path d="M{path}" fill="none" stroke="{ROOF}" stroke-width="3" stroke-linejoin="round"/>']
    out.append(line(*middle, middle[0], BOTTOM, "5 4"))
    room.keep_path([start, middle, (middle[0], BOTTOM)])
    out += [line(bend, y, RIGHT, y, dash) for bend, y, _, dash in flat if dash]
    for bend, y, said, dash in flat:  # above or below its roof, as far right as no mark and no other roof is crossed
        wide = width_of(said, 12, bold=not dash)
        steps = range(max(1, int((RIGHT - wide - bend) / 12)))
        places = [(RIGHT - wide - 2 - 12 * step, y + dy) for dys in BESIDE for step in steps for dy in dys]
        if spot := room.first(places, wide, 14):
            out.append(text(spot[0] + wide, spot[1] + 12, said, "end", 12, not dash))
    said = f"ridge {corner:.3g}"
    if spot := room.first([(middle[0] + 5, BOTTOM - 20), (middle[0] - 80, BOTTOM - 20)], width_of(said, 12), 14):
        out.append(text(spot[0], spot[1] + 12, said, size=12, bold=True))
    said = f"{metric_text(hardware.reachable_bytes_per_s, 'B/s')} x intensity"
    wide = width_of(said, 12)
    slope = [
        (start[0] + share * (middle[0] - start[0]) - wide - 12, start[1] + share * (middle[1] - start[1]) - 14)
        for share in (0.75, 0.85, 0.6, 0.95)
    ]
    if spot := room.first(slope, wide, 14):
        out.append(text(spot[0], spot[1] + 12, said, size=12))
    return out


@dataclass(frozen=True)
class Mark:
    """An op's dot or ring: its letter, its place, and what shows when the pointer rests on it."""

    letter: str
    measured: bool
    x: float
    y: float
    told: str


def _marks(
    axes: Axes, drawn: Sequence[Operation], seen: Mapping[str, float], hardware: Hardware, precision: str
) -> list[Mark]:
    """A mark for each prediction, and one for each measurement."""
    marks = []
    for k, each in enumerate(drawn):
        took = each.seconds(hardware, precision)
        for seconds, what in ((took, "predicted"), (seen.get(each.name), "measured")):
            if seconds is not None:
                told = f"{each.name}, {what}: {metric_text(each.flops / seconds, 'flop/s')}, {seconds_text(seconds)}"
                place = axes.at(each.intensity, each.flops / seconds)
                marks.append(Mark(_letter(k), what == "measured", *place, told))
    return marks


def _points(marks: Sequence[Mark], room: Room) -> list[str]:
    """A dot for each prediction, a ring for each measurement, and the op's letter where there is room beside it.

    The lines from marks to letters come first, so that none is drawn over the letter of another."""
    lines, out = [], []
    for mark in marks:
        style = f'fill="{PALETTE[1]}" stroke="{INK}"'
        if mark.measured:
            style = 'fill="none" stroke="currentColor" stroke-width="2.5"'
        body = f'<circle cx="{mark.x:.1f}" cy="{mark.y:.1f}" r="4.5" {style}/>'
        turns = [(r, angle) for r in (15, 24, 34, 46, 60, 76) for angle in TURNS]
        near = [(mark.x + r * math.sin(angle) - 7, mark.y + r * math.cos(angle) - 7) for r, angle in turns]
        if spot := room.first(near, 14, 14):
            a, b = spot[0] + 7, spot[1] + 7
            lines.append(line(mark.x, mark.y, a, b, width=0.6))
            room.keep_path([(mark.x, mark.y), (a, b)])
            body += (
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="7.5" fill="#fff" stroke="{INK}" stroke-width="0.6"/>'
                f'<text x="{a:.1f}" y="{b + 4:.1f}" text-anchor="middle" font-size="11" fill="{INK}">'
                f"{mark.letter}</text>"
            )
        out.append(f"<g><title>{mark.told}</title>{body}</g>")
    return [*lines, *out]


def _table(
    drawn: Sequence[Operation],
    seen: Mapping[str, float],
    hardware: Hardware,
    precision: str,
    n_placed: int,
    without: Sequence[Operation],
) -> tuple[list[str], float]:
    """Every letter's numbers."""
    y = BOTTOM + 62
    if not drawn:
        return [], BOTTOM + 40
    columns = ((30.0, "op, how often", "start"), (300.0, "flops", "end"), (375.0, "bytes", "end"),
               (455.0, "flop/byte", "end"), (530.0, "takes", "end"), (538.0, "bound by", "start"),
               (612.0, "measured" if seen else "", "start"))  # fmt: skip
    out = [text(x, y, word, anchor, bold=True, size=12) for x, word, anchor in columns if word]
    out.append(line(4, y + 6, WIDTH - 4, y + 6))
    for k, each in enumerate(drawn):
        y += 19
        took = each.seconds(hardware, precision)
        name = cut(each.name, 24) + (f" x {each.count}" if each.count > 1 else "")
        ratio = f"{each.intensity:.3g}" if each.intensity < 1000 else f"{each.intensity:,.0f}"
        cells = (name, metric_text(each.flops, "flop"), bytes_text(each.n_bytes), ratio, seconds_text(took),
                 each.bound(hardware, precision))  # fmt: skip
        out.append(text(10, y, _letter(k), "middle", 12, True))
        for (x, _, anchor), cell in zip(columns, cells, strict=False):
            out.append(text(x, y, cell, anchor, 12))
        if each.name in seen:
            seconds = seen[each.name]
            out.append(text(612, y, f"{seconds_text(seconds)}, {_off(took, seconds)}", size=12))
    notes = []
    if n_placed > len(drawn):
        notes.append(f"the {len(drawn)} ops that take longest are drawn; {n_placed - len(drawn)} more are not")
    if without:
        alone = sum(each.count * each.seconds(hardware, precision) for each in without)
        notes.append(
            f"{len(without)} ops do no flops and have no place, such as {without[0].name}: {seconds_text(alone)} in all"
        )
    if seen:
        notes.append("a dot: predicted; a ring: measured, with how much slower or faster that is than predicted")
    for said in notes:
        out.append(text(10, y := y + 21, cut(said, 126), size=12))
    return out, y


def _off(predicted: float, measured: float) -> str:
    """`32.5% slower`, `4.07 times as long`."""
    ratio = measured / predicted
    if 0.5 <= ratio <= 2:
        return f"{100 * abs(ratio - 1):.3g}% {'slower' if ratio >= 1 else 'faster'}"
    return f"{ratio:,.3g} times as long"


def _letter(k: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[k]
