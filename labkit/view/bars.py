"""Law, prediction and measurement side by side: one number, or a breakdown item by item.

    compare(law=384, prediction=512, measured=384)           three bars and how far each is from the measurement
    compare(prediction=predict_memory(...), measured=probe.peak)

    parameters     prediction  ########## 40,000 B (exact)             4 N
                   measured    ########## 40,000 B
    optimizer      prediction  ################# 80,000 B (11.1% below the measurement)
                   measured    ################### 90,000 B

All bars of a picture have one scale, so that the item that explains the total is seen at once. Numbers below zero, such
as the seconds that overlap saves, go to the left of the line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from labkit.plan.breakdown import MEASURED, REHEARSED, Breakdown
from labkit.view import chart
from labkit.view.svg import PALETTE, WIDTH, cut, width_of
from labkit.view.units import apart, value_text

COLOURS = MappingProxyType({"law": PALETTE[0], "prediction": PALETTE[4], "measured": PALETTE[2]})
NAMES, LEFT, THIN = 14, 210.0, 19.0
"""The most letters of an item's name, where its bars begin, and the height of one bar with its gap."""


def compare(
    law: float | Breakdown | None = None,
    prediction: float | Breakdown | None = None,
    measured: float | Breakdown | None = None,
    unit: str = "B",
    title: str = "",
    rehearsed: float | Breakdown | None = None,
) -> chart.Chart:
    """A bar for each number that is given, with the number, and how far each is from the measurement.

    Breakdowns are drawn item by item, with their formulas, and their total last; they have units of their own, and
    `unit` is not used. Units "B" and "s" are scaled to KiB, ms and so on. Give `rehearsed` in place of `measured` for
    numbers from simulated devices (labkit.rehearse): the picture then says "rehearsed". A Breakdown from a rehearsal
    can be given as `measured`, since it knows its origin. Raises ValueError if nothing, or nothing finite, is given,
    for a breakdown beside a bare number, for different units, and for a measurement beside a rehearsal."""
    if measured is not None and rehearsed is not None:
        raise ValueError(f"give measured={measured} or rehearsed={rehearsed}: each picture holds against one of them")
    origin = MEASURED if rehearsed is None else REHEARSED
    seen = measured if rehearsed is None else rehearsed
    values = {"law": law, "prediction": prediction, "measured": seen}
    sides = {name: side for name, side in values.items() if side is not None}
    if any(isinstance(side, Breakdown) for side in sides.values()):
        origin = seen.origin if isinstance(seen, Breakdown) and rehearsed is None else origin
        return _by_item(sides, title, origin)
    if not sides or not all(math.isfinite(value) for value in sides.values()):  # type: ignore[arg-type]
        raise ValueError(f"compare needs at least one finite number, got law={law}, {prediction=}, measured={seen}")
    return _numbers({name: float(value) for name, value in sides.items()}, unit, title, origin)  # type: ignore[arg-type]


@chart.style()
def _numbers(values: Mapping[str, float], unit: str, title: str, origin: str) -> chart.Chart:
    """A bar for each number."""
    names = {"law": "law", "prediction": "your prediction", "measured": origin}
    words = {side: _words(side, values, unit, origin) for side in values}
    longest = max(map(abs, values.values())) or 1.0
    rooms = [(WIDTH - 142 - 7.4 * len(words[side])) * longest / abs(value) for side, value in values.items() if value]
    full = max(60.0, min([320.0, *rooms]))  # width of the longest bar; every number must fit behind its bar
    top, bottom = (34.0, 8.0) if title else (8.0, 4.0)
    label = "; ".join(f"{names[side]} {words[side]}" for side in values)
    figure = chart.Chart(top + 34 * len(values) + bottom - 4, title, f"{title}: {label}".strip(": "))
    axes = figure.panel(130, top, 130 + full, top + 34 * len(values), xlim=(0, longest), ylim=(len(values) - 0.5, -0.5))
    bars = axes.barh([names[side] for side in values], [abs(value) for value in values.values()], 27 / 34,
                     color=[COLOURS[side] for side in values], clip_on=False)  # fmt: skip
    axes.bar_label(bars, words.values(), padding=8, fontsize=13)
    for bar, side in zip(bars, values, strict=True):
        bar.set_gid(f"{names[side]}: {words[side]}")
        bar.set_width(max(bar.get_width(), 2 * longest / full))
    axes.tick_params(bottom=False, labelbottom=False, labelsize=13)
    axes.spines[:].set_visible(False)
    axes.grid(False)
    return figure


@chart.style()
def _by_item(sides: Mapping[str, float | Breakdown], title: str, origin: str) -> chart.Chart:
    """Items one below the other, each with a bar for each side, on one scale; then the totals."""
    whole = {name: side for name, side in sides.items() if isinstance(side, Breakdown)}
    units = {side.unit for side in whole.values() if side.unit}
    if len(whole) < len(sides) or len(units) > 1:
        got = ", ".join(f"{n} {s.unit if isinstance(s, Breakdown) else s!r}" for n, s in sides.items())
        raise ValueError(f"bars by item need breakdowns of one unit, and no bare numbers; got {got}")
    items = list(dict.fromkeys(name for side in whole.values() for name in side))
    rows = [(item, {side: dict(parts).get(item, 0.0) for side, parts in whole.items()}) for item in items]
    values = [value for _, row in rows for value in row.values()]
    if not items or not all(math.isfinite(value) for value in values):
        raise ValueError(f"bars need at least one item, and finite numbers; got {dict(rows)}")
    unit, names = units.pop() if units else "", {"measured": origin}
    rows.append(("total", {side: parts.total for side, parts in whole.items()}))
    words = {name: {side: _words(side, row, unit, origin) for side in row} for name, row in rows}
    formulas = {name: _formula(name, whole) for name, _ in rows}
    top = 34.0 if title else 8.0
    height = top + sum(THIN * len(whole) + 15 * bool(formulas[name]) + 8 for name, _ in rows) + 12
    label = "; ".join(
        f"{name}: " + ", ".join(f"{names.get(side, side)} {words[name][side]}" for side in row) for name, row in rows
    )
    figure = chart.Chart(height, title, f"{title}: {label}".strip(": "))
    axes = figure.panel(LEFT, top, WIDTH - 16, height, xlim=_ends(rows, words), ylim=(height, top))
    pixel = (axes.get_xlim()[1] - axes.get_xlim()[0]) / (WIDTH - LEFT - 16)
    y = top
    for name, row in rows:
        if name == "total":
            figure.rule(y, dash=(0, (2, 3)))
            y += 8
        figure.words(4, y + 14, cut(name, NAMES), weight="bold", gid=formulas[name] or name)
        axes.plot([0, 0], [y - 2, y + THIN * len(row) - 2], color="black", linestyle="-", linewidth=1, clip_on=False)
        for side, value in row.items():
            shown = names.get(side, side)
            figure.words(LEFT - 8, y + 14, shown, "right", fontsize=12)
            wide = math.copysign(max(abs(value), 1.5 * pixel), value)
            axes.barh(y + 8, wide, THIN - 3, color=COLOURS[side], gid=f"{name}, {shown}: {words[name][side]}",
                      clip_on=False)  # fmt: skip
            behind = (max(0.0, value), y + 8)
            axes.annotate(words[name][side], behind, (7, 0), textcoords="offset points", va="center_baseline")
            y += THIN
        if formulas[name]:
            figure.words(LEFT, y + 11, cut(formulas[name], 92), fontsize=11)
            y += 15
        y += 8
    axes.set_axis_off()
    return figure


def _words(side: str, row: Mapping[str, float], unit: str, origin: str) -> str:
    """A side's number in words, and how far it is from the measurement."""
    how = f" ({apart(row[side], row['measured'], origin)})" if side != "measured" and "measured" in row else ""
    return value_text(row[side], unit) + how


def _ends(rows: list[tuple[str, dict[str, float]]], words: Mapping[str, Mapping[str, str]]) -> tuple[float, float]:
    """The values at the left and the right edge, so that each number fits behind its bar."""
    values = [value for _, row in rows for value in row.values()]
    low, high = min(0.0, *values), max(0.0, *values)
    room, span = WIDTH - LEFT - 16, max(high - low, 1e-200)  # the reciprocal of a smaller span would overflow
    fits = [room / span]
    for name, row in rows:
        for side, value in row.items():
            if (reach := max(value, 0.0) - low) > span * 1e-9:
                fits.append((room - width_of(words[name][side], 12) - 7) / reach)
    return low, low + room / max(min(fits), 60 / span)


def _formula(item: str, whole: Mapping[str, Breakdown]) -> str:
    """The formula of an item and where it is written, from the first side that has one."""
    for side in whole.values():
        if item in side and (entry := side.item(item)).formula:
            return f"= {entry.formula}" + f"  [{entry.source}]" * bool(entry.source)
    return ""
