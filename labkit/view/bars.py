"""Law, prediction and measurement side by side: one number, or a breakdown item by item.

    compare(law=384, prediction=512, measured=384)           three bars and how far each is from the measurement
    compare(prediction=predict_memory(...), measured=probe.peak)

    parameters     prediction  ########## 40,000 B (exact)             4 N
                   measured    ########## 40,000 B
    optimizer      prediction  ################# 80,000 B (11.1% below the measurement)
                   measured    ################### 90,000 B

All bars of a picture have one scale, so that the item that explains the total is seen at once; what is below zero, such
as what overlap saves, goes to the left of the line.
"""

from __future__ import annotations

import math
from html import escape

from labkit.plan.breakdown import MEASURED, REHEARSED, Breakdown
from labkit.view.svg import PALETTE, WIDTH, Picture, box, cut, headline, line, text, width_of
from labkit.view.units import value_text

ROWS = (("law", PALETTE[0]), ("prediction", PALETTE[4]), ("measured", PALETTE[2]))
NAMES, LEFT, THIN = 14, 210.0, 19.0
"""Letters of an item's name, where its bars begin, and the height of one."""


def compare(
    law: float | Breakdown | None = None,
    prediction: float | Breakdown | None = None,
    measured: float | Breakdown | None = None,
    unit: str = "B",
    title: str = "",
    rehearsed: float | Breakdown | None = None,
) -> Picture:
    """A bar for each number that is given, with the number, and how far each is from the measurement.

    Breakdowns are drawn item by item, with their formulas, and their total last; their own unit counts, not `unit`.
    Units "B" and "s" are scaled to KiB, ms and so on. `rehearsed` takes the place of `measured` for what simulated
    devices did (labkit.rehearse), and is called so; a Breakdown of a rehearsal says so by itself. Raises ValueError if
    nothing, or nothing finite, is given, for a breakdown beside a bare number, for different units, and for a
    measurement beside a rehearsal."""
    if measured is not None and rehearsed is not None:
        raise ValueError(f"give measured={measured} or rehearsed={rehearsed}: each picture holds against one of them")
    origin = MEASURED if rehearsed is None else REHEARSED
    seen = measured if rehearsed is None else rehearsed
    if any(isinstance(part, Breakdown) for part in (law, prediction, seen)):
        origin = seen.origin if isinstance(seen, Breakdown) and rehearsed is None else origin
        return _by_item({"law": law, "prediction": prediction, "measured": seen}, title, origin)
    return _numbers(law, prediction, seen, unit, title, origin)  # type: ignore[arg-type]


def _numbers(
    law: float | None, prediction: float | None, measured: float | None, unit: str, title: str, origin: str
) -> Picture:
    """Three bars."""
    rows = [("law", law, PALETTE[0]), ("your prediction", prediction, PALETTE[4]), (origin, measured, PALETTE[2])]
    given = [(name, float(value), fill) for name, value, fill in rows if value is not None]
    if not given or not all(math.isfinite(value) for _, value, _ in given):
        raise ValueError(f"compare needs at least one finite number, got law={law}, {prediction=}, {measured=}")
    longest = max(abs(value) for _, value, _ in given) or 1.0
    said = []
    for name, value, _ in given:
        how = "" if measured is None or name == origin else f" ({apart(value, float(measured), origin)})"
        said.append(value_text(value, unit) + how)
    room = [
        (WIDTH - 142 - 7.4 * len(words)) * longest / abs(v) for words, (_, v, _) in zip(said, given, strict=True) if v
    ]
    full = max(60.0, min([320.0, *room]))  # the longest bar, with place for every number behind its own
    body = [headline(title)] if title else []
    y = 34.0 if title else 8.0
    for words, (name, value, fill) in zip(said, given, strict=True):
        wide = max(2.0, full * abs(value) / longest)
        body += [text(122, y + 19, name, "end"), box(130, y, wide, 27, fill, "", f"{name}: {words}")]
        body.append(text(138 + wide, y + 19, words))
        y += 34
    told = "; ".join(f"{name} {words}" for words, (name, _, _) in zip(said, given, strict=True))
    return Picture("".join(body), y + 4, f"{title}: {told}".strip(": "))


def _by_item(sides: dict[str, float | Breakdown | None], title: str, origin: str) -> Picture:
    """Items one below the other, each with a bar for each side, on one scale; then the totals."""
    given = {name: side for name, side in sides.items() if side is not None}
    whole = {name: side for name, side in given.items() if isinstance(side, Breakdown)}
    units = {side.unit for side in whole.values() if side.unit}
    if len(whole) < len(given) or len(units) > 1:
        got = ", ".join(f"{n} {s.unit if isinstance(s, Breakdown) else s!r}" for n, s in given.items())
        raise ValueError(f"bars by item need breakdowns of one unit, and no bare numbers; got {got}")
    items = list(dict.fromkeys(name for side in whole.values() for name in side))
    values = {(side, item): dict(each).get(item, 0.0) for side, each in whole.items() for item in items}
    if not items or not all(math.isfinite(value) for value in values.values()):
        raise ValueError(f"bars need at least one item, and finite numbers; got {values}")
    unit = units.pop() if units else ""
    totals = {side: each.total for side, each in whole.items()}
    rows = [*((item, {side: values[side, item] for side in whole}) for item in items), ("total", totals)]
    said = {(name, side): _words(side, row, unit, origin) for name, row in rows for side in row}
    low = min(0.0, *(value for _, row in rows for value in row.values()))
    high = max(0.0, *(value for _, row in rows for value in row.values()))
    zero, scale = _scale(rows, said, low, high)
    body = [headline(title)] if title else []
    y = 34.0 if title else 8.0
    for name, row in rows:
        if name == "total":
            body.append(line(4, y, WIDTH - 4, y, "2 3"))
            y += 8
        body.append(
            f"<g><title>{escape(_why(name, whole) or name)}</title>{text(4, y + 14, cut(name, NAMES), bold=True)}</g>"
        )
        for side, value in row.items():
            wide = max(1.5, abs(value) * scale)
            left = zero if value >= 0 else zero - wide
            fill = dict(ROWS)[side]
            words = said[name, side]
            shown = origin if side == "measured" else side
            body += [text(LEFT - 8, y + 14, shown, "end", 12)]
            body.append(box(left, y, wide, THIN - 3, fill, "", f"{name}, {shown}: {words}"))
            body.append(text(zero + max(0.0, value * scale) + 7, y + 13, words, size=12))
            y += THIN
        body.append(line(zero, y - THIN * len(row) - 2, zero, y))  # beside the bars only: words stand below them
        if formula := _why(name, whole):
            body.append(text(LEFT, y + 11, cut(formula, 92), size=11))
            y += 15
        y += 8
    names = {"measured": origin}
    told = "; ".join(
        f"{name}: " + ", ".join(f"{names.get(side, side)} {said[name, side]}" for side in row) for name, row in rows
    )
    return Picture("".join(body), y + 4, f"{title}: {told}".strip(": "))


def _words(side: str, row: dict[str, float], unit: str, origin: str) -> str:
    """A number, and how far it is from the measurement."""
    how = f" ({apart(row[side], row['measured'], origin)})" if side != "measured" and "measured" in row else ""
    return value_text(row[side], unit) + how


def _scale(
    rows: list[tuple[str, dict[str, float]]], said: dict[tuple[str, str], str], low: float, high: float
) -> tuple[float, float]:
    """(where zero is, units of the page for one of the numbers), so that each number fits behind its bar."""
    room, span = WIDTH - LEFT - 16, max(high - low, 1e-200)  # less would overflow
    fits = [room / span]
    for name, row in rows:
        for side, value in row.items():
            if (reach := max(value, 0.0) - low) > span * 1e-9:
                fits.append((room - width_of(said[name, side], 12)) / reach)
    scale = max(min(fits), 60 / span)
    return LEFT - low * scale, scale


def _why(item: str, whole: dict[str, Breakdown]) -> str:
    """The formula of an item and where it is written, from the first side that has one."""
    for side in whole.values():
        if item in side and (found := side.item(item)).formula:
            return f"= {found.formula}" + f"  [{found.source}]" * bool(found.source)
    return ""


def apart(value: float, measured: float, origin: str = MEASURED) -> str:
    """How far off a number is, in words: `exact`, `33.3% below the measurement`, `4 times the rehearsal`."""
    what = "the rehearsal" if origin == REHEARSED else "the measurement"
    if value == measured:
        return "exact"
    if measured == 0 or value / measured < 0:
        return f"{value - measured:+,.3g} from {what}"
    ratio = value / measured
    if 0.5 <= ratio <= 2:
        return f"{100 * abs(ratio - 1):.3g}% {'above' if ratio > 1 else 'below'} {what}"
    many = f"{ratio:,.0f}" if 100 <= ratio < 1e9 else f"{ratio:.3g}"
    return f"{many} times {what}"
