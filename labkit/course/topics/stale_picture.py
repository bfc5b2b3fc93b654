"""Stale gradients: which staleness bears which learning rate, and how the distance goes down, swings, or grows.

    lr h |  \\  diverges            |w| |\\    /\\
         | x  \\___                       | \\  /  \\  /      s = 4
         | o o     \\____  limit          |  \\/    \\/
         |  ----____  best               |   fresh
           staleness s                        steps
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from labkit.plan.stale import best, distances, limit, momentum, verdict
from labkit.view.axes import Axes
from labkit.view.svg import PALETTE, Picture, headline, line, text
from labkit.view.units import number_text

MOST = 16
"""The largest staleness of the map."""
LIMIT, BEST, CHOSEN, SEEN, FRESH = PALETTE[6], "#2B8CD6", PALETTE[4], PALETTE[2], PALETTE[7]
LOW, HIGH = 0.01, 4.0
FLOOR, CEILING = 1e-6, 1e3


class Seen(NamedTuple):
    """One recorded run: its staleness, its lr times curvature, and whether it went down."""

    staleness: float
    rate: float
    converged: bool


def stale(staleness: int, rate: float, runs: Sequence[Seen] = (), steps: int = 80, title: str = "") -> Picture:
    """The map of stable rates with the chosen point and recorded runs, beside |w| over steps on a quadratic.

    `rate` is the learning rate times the curvature. ValueError for a staleness or a rate below 0."""
    way = distances(staleness, rate, steps)
    what = verdict(staleness, rate)
    title = title or f"gradients {staleness} step{'s' * (staleness != 1)} old, lr × curvature {number_text(rate)}"
    facts = f"limit {limit(staleness):.3g}, best {best(staleness):.3g}, like momentum {momentum(staleness):.2g}"
    body = [headline(f"{title}: {what}"), text(4, 42, facts)]
    body += _map(staleness, rate, runs) + _way(staleness, rate, way, steps)
    label = f"{title}: {what}; {facts}; after {steps} steps |w| is {_distance(way[-1])}"
    for each in runs:
        label += f"; a recorded run of staleness {each.staleness:g} at {number_text(each.rate)} "
        label += "converged" if each.converged else "diverged"
    return Picture("".join(body), 412, label)


def _map(staleness: int, rate: float, runs: Sequence[Seen]) -> list[str]:
    """Left: rates over staleness, with the two laws."""
    axes = Axes(54, 84, 378, 340, (-0.5, MOST + 0.5), (LOW, HIGH), log_y=True)
    out = axes.frame("staleness s, in steps", number_text, number_text, range(0, MOST + 1, 2), (0.01, 0.1, 1.0, 2.0))
    out.append(text(54, 70, "lr × curvature", size=12, bold=True))
    out.append(axes.path([(s, limit(s)) for s in range(MOST + 1)], LIMIT))
    out.append(axes.path([(s, best(s)) for s in range(MOST + 1)], BEST, "8 4"))
    x, y = axes.at(11, 1.6)
    out += [text(x, y, "diverges", "middle"), text(x, axes.at(11, 0.057)[1], "swings", "middle")]
    out.append(text(axes.at(5, 0.018)[0], axes.at(5, 0.018)[1], "creeps", "middle"))
    out += [line(160, 66, 184, 66, "", 2.5, LIMIT), text(190, 70, "limit", size=12)]
    out += [line(230, 66, 254, 66, "8 4", 2.5, BEST), text(260, 70, "best", size=12)]
    out.append(axes.diamond(staleness, rate, CHOSEN))
    for each in runs:
        word = f"recorded: staleness {each.staleness:g}, lr × curvature {number_text(each.rate)}: "
        mark = axes.dot if each.converged else axes.cross
        colour = SEEN if each.converged else LIMIT
        out.append(mark(each.staleness, each.rate, colour, word + ("converged" if each.converged else "diverged")))
    if runs:
        out.append(text(54, 404, "recorded runs: a dot converged, a cross diverged", size=12))
    return out


def _way(staleness: int, rate: float, way: Sequence[float], steps: int) -> list[str]:
    """Right: the distance from the optimum, stale and fresh."""
    axes = Axes(462, 84, 780, 340, (0.0, float(steps)), (FLOOR, CEILING), log_y=True)
    powers = [10.0**k for k in range(-6, 4, 3)]
    out = axes.frame("step", number_text, lambda y: f"{y:g}", None, powers)
    out.append(text(462, 70, "|w|", size=12, bold=True))
    fresh = distances(0, rate, steps)
    out.append(axes.path([(t, max(each, FLOOR)) for t, each in enumerate(fresh)], FRESH, "2 3"))
    out.append(axes.path([(t, max(each, FLOOR)) for t, each in enumerate(way)], LIMIT if way[-1] > 1 else BEST))
    out += [line(520, 66, 544, 66, "", 2.5, BEST), text(550, 70, f"staleness {staleness}", size=12)]
    return [*out, line(650, 66, 674, 66, "2 3", 2.5, FRESH), text(680, 70, "fresh", size=12)]


def _distance(value: float) -> str:
    return number_text(value) if math.isfinite(value) else "beyond all bounds"
