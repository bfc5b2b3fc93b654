"""Memory by kind: over time, with the peak explained, and predicted beside measured.

    over_time(probe.timeline)             stacked bands, the phases of the step below them, and the peak by kind
    beside(predicted, probe.peak)         two stacked bars on one scale, and a table that says how far each kind is off

Bands and rows of the table have the same order and carry their names, so that nobody has to tell them by colour alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from labkit.plan.breakdown import KINDS, Breakdown
from labkit.view import chart
from labkit.view.svg import KIND_COLOURS, PALETTE, WIDTH, round_marks, width_of
from labkit.view.units import apart, binary_text, bytes_text, seconds_text, value_text

LEFT, RIGHT, TOP, BOTTOM = 78.0, 566.0, 40.0, 290.0
COLUMNS, NUMBER = 160, WIDTH - 54.0
"""The number of slices of the time, each of which shows its highest moment; and where the table's numbers end."""


class SampledMemory(Protocol):
    """The bytes held at one moment, in the order of KINDS, and where in the program that was."""

    @property
    def t(self) -> float:
        """The moment in seconds."""

    @property
    def phase(self) -> str:
        """`forward`, `backward`, ..., or nothing."""

    @property
    def module(self) -> str:
        """The module at work, or nothing."""

    @property
    def bytes(self) -> tuple[int, ...]:
        """The bytes of each kind, in the order of KINDS."""


@chart.style()
def over_time(moments: Sequence[SampledMemory], cap_bytes: int | None = None, title: str = "memory") -> chart.Chart:
    """The live bytes by kind from the first to the last moment, with a table of the peak's bytes.

    Time is cut into columns, and a column shows its highest moment, so that the peak has its full height. `cap_bytes`
    is drawn as a line. ValueError if there are no moments."""
    if not moments:
        raise ValueError("memory over time needs at least one moment; probe.timeline is empty before the probe is used")
    start, span = moments[0].t, moments[-1].t - moments[0].t or 1e-9
    top = max(moments, key=lambda moment: sum(moment.bytes))
    peak = sum(top.bytes)
    ceiling = 1.06 * max(peak, cap_bytes or 0, 1)
    # the end has a column of its own, which shows the bytes that are freed last
    columns = [*_columns(moments, start, span), moments[-1]]
    where = f" of {top.module}" if top.module else ""
    place = f"in {top.phase}{where}" if top.phase else "outside of all modules"
    head = f"{title}: peak {bytes_text(peak)} at {seconds_text(top.t - start)}, {place}"
    label = ", ".join(f"{name} {n:,} B" for name, n in zip(KINDS, top.bytes, strict=True))
    label += f"; cap {cap_bytes:,} B" if cap_bytes else ""
    figure = chart.Chart(BOTTOM + 48, head, f"{head}: {label}")
    slice_s, kinds = span / COLUMNS, zip(*(moment.bytes for moment in columns), strict=True)
    axes = figure.panel(LEFT, TOP, RIGHT, BOTTOM, xlim=(0, len(columns) * slice_s), ylim=(0, ceiling))
    edges, lows = [slice_s * k for k in range(len(columns) + 1)], [0] * len(columns)
    for kind, sizes in enumerate(kinds):
        highs = [low + size for low, size in zip(lows, sizes, strict=True)]
        if any(sizes):
            hover = f"{KINDS[kind]}: {bytes_text(top.bytes[kind])} at peak"
            axes.stairs(highs, edges, baseline=lows, fill=True, color=KIND_COLOURS[kind], linewidth=0, gid=hover,
                        label=KINDS[kind], zorder=0.9)  # fmt: skip
        lows = highs
    at, height = top.t - start, BOTTOM - TOP
    if cap_bytes:
        axes.axhline(cap_bytes, color=PALETTE[6], linestyle=(0, (9, 4)), linewidth=2)
        far = 1 if at < 0.5 * span else 0  # its words stand away from the line of the peak
        axes.annotate(f"cap {bytes_text(cap_bytes)}", (far, cap_bytes), (4 - 8 * far, 4), ("axes fraction", "data"),
                      "offset points", fontsize=13, ha="right" if far else "left")  # fmt: skip
    _phases(axes, columns, slice_s)
    side = 4 if at / span * (RIGHT - LEFT) + 36 < RIGHT - LEFT else -4
    axes.plot([at, at], [0, 1 + 8 / height], "black", linestyle=(0, (3, 3)), linewidth=1.5, clip_on=False,
              transform=axes.get_xaxis_transform())  # fmt: skip
    axes.annotate("peak", (at, 1), (side, 1), ("data", "axes fraction"), "offset points",
                  ha="left" if side > 0 else "right")  # fmt: skip
    _table(figure, top.bytes, peak)
    for k, words in enumerate(_why(moments, top, cap_bytes)):
        figure.words(RIGHT + 16, TOP + 196 + 17 * k, words, fontsize=12)
    chart.marks(axes, round_marks(span) if len(moments) > 1 else [0.0], round_marks(ceiling, 2),
                lambda seconds: seconds_text(seconds) if seconds else "0", binary_text)  # fmt: skip
    axes.tick_params("x", length=0, pad=31)
    axes.spines[:].set_visible(False)
    return figure


@chart.style()
def beside(predicted: Breakdown, measured: Breakdown, title: str = "memory") -> chart.Chart:
    """A stacked bar for the prediction and one for the measurement, on one scale, and each item's numbers in a table.

    Works for any Breakdown, of bytes or seconds. ValueError for different units, a negative item, or nothing at all."""
    both = predicted.against(measured)
    if not both.rows or any(row.predicted < 0 or row.measured < 0 for row in both.rows):
        raise ValueError(f"bars need items, none below 0; got {[(r.name, r.predicted, r.measured) for r in both.rows]}")
    longest = max(both.total.predicted, both.total.measured) or 1.0
    lines = (f"{row.name}: {row.predicted:,.6g} predicted, {row.measured:,.6g} {both.origin}" for row in both.rows)
    figure = chart.Chart(161 + 21 * len(both.rows), title, f"{title}, in {both.unit}: " + "; ".join(lines))
    axes = figure.panel(90, 34, WIDTH - 18, 100, xlim=(0, longest), ylim=(66, 0))
    for name, y in (("predicted", 0), (both.origin, 36)):
        left = 0.0
        for k, row in enumerate(both.rows):
            value = row.predicted if name == "predicted" else row.measured
            amount = value_text(value, both.unit)
            if value:
                short = bytes_text(value) if both.unit == "B" else amount
                word = row.name if width_of(row.name) + 4 <= value / longest * (WIDTH - 108) else short
                chart.box(axes, left, y, value, 30, _colour(k), word, f"{name} {row.name}: {amount}", 13)
            left += value
    axes.set_yticks([15, 51], ["predicted", both.origin], fontsize=13)
    axes.spines[:].set_visible(False)
    axes.tick_params(bottom=False, labelbottom=False)
    axes.grid(False)
    for x, word in ((385.0, "predicted"), (580.0, both.origin)):
        figure.words(x, 128, word, "right", weight="bold")
    for k, row in enumerate((*both.rows, both.total)):
        y, total = 149 + 21 * k, k == len(both.rows)
        if not total:
            figure.swatch(90, y - 11, _colour(k))
        figure.words(108, y, row.name, weight="bold" if total else "normal")
        figure.words(385, y, value_text(row.predicted, both.unit), "right")
        figure.words(580, y, value_text(row.measured, both.unit), "right")
        figure.words(592, y, apart(row.predicted, row.measured, both.origin), fontsize=12)
    return figure


def _colour(k: int) -> str:
    return KIND_COLOURS[k % len(KIND_COLOURS)]


def _columns(moments: Sequence[SampledMemory], start: float, span: float) -> list[SampledMemory]:
    """The highest moment of each column; in a column without moments, the last one before it."""
    highest: list[SampledMemory | None] = [None] * COLUMNS
    last = list(highest)
    for moment in moments:
        k = min(COLUMNS - 1, int((moment.t - start) / span * COLUMNS))
        before = highest[k]
        if before is None or sum(moment.bytes) > sum(before.bytes):
            highest[k] = moment
        last[k] = moment
    columns, now = [], moments[0]
    for peak, left in zip(highest, last, strict=True):
        columns.append(peak if peak is not None and sum(peak.bytes) >= sum(now.bytes) else now)
        now = left or now
    return columns


def _phases(axes: chart.Axes, columns: Sequence[SampledMemory], slice_s: float) -> None:
    """A strip below the bands with the phases of the step."""
    phases, phase = [], ""
    for moment in columns:
        phase = moment.phase or phase  # tensors may be freed outside of phases, which counts as the one before
        phases.append(phase)
    unit = axes.get_ylim()[1] / (BOTTOM - TOP)  # bytes for one unit of the page
    begin = 0
    for name, run in itertools.groupby(phases):
        count = len([*run])
        if name:
            wide = count * slice_s / axes.get_xlim()[1] * (RIGHT - LEFT)
            chart.box(
                axes, begin * slice_s, -24 * unit, count * slice_s, 20 * unit, "none", _short(name, wide), name, 13
            )
        begin += count


def _short(name: str, wide: float) -> str:
    """The name, its first letter or nothing: what can be read at this width."""
    return next((word for word in (name, name[:1].upper()) if width_of(word) + 6 < wide), "")


def _why(moments: Sequence[SampledMemory], top: SampledMemory, cap_bytes: int | None) -> list[str]:
    """The peak in words: its largest kind, the bytes left at the end, and the distance to the cap."""
    peak, left = sum(top.bytes), sum(moments[-1].bytes)
    if not peak:
        return ["nothing was held"]
    size, name = max(zip(top.bytes, KINDS, strict=True), key=lambda pair: pair[0])
    lines = [
        f"most of it: {name}, {bytes_text(size)}",
        f"at the end: {bytes_text(left)}, {_share(left / peak)} of it" if left else "at the end: all of it is freed",
    ]
    if cap_bytes:
        apart_from = bytes_text(abs(cap_bytes - peak))
        lines.append(f"{apart_from} {'below' if peak <= cap_bytes else 'above'} the cap")
    return lines


def _share(part: float) -> str:
    """A share as `38.1%` or `0.8%`. One that would round to zero is `<0.1%`, so that nobody takes it for zero."""
    return "<0.1%" if 0 < part < 0.001 else f"{100 * part:.1f}%" if 0 < part < 0.01 else f"{100 * part:.3g}%"


def _table(figure: chart.Chart, at_peak: tuple[int, ...], peak: int) -> None:
    """The table of the peak's bytes, in the order of the bands from the top."""
    y = TOP + 10
    figure.words(RIGHT + 16, y, "at the peak", weight="bold")
    for kind, name in reversed([*enumerate(KINDS)]):
        y += 24
        figure.swatch(RIGHT + 16, y - 11, KIND_COLOURS[kind])
        figure.words(RIGHT + 34, y, name)
        figure.words(NUMBER, y, bytes_text(at_peak[kind]), "right")
        figure.words(WIDTH - 4, y, _share(at_peak[kind] / peak) if peak else "", "right", fontsize=12)
    figure.rule(y + 8, RIGHT + 16)
    figure.words(RIGHT + 34, y + 26, "total", weight="bold")
    figure.words(NUMBER, y + 26, bytes_text(peak), "right", weight="bold")
