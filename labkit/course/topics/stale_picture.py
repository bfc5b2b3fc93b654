"""Stale gradients: the learning rates that are stable for each staleness, and the distance from the optimum over steps.

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

import numpy as np

from labkit.plan.pocket.stale_gradients import best, distances, limit, momentum, verdict
from labkit.view import chart
from labkit.view.svg import PALETTE
from labkit.view.units import number_text

MOST = 16
"""The largest staleness of the map."""
LIMIT, BEST, SEEN, FRESH = PALETTE[6], chart.LINES[0], PALETTE[2], PALETTE[7]
LOW, HIGH = 0.01, 4.0
FLOOR, CEILING = 1e-6, 1e3


class Seen(NamedTuple):
    """One recorded run: its staleness, its learning rate times curvature, and True if its distance went down."""

    staleness: float
    rate: float
    converged: bool


@chart.style()
def stale(staleness: int, rate: float, runs: Sequence[Seen] = (), steps: int = 80, title: str = "") -> chart.Chart:
    """The map of stable rates with the chosen point and recorded runs, beside |w| over steps on a quadratic.

    `rate` is the learning rate times the curvature. ValueError for a staleness or a rate below 0."""
    way = distances(staleness, rate, steps)
    outcome = verdict(staleness, rate)
    title = title or f"gradients {staleness} step{'s' * (staleness != 1)} old, lr × curvature {number_text(rate)}"
    facts = f"limit {limit(staleness):.3g}, best {best(staleness):.3g}, like momentum {momentum(staleness):.2g}"
    label = f"{title}: {outcome}; {facts}; after {steps} steps |w| is {_distance(way[-1])}"
    for run in runs:
        label += f"; a recorded run of staleness {run.staleness:g} at {number_text(run.rate)} "
        label += "converged" if run.converged else "diverged"
    figure = chart.Chart(412, f"{title}: {outcome}", label)
    figure.words(4, 42, facts)
    _map(figure, staleness, rate, runs)
    _way(figure, staleness, rate, way)
    return figure


def _map(figure: chart.Chart, staleness: int, rate: float, runs: Sequence[Seen]) -> None:
    """On the left, rates over staleness, with the laws of the limit and of the best rate."""
    axes = figure.panel(54, 84, 378, 340, xlim=(-0.5, MOST + 0.5), ylim=(LOW, HIGH), yscale="log")
    steps = range(MOST + 1)
    axes.plot(steps, [limit(step) for step in steps], color=LIMIT, linestyle="-", label="limit")
    axes.plot(steps, [best(step) for step in steps], color=BEST, linestyle=chart.DASHES[1], label="best")
    for x, y, word in ((11, 1.6, "diverges"), (11, 0.057, "swings"), (6.5, 0.018, "creeps")):
        axes.text(x, y, word, fontsize=13, ha="center")
    chart.dot(
        axes, staleness, rate, f"chosen: staleness {staleness}, lr × curvature {number_text(rate)}", **chart.CHOSEN
    )
    for run in runs:
        hover = f"recorded: staleness {run.staleness:g}, lr × curvature {number_text(run.rate)}: "
        if run.converged:
            chart.dot(axes, run.staleness, run.rate, hover + "converged", color=SEEN)
        else:
            chart.dot(axes, run.staleness, run.rate, hover + "diverged", color=LIMIT, marker="x")
    if runs:
        figure.words(54, 404, "recorded runs: a dot converged, a cross diverged", fontsize=12)
    axes.set_xlabel("staleness s, in steps")
    chart.marks(axes, range(0, MOST + 1, 2), (0.01, 0.1, 1.0, 2.0), number_text, number_text)
    figure.words(54, 70, "lr × curvature", weight="bold", fontsize=12)
    figure.keys(170, 66, axes)


def _way(figure: chart.Chart, staleness: int, rate: float, way: Sequence[float]) -> None:
    """On the right, the distance from the optimum, with stale gradients and with fresh ones. Values beyond the axes are
    drawn at their edge."""
    axes = figure.panel(462, 84, 780, 340, xlim=(0, len(way) - 1), ylim=(FLOOR, CEILING), yscale="log", xlabel="step")
    colour, fresh = LIMIT if way[-1] > 1 else BEST, distances(0, rate, len(way) - 1)
    axes.plot(np.clip(way, FLOOR, CEILING), color=colour, linestyle="-", label=f"staleness {staleness}")
    axes.plot(np.clip(fresh, FLOOR, CEILING), color=FRESH, linestyle=chart.DASHES[2], label="fresh")
    chart.marks(axes, None, [10.0**power for power in range(-6, 4, 3)], number_text, "{:g}".format)
    figure.words(462, 70, "|w|", weight="bold", fontsize=12)
    figure.keys(520, 66, axes)


def _distance(value: float) -> str:
    return number_text(value) if math.isfinite(value) else "beyond all bounds"
