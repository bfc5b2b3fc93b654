"""Law, prediction and measurement side by side."""

from __future__ import annotations

import math

from labkit.view.svg import PALETTE, WIDTH, Picture, box, text
from labkit.view.units import value_text


def compare(
    law: float | None = None,
    prediction: float | None = None,
    measured: float | None = None,
    unit: str = "B",
    title: str = "",
) -> Picture:
    """A bar for each number that is given, with the number, and how far each is from the measurement.

    Units "B" and "s" are scaled to KiB, ms and so on. Raises ValueError if nothing, or nothing finite, is given."""
    rows = [("law", law, PALETTE[0]), ("your prediction", prediction, PALETTE[4]), ("measured", measured, PALETTE[2])]
    given = [(name, float(value), fill) for name, value, fill in rows if value is not None]
    if not given or not all(math.isfinite(value) for _, value, _ in given):
        raise ValueError(f"compare needs at least one finite number, got law={law}, {prediction=}, {measured=}")
    longest = max(abs(value) for _, value, _ in given) or 1.0
    said = []
    for name, value, _ in given:
        how = "" if measured is None or name == "measured" else f" ({apart(value, float(measured))})"
        said.append(value_text(value, unit) + how)
    room = [
        (WIDTH - 142 - 7.4 * len(words)) * longest / abs(v) for words, (_, v, _) in zip(said, given, strict=True) if v
    ]
    full = max(60.0, min([320.0, *room]))  # the longest bar, with place for every number behind its own
    body = [text(4, 20, title, size=15, bold=True)] if title else []
    y = 34.0 if title else 8.0
    for words, (name, value, fill) in zip(said, given, strict=True):
        wide = max(2.0, full * abs(value) / longest)
        body += [text(122, y + 19, name, "end"), box(130, y, wide, 27, fill, "", f"{name}: {words}")]
        body.append(text(138 + wide, y + 19, words))
        y += 34
    told = "; ".join(f"{name} {words}" for words, (name, _, _) in zip(said, given, strict=True))
    return Picture("".join(body), y + 4, f"{title}: {told}".strip(": "))


def apart(value: float, measured: float) -> str:
    """How far off a number is, in words: `exact`, `33.3% below the measurement`, `4 times the measurement`."""
    if value == measured:
        return "exact"
    if measured == 0 or value / measured < 0:
        return f"{value - measured:+,.3g} from the measurement"
    ratio = value / measured
    if 0.5 <= ratio <= 2:
        return f"{100 * abs(ratio - 1):.3g}% {'above' if ratio > 1 else 'below'} the measurement"
    many = f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"
    return f"{many} times the measurement"
