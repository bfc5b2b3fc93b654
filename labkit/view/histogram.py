"""Gradients by size, and what each number format makes of them: zero, subnormal, normal, or infinite.

    share |        __                         log2 |g|, times the loss scale
          |    |  |  |__
          |  __|__|  |  |__
          |_|__|__|__|__|__|___________
    fp16    zero |  subnormal  | normal              | infinite     31% become zero
    e5m2    zero          | subnormal | normal   ...                80% become zero

A loss scale of 2^k moves the gradients k places to the right, and nothing else. Gradients are counted by powers of two.
The edge at which a number becomes zero is a power of two, so that share is exact, except for numbers right on the edge.
The edge at which it becomes infinite, or the largest number, is drawn less than one power of two too far out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.probe.grads import GradientTable
from labkit.train.formats import BF16, E4M3, E5M2, FP16, Format
from labkit.view import chart
from labkit.view.svg import PALETTE, Room, round_marks, width_of

LEFT, RIGHT, TOP, BOTTOM, LANE = 66.0, 600.0, 66.0, 236.0, 26.0
KINDS = ("zero", "subnormal", "normal", "over")
FILLS = (PALETTE[6], PALETTE[1], PALETTE[0], PALETTE[3])


@dataclass(frozen=True)
class Fates:
    """Shares of gradients, by what a format makes of them. `zero` includes those that were zero before."""

    zero: float
    subnormal: float
    normal: float
    over: float


def edges(format: Format) -> tuple[int, int, int]:
    """Exponents e of 2^e <= |g| < 2^(e+1): the lowest that is not rounded to zero, the lowest normal, the highest."""
    lowest = math.floor(math.log2(format.smallest_subnormal)) - 1  # half of the smallest number rounds up to it
    return lowest, math.floor(math.log2(format.smallest_normal)), math.floor(math.log2(format.largest))


def fates(table: GradientTable, format: Format, log2_scale: int = 0, layer: str = "") -> Fates:
    """The fates in `format` of the table's gradients (of one `layer`, or all) times 2^log2_scale. NaN and inf are over.

    KeyError for a layer that the table does not have."""
    counts, zeros, total = _counted(table, layer)
    lowest, normal, highest = edges(format)
    tally = Counter[str]({"zero": zeros, "over": total - zeros - sum(counts.values())})
    for exponent, count in counts.items():
        tally[_kind(exponent + log2_scale, lowest, normal, highest)] += count
    return Fates(*(tally[kind] / max(1, total) for kind in KINDS))


@chart.style()
def histogram(
    table: GradientTable,
    format: Format = FP16,
    log2_scale: int = 0,
    layer: str = "",
    formats: Sequence[Format] = (FP16, BF16, E5M2, E4M3),
    span: tuple[int, int] | None = None,
    title: str = "",
) -> chart.Chart:
    """The table's gradients times 2^log2_scale, coloured by what `format` makes of them, above the lanes of `formats`.

    `layer`: one row of the table, all of them if empty. `span`: lowest and highest exponent of the page; the share of
    gradients beyond is given in words. ValueError for a span whose end is not above its beginning, KeyError for a layer
    that the table does not have."""
    counts, zeros, total = _counted(table, layer)
    moved = {exponent + log2_scale: count for exponent, count in counts.items()}
    low, high = span or (min([*moved, -30]) - 2, max([*moved, 16]) + 2)
    if low >= high:
        raise ValueError(f"the page goes from the lower exponent to the higher, got {low} to {high}")
    shares = {exponent: count / max(1, total) for exponent, count in sorted(moved.items()) if low <= exponent <= high}
    times = f" times 2^{log2_scale}" if log2_scale else ""
    title = title or f"{layer or 'all'}: {total:,} gradients{times}, as {_short(format)} holds them"
    beyond = sum(count for e, count in moved.items() if not low <= e <= high) / max(1, total)
    words = f"{zeros / max(1, total):.1%} were zero before" + (f"; {beyond:.1%} beyond this page" if beyond else "")
    of_each = [(shown, fates(table, shown, log2_scale, layer)) for shown in formats]
    label = "; ".join(
        f"{shown.name}: {of.zero:.1%} zero, {of.subnormal:.1%} subnormal, {of.normal:.1%} normal, {of.over:.1%} over"
        for shown, of in of_each
    )
    lanes = BOTTOM + 58 + LANE * len(formats)
    figure = chart.Chart(lanes + 6, title, f"{title}: {label}")
    figure.words(4, 42, words, fontsize=12)
    axes = figure.panel(
        LEFT, TOP, RIGHT, BOTTOM, xlim=(low, high + 1), xlabel="size of a gradient, times the loss scale"
    )
    most = max(moved.values(), default=1) / max(1, total)
    axes.set_ylim(0, most * (BOTTOM - TOP) / (BOTTOM - TOP - 4))
    for exponent, share in shares.items():
        kind = _kind(exponent, *edges(format))
        hover = f"2^{exponent} to 2^{exponent + 1}: {share:.2%}, {kind}"
        chart.box(axes, exponent + 0.05, 0, 0.9, share, FILLS[KINDS.index(kind)], "", hover, edge=0)
    step = 4 if high - low < 60 else 8
    chart.marks(axes, range(-(-low // step) * step, high + 1, step), round_marks(most)[1:], "2^{:g}".format,
                lambda share: f"{share:.3g}" if share < 0.01 else f"{share:.0%}")  # fmt: skip
    _zeros(axes, format, formats)
    below = figure.panel(LEFT, BOTTOM + 58, RIGHT, lanes, xlim=(low, high + 1), ylim=(LANE * len(formats), 0))
    below.set_axis_off()
    for place, (shown, of) in enumerate(of_each):
        _lane(figure, below, place * LANE, shown, of)
    return figure


def _zeros(axes: chart.Axes, chosen: Format, formats: Sequence[Format]) -> None:
    """A line for each format where gradients become zero in it, with its name where that fits."""
    room = Room(right=RIGHT)
    for kind in (chosen, *(format for format in formats if format != chosen)):
        edge, (low, high) = edges(kind)[0], axes.get_xlim()
        if low < edge < high:
            name = ("becomes zero in " if kind == chosen else "") + _short(kind)
            dash, width = ((5, 3), 2) if kind == chosen else ((2, 4), 1)
            axes.plot([edge, edge], [0, 1 + 12 / (BOTTOM - TOP)], color="black", linestyle=(0, dash), linewidth=width,
                      transform=axes.get_xaxis_transform(), clip_on=False)  # fmt: skip
            wide = width_of(name, 12)
            if room.take(chart.on_page(axes, edge, 0)[0] - 5 - wide, TOP - 14, wide + 10, 14):
                axes.annotate(name, (edge, 1), (-5, 3), ("data", "axes fraction"), "offset points", ha="right")


def _lane(figure: chart.Chart, axes: chart.Axes, y: float, format: Format, of: Fates) -> None:
    """The lane of a format: a box for each range of sizes with what it becomes, and the shares in words."""
    (low, high), (lowest, normal, highest) = axes.get_xlim(), edges(format)
    stops = [min(max(stop, low), high) for stop in (low, lowest, normal, highest + 1, high)]
    names = ("zero", "subnormal", "normal", "infinite" if format.overflow == "inf" else "the largest")
    figure.words(LEFT - 8, BOTTOM + 58 + y + 14, _short(format), "right", weight="bold")
    for start, stop, words, fill in zip(stops, stops[1:], names, FILLS, strict=False):
        if stop > start:
            hover = f"{_short(format)}: {words}, 2^{start:g} to 2^{stop:g}"
            chart.box(axes, start, y, stop - start, 19, fill, words, hover)
    shares = ", ".join(
        f"{share:.0%} {fate}" for share, fate in ((of.zero, "zero"), (of.subnormal, "low"), (of.over, "over"))
    )
    figure.words(RIGHT + 8, BOTTOM + 58 + y + 14, shares, fontsize=12)


def _short(format: Format) -> str:
    return format.name.removeprefix("fp8_")


def _counted(table: GradientTable, layer: str) -> tuple[Counter[int], int, int]:
    """(counts by exponent, number of zeros, number of all gradients)."""
    rows = [table[layer]] if layer else list(table)
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update(dict(row.histogram))
    return counts, round(sum(row.zeros * row.n for row in rows)), sum(row.n for row in rows)


def _kind(exponent: int, lowest: int, normal: int, highest: int) -> str:
    if exponent < lowest:
        return KINDS[0]
    return KINDS[1] if exponent < normal else KINDS[2] if exponent <= highest else KINDS[3]
