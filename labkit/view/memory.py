"""Memory by kind: over time, with the peak explained, and predicted beside measured.

    over_time(probe.timeline)             stacked bands, the phases of the step below them, the peak taken apart
    beside(predicted, probe.peak)         two stacked bars on one scale, and a table that says how far each kind is off

Bands and table rows are in one order and carry their names, so that nothing rests on colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from labkit.plan.breakdown import KINDS, Breakdown
from labkit.view.svg import PALETTE, WIDTH, Picture, box, headline, line, round_marks, text, width_of
from labkit.view.units import apart, binary_text, bytes_text, seconds_text, value_text

COLOURS = (*PALETTE[:4], PALETTE[7], PALETTE[4], PALETTE[6])
"""One for each kind; without the dark blue, on which dark words are lost."""
LEFT, RIGHT, TOP, BOTTOM = 78.0, 566.0, 40.0, 290.0
COLUMNS, NUMBER = 160, WIDTH - 54.0
"""Slices of the time, each of which shows its highest moment; and where the numbers of the table end."""


class Moment(Protocol):
    """What is drawn: bytes in the order of KINDS at `t` seconds, and where in the program that was."""

    @property
    def t(self) -> float:
        """Seconds."""

    @property
    def phase(self) -> str:
        """`forward`, `backward`, ..., or nothing."""

    @property
    def module(self) -> str:
        """The module at work, or nothing."""

    @property
    def bytes(self) -> tuple[int, ...]:
        """By kind."""


def over_time(moments: Sequence[Moment], cap_bytes: int | None = None, title: str = "memory") -> Picture:
    """The live bytes by kind from the first to the last moment; the peak's are written out beside it.

    Time is cut into columns, and a column shows its highest moment: the peak is drawn at its full height. `cap_bytes`
    is drawn as a line. ValueError if there are no moments."""
    if not moments:
        raise ValueError("memory over time needs at least one moment; probe.timeline is empty before the probe is used")
    start, span = moments[0].t, moments[-1].t - moments[0].t or 1e-9
    top = max(moments, key=lambda moment: sum(moment.bytes))
    peak = sum(top.bytes)
    ceiling = 1.06 * max(peak, cap_bytes or 0, 1)
    columns = [*_columns(moments, start, span), moments[-1]]  # the end by itself: what is freed last is seen to fall
    wide, tall = (RIGHT - LEFT) / len(columns), (BOTTOM - TOP) / ceiling
    across = COLUMNS * wide
    where = f" of {top.module}" if top.module else ""
    place = f"in {top.phase}{where}" if top.phase else "outside of all modules"
    head = f"{title}: peak {bytes_text(peak)} at {seconds_text(top.t - start)}, {place}"
    body = [headline(head)]
    for mark in round_marks(ceiling, 2):
        y = BOTTOM - mark * tall
        body += [line(LEFT, y, RIGHT, y, "1 5"), text(LEFT - 6, y + 4, binary_text(mark), "end", 12)]
    lows = [0.0] * len(columns)
    for kind, name in enumerate(KINDS):
        highs = [low + moment.bytes[kind] for low, moment in zip(lows, columns, strict=True)]
        if any(moment.bytes[kind] for moment in columns):
            body.append(_band(lows, highs, wide, tall, COLOURS[kind], f"{name}: {bytes_text(top.bytes[kind])} at peak"))
        lows = highs
    body += _phases(columns, wide)
    x = LEFT + (top.t - start) / span * across
    beside_it = (x + 4, "start") if x + 36 < RIGHT else (x - 4, "end")
    body += [line(x, TOP - 8, x, BOTTOM, "3 3", 1.5), text(beside_it[0], TOP - 1, "peak", beside_it[1], 12)]
    if cap_bytes:
        y = BOTTOM - cap_bytes * tall
        body += [line(LEFT, y, RIGHT, y, "9 4", 2, PALETTE[6]), text(LEFT + 4, y - 4, f"cap {bytes_text(cap_bytes)}")]
    body += _table(top.bytes, peak)
    for k, words in enumerate(_why(moments, top, cap_bytes)):
        body.append(text(RIGHT + 16, TOP + 196 + 17 * k, words, size=12))
    for mark in round_marks(span) if len(moments) > 1 else [0.0]:
        at = LEFT + mark / span * across
        body.append(text(at, BOTTOM + 40, seconds_text(mark) if mark else "0", "middle", 12))
    said = ", ".join(f"{name} {n:,} B" for name, n in zip(KINDS, top.bytes, strict=True))
    return Picture("".join(body), BOTTOM + 48, f"{head}: {said}" + (f"; cap {cap_bytes:,} B" if cap_bytes else ""))


def beside(predicted: Breakdown, measured: Breakdown, title: str = "memory") -> Picture:
    """A stacked bar for the prediction and one for the measurement, on one scale, and each item's numbers in a table.

    Works for any Breakdown, of bytes or seconds. ValueError for different units, a negative item, or nothing at all."""
    both = predicted.against(measured)
    if not both.rows or any(row.predicted < 0 or row.measured < 0 for row in both.rows):
        raise ValueError(f"bars need items, none below 0; got {[(r.name, r.predicted, r.measured) for r in both.rows]}")
    longest = max(both.total.predicted, both.total.measured) or 1.0
    scale = (WIDTH - 108) / longest
    body = [headline(title)]
    for label, y in (("predicted", 34.0), (both.origin, 70.0)):
        body.append(text(82, y + 20, label, "end"))
        x = 90.0
        for k, row in enumerate(both.rows):
            value = row.predicted if label == "predicted" else row.measured
            said, wide = value_text(value, both.unit), value * scale
            short = bytes_text(value) if both.unit == "B" else said
            word = row.name if wide > 8 * len(row.name) else short if wide > 8 * len(short) else ""
            if value:
                body.append(box(x, y, wide, 30, COLOURS[k % len(COLOURS)], word, f"{label} {row.name}: {said}"))
            x += wide
    y = 128.0
    for x, word in ((385.0, "predicted"), (580.0, both.origin)):
        body.append(text(x, y, word, "end", bold=True))
    for k, row in enumerate((*both.rows, both.total)):
        y += 21
        total = k == len(both.rows)
        body += [] if total else [box(90, y - 11, 12, 12, COLOURS[k % len(COLOURS)])]
        body += [text(108, y, row.name, bold=total), text(385, y, value_text(row.predicted, both.unit), "end")]
        body.append(text(580, y, value_text(row.measured, both.unit), "end"))
        body.append(text(592, y, apart(row.predicted, row.measured, both.origin), size=12))
    lines = (f"{row.name}: {row.predicted:,.6g} predicted, {row.measured:,.6g} {both.origin}" for row in both.rows)
    return Picture("".join(body), y + 12, f"{title}, in {both.unit}: " + "; ".join(lines))


def _columns(moments: Sequence[Moment], start: float, span: float) -> list[Moment]:
    """The highest moment of each column; where nothing happened, what the last moment before it left."""
    highest: list[Moment | None] = [None] * COLUMNS
    last = list(highest)
    for moment in moments:
        k = min(COLUMNS - 1, int((moment.t - start) / span * COLUMNS))
        before = highest[k]
        if before is None or sum(moment.bytes) > sum(before.bytes):
            highest[k] = moment
        last[k] = moment
    columns, now = [], moments[0]
    for each, left in zip(highest, last, strict=True):
        columns.append(each if each is not None and sum(each.bytes) >= sum(now.bytes) else now)
        now = left or now
    return columns


def _band(lows: list[float], highs: list[float], wide: float, tall: float, fill: str, title: str) -> str:
    """The area between two staircases."""
    over = "".join(f"V{BOTTOM - y * tall:.1f}H{LEFT + (k + 1) * wide:.1f}" for k, y in enumerate(highs))
    under = "".join(f"V{BOTTOM - y * tall:.1f}H{LEFT + k * wide:.1f}" for k, y in reversed([*enumerate(lows)]))
    return f'<path d="M{LEFT:g} {BOTTOM:g}{over}{under}z" fill="{fill}"><title>{title}</title></path>'


def _phases(columns: Sequence[Moment], wide: float) -> list[str]:
    """A strip below the bands: which part of the step made the bytes above it."""
    runs: list[tuple[str, int, int]] = []
    phase = ""
    for k, moment in enumerate(columns):
        phase = moment.phase or phase  # a death belongs to the phase in which it happens
        if runs and runs[-1][0] == phase:
            runs[-1] = (phase, runs[-1][1], k + 1)
        else:
            runs.append((phase, k, k + 1))
    return [
        box(LEFT + a * wide, BOTTOM + 4, (b - a) * wide, 20, words=_short(name, (b - a) * wide), title=name)
        for name, a, b in runs
        if name
    ]


def _short(name: str, wide: float) -> str:
    """The name, its first letter or nothing: what can be read at this width."""
    return next((word for word in (name, name[:1].upper()) if width_of(word) + 6 < wide), "")


def _why(moments: Sequence[Moment], top: Moment, cap_bytes: int | None) -> list[str]:
    """The peak in words: what it is made of, what is left at the end, and how far the cap is."""
    peak, left = sum(top.bytes), sum(moments[-1].bytes)
    if not peak:
        return ["nothing was held"]
    size, name = max(zip(top.bytes, KINDS, strict=True), key=lambda each: each[0])
    said = [
        f"most of it: {name}, {bytes_text(size)}",
        f"at the end: {bytes_text(left)}, {_share(left / peak)} of it" if left else "at the end: all of it is freed",
    ]
    if cap_bytes:
        apart_from = bytes_text(abs(cap_bytes - peak))
        said.append(f"{apart_from} {'below' if peak <= cap_bytes else 'above'} the cap")
    return said


def _share(part: float) -> str:
    """`38.1%`, `0.8%`; what rounds to nothing is `<0.1%`, which is as short and not taken for nothing."""
    return "<0.1%" if 0 < part < 0.001 else f"{100 * part:.1f}%" if 0 < part < 0.01 else f"{100 * part:.3g}%"


def _table(at_peak: tuple[int, ...], peak: int) -> list[str]:
    """The peak's bytes, top band first as they are drawn."""
    out, y = [text(RIGHT + 16, TOP + 10, "at the peak", bold=True)], TOP + 10
    for kind, name in reversed([*enumerate(KINDS)]):
        y += 24
        share = _share(at_peak[kind] / peak) if peak else ""
        out += [box(RIGHT + 16, y - 11, 12, 12, COLOURS[kind]), text(RIGHT + 34, y, name)]
        out.append(text(NUMBER, y, bytes_text(at_peak[kind]), "end"))
        out.append(text(WIDTH - 4, y, share, "end", 12))
    total = text(RIGHT + 34, y + 26, "total", bold=True) + text(NUMBER, y + 26, bytes_text(peak), "end", bold=True)
    return [*out, line(RIGHT + 16, y + 8, WIDTH - 4, y + 8), total]
