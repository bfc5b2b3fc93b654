"""Numbers over steps: a loss curve, or several of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from matplotlib.ticker import MaxNLocator

from labkit.view import chart
from labkit.view.svg import Room, width_of
from labkit.view.units import number_text

Points = Sequence[tuple[float, float]]


@chart.style()
def curve(
    series: Mapping[str, Points],
    title: str = "loss",
    across: str = "step",
    upward: str = "",
    x_text: Callable[[float], str] = "{:g}".format,
) -> chart.Chart:
    """Each series of (step, value) as a line, with its first and last value; values that are not finite leave a gap.

    `across` and `upward` name the axes, with their units. Without `upward` that axis is "loss" if the title speaks of
    one, and otherwise what the title says before its first comma. `x_text` writes a number of the axis across: with
    `lambda log2: bytes_text(2**log2)` points at 10 and 20 stand at 1,024 B and 1 MiB. Raises ValueError if there is
    nothing finite to draw."""
    values = [value for points in series.values() for _, value in points if math.isfinite(value)]
    if not values:
        raise ValueError(f"{title}: no series holds a finite value; got {', '.join(series) or 'no series'}")
    low, high = min(values), max(values)
    margin = (high - low or abs(high) or 1.0) * 0.06
    steps = [step for points in series.values() for step, value in points if math.isfinite(value)]
    label = "; ".join(
        f"{name}: {number_text(points[0][1])} at {across} {x_text(points[0][0])}, {number_text(points[-1][1])} at "
        f"{x_text(points[-1][0])}"
        for name, points in series.items()
        if points
    )
    figure = chart.Chart(362, title, f"{title}: {label}", 760)
    axes = figure.panel(64, 72, 684, 320, xlim=(min(steps), max(max(steps), min(steps) + 1)))
    axes.set_ylim(low - margin, high + margin)
    for name, points in series.items():
        heights = [value if math.isfinite(value) else math.nan for _, value in points]
        axes.plot([step for step, _ in points], heights, label=name)
    axes.set_xlabel(across)
    chart.upward(axes, upward or ("loss" if re.search(r"\bloss\b", title) else title.partition(",")[0]))
    chart.marks(axes, x_text=x_text, y_text="{:.6g}".format)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    if len(series) > 1:
        figure.keys(64, 38, axes, fontsize=13)
    _last_values(figure, axes, series)
    return figure


def _last_values(figure: chart.Chart, axes: chart.Axes, series: Mapping[str, Points]) -> None:
    """The last value of each series behind its end, or at the nearest place that no line and no other number takes."""
    room, ends = Room(right=760), []
    (left, low), (right, _) = (chart.on_page(axes, x, axes.get_ylim()[0]) for x in axes.get_xlim())
    room.keep(left, low - 2, right - left, 60)  # the axis across, and the numbers and the name below it
    for line, points in zip(axes.get_lines(), series.values(), strict=True):
        run: list[tuple[float, float]] = []
        for step, value in points:
            run = [*run, chart.on_page(axes, step, value)] if math.isfinite(value) else []
            room.keep_path(run[-2:])
        finite = [(step, value) for step, value in points if math.isfinite(value)]
        if finite:
            x, y = chart.on_page(axes, *finite[-1])
            axes.plot(*finite[-1], "o", color=line.get_color(), markersize=8, clip_on=False)
            room.keep(x - 5, y - 5, 10, 10)
            ends.append((y, x, finite[-1][1]))
    for y, x, value in sorted(ends):
        words = number_text(value)
        drops = (0, 13, -13, 26, -26, 39, 52, -39, -52)
        sides = (x + 8, x - width_of(words) - 8)
        figure.put(room, [(left, y - 6 + drop) for left in sides for drop in drops], words, 13)
