"""Law, prediction and measurement side by side."""

from __future__ import annotations

import math

from labkit.view.svg import PALETTE, Picture, box, text, value_text


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
    top = max(abs(value) for _, value, _ in given) or 1.0
    body = [text(4, 20, title, size=15, bold=True)] if title else []
    y = 34.0 if title else 8.0
    words = []
    for name, value, fill in given:
        said = value_text(value, unit)
        if measured and name != "measured":
            said += f"  ({_apart(value, float(measured))})"
        body += [text(122, y + 19, name, "end"), box(130, y, max(2.0, 400 * abs(value) / top), 27, fill, "", said)]
        body.append(text(138 + max(2.0, 400 * abs(value) / top), y + 19, said))
        words.append(f"{name} {said}")
        y += 34
    return Picture("".join(body), y + 4, f"{title}: {', '.join(words)}".strip(": "))


def _apart(value: float, measured: float) -> str:
    ratio = value / measured
    if abs(ratio - 1) < 5e-4:
        return "exact"
    if 0.5 < ratio < 2:
        return f"{100 * (ratio - 1):+.1f}%"
    return f"{ratio:.3g} x the measurement"
