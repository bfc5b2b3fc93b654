"""Numbers over steps: a loss curve, or several of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from labkit.view.svg import PALETTE, Picture, Room, headline, line, text, width_of
from labkit.view.units import number_text

LEFT, RIGHT, TOP, BOTTOM = 64, 690, 72, 320
COLOURS = ("#2B8CD6", PALETTE[6], PALETTE[2], PALETTE[3])
DASHES = ("", "8 4", "2 3", "8 3 2 3")
Points = Sequence[tuple[float, float]]


def curve(series: Mapping[str, Points], title: str = "loss", across: str = "step", upward: str = "") -> Picture:
    """Each series of (step, value) as a line, with its first and last value; values that are not finite leave a gap.

    `across` and `upward` name the axes, with their units. Without `upward` that axis is "loss" if the title speaks of
    one, and otherwise what the title says before its first comma. Raises ValueError if there is nothing finite to
    draw."""
    points = [point for each in series.values() for point in each if math.isfinite(point[1])]
    if not points:
        raise ValueError(f"{title}: no series holds a finite value; got {', '.join(series) or 'no series'}")
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(ys), max(ys)
    margin = (high - low or abs(high) or 1.0) * 0.06
    box = (min(xs), max(max(xs), min(xs) + 1), low - margin, high + margin)
    named = upward or ("loss" if re.search(r"\bloss\b", title) else title.partition(",")[0])
    body = [headline(title, width=760), *_axes(box, across, named)]
    room = Room(right=760)
    for run in (run for each in series.values() for run in _runs(each)):
        room.keep_path([_at(*point, box) for point in run])
    right, ends = float(LEFT), []
    for i, (name, each) in enumerate(series.items()):
        colour, dash = COLOURS[i % 4], DASHES[i % 4]
        body += [_path(run, box, colour, dash) for run in _runs(each)]
        finite = [point for point in each if math.isfinite(point[1])]
        if finite:
            x, y = _at(*finite[-1], box)
            body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
            room.keep(x - 5, y - 5, 10, 10)
            ends.append((y, x, number_text(finite[-1][1])))
        if len(series) > 1:
            body += [line(right, 38, right + 24, 38, dash, 2.5, colour), text(right + 30, 42, name)]
            right += 52 + 7.2 * len(name)
    for y, x, words in sorted(ends):  # behind its end, or where neither a line nor another number is
        wide = width_of(words)
        drops = (0, 13, -13, 26, -26, 39, 52, -39, -52)
        places = [(at, y - 6 + drop) for at in (x + 8, x - wide - 8) for drop in drops]
        if spot := room.first(places, wide, 12):
            body.append(text(spot[0], spot[1] + 10, words))
    told = "; ".join(
        f"{name}: {number_text(each[0][1])} at {across} {each[0][0]:g}, {number_text(each[-1][1])} at {each[-1][0]:g}"
        for name, each in series.items()
        if each
    )
    return Picture("".join(body), BOTTOM + 42, f"{title}: {told}", 760)


def _at(x: float, y: float, box: tuple[float, float, float, float]) -> tuple[float, float]:
    x0, x1, y0, y1 = box
    return LEFT + (x - x0) / (x1 - x0) * (RIGHT - LEFT), BOTTOM - (y - y0) / (y1 - y0) * (BOTTOM - TOP)


def _runs(points: Points) -> list[list[tuple[float, float]]]:
    """Stretches without a gap."""
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        else:
            runs.append([])
    return [run for run in runs if run]


def _path(run: Points, box: tuple[float, float, float, float], colour: str, dash: str) -> str:
    places = "L".join("{:.1f} {:.1f}".format(*_at(x, y, box)) for x, y in run)
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="M{places}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-linejoin="round"{style}/>'


def _axes(box: tuple[float, float, float, float], across: str, upward: str) -> list[str]:
    out = [line(LEFT, BOTTOM, RIGHT, BOTTOM), line(LEFT, TOP, LEFT, BOTTOM)]
    out.append(text((LEFT + RIGHT) / 2, BOTTOM + 36, across, "middle", 12))
    out.append(text(4, TOP - 12, upward, size=12))
    for x in _marks(box[0], box[1], whole=True):
        place, _ = _at(x, box[2], box)
        out += [line(place, BOTTOM, place, BOTTOM + 5), text(place, BOTTOM + 19, f"{x:g}", "middle", 12)]
    for y in _marks(box[2], box[3], whole=False):
        _, place = _at(box[0], y, box)
        out += [line(LEFT, place, RIGHT, place, "1 5"), text(LEFT - 8, place + 4, f"{y:.6g}", "end", 12)]
    return out


def _marks(low: float, high: float, whole: bool) -> list[float]:
    """About five round numbers between low and high."""
    raw = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(raw))
    every = next(m * size for m in (1, 2, 5, 10) if m * size >= raw)
    every = max(1.0, every) if whole else every
    first = math.ceil(low / every)
    return [round(k * every, 12) for k in range(first, math.floor(high / every) + 1)]
