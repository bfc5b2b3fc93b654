"""Published runs as a picture: the seconds that were predicted over those that were measured, each run a mark.

    predicted |          /.     on the line: right
              |        /.o      below it: the planner dreams of more speed than was reached
              |      /o .       filled: held out, hollow: fitted to
              |    /.o
              +------------- measured

Both axes are logarithmic; the dotted lines are 15% above and below. (Numbers: plan.search.compared_with_published.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.lines import Line2D

from labkit.plan.search.compared_with_published import Compared, Errors
from labkit.view import chart
from labkit.view.units import plural, seconds_text

LEFT, RIGHT, TOP, BOTTOM = 70.0, 540.0, 70.0, 470.0
BESIDE = 566.0
BAND = 0.15
"""The share above and below which a prediction is called wrong in the picture."""


@chart.style()
def published(runs: Sequence[Compared], title: str = "") -> chart.Chart:
    """Predicted over measured seconds of a step; a colour and a shape for each source.

    Filled marks are runs that were held out, hollow ones those that constants were fitted to. ValueError for no
    runs."""
    if not runs:
        raise ValueError(
            "there are no runs to draw: labkit.plan.search.compared_with_published.compared() gives the published ones"
        )
    seconds = [value for run in runs for value in (run.predicted_s, run.measured_s)]
    low, high = min(seconds) / 1.4, max(seconds) * 1.4
    sources = [*dict.fromkeys(run.run.source for run in runs)]
    held_out = Errors.of([run.ratio for run in runs if not run.run.fitted])
    head = title or f"seconds of a step, predicted and measured: {len(runs):,} published runs"
    words = [_told(source, [run for run in runs if run.run.source == source]) for source in sources]
    if held_out.n_runs:
        words.append(f"of {held_out.n_runs:,} held out the median is {held_out.median:.2f} of the measured seconds")
    figure = chart.Chart(BOTTOM + 50, head, f"{head}: {'; '.join(words)}")
    axes = figure.panel(LEFT, TOP, RIGHT, BOTTOM, xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set_xlabel("measured")
    chart.upward(axes, "predicted")
    powers = [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    chart.marks(axes, powers, powers, seconds_text, seconds_text)
    for factor, dash, width in ((1.0, "-", 1.5), (1 + BAND, (0, (2, 4)), 1.0), (1 - BAND, (0, (2, 4)), 1.0)):
        axes.plot([low, high], [low * factor, high * factor], color="black", linestyle=dash, linewidth=width)
    for place, source in enumerate(sources):
        _marks(axes, [run for run in runs if run.run.source == source], place)
    _beside(figure, axes, runs, sources)
    return figure


def _marks(axes: chart.Axes, runs: Sequence[Compared], place: int) -> None:
    """The marks of one source: those that were fitted to hollow, below the others."""
    colour, shape = chart.LINES[place % 4], chart.MARKS[(place + place // 4) % 4]  # the fifth: another pair
    for fitted in (True, False):
        group = [run for run in runs if run.run.fitted == fitted]
        axes.plot([run.measured_s for run in group], [run.predicted_s for run in group], shape, markersize=5,
                  markerfacecolor="none" if fitted else colour, markeredgecolor=colour, markeredgewidth=0.8,
                  alpha=0.7, label=f"{runs[0].run.source}, {'fitted to' if fitted else 'held out'}",
                  gid=_told(runs[0].run.source, runs))  # fmt: skip


def _beside(figure: chart.Chart, axes: chart.Axes, runs: Sequence[Compared], sources: Sequence[str]) -> None:
    """At the right: the legend, and the median and the spread of each source."""
    y = TOP + 6
    for source in sources:
        group = [run for run in runs if run.run.source == source]
        figure.words(BESIDE, y, source, weight="bold")
        lines = [line for line in axes.get_lines() if str(line.get_label()).startswith(f"{source}, ")]
        for line, fitted in zip(lines, (True, False), strict=True):
            part = Errors.of([run.ratio for run in group if run.run.fitted == fitted])
            if not part.n_runs:
                continue
            y += 19
            x, up = (BESIDE + 5) / figure.width, 1 - (y - 4) / figure.height
            figure.add_artist(Line2D([x], [up], marker=line.get_marker(), linestyle="", markersize=7,
                                     markerfacecolor=line.get_markerfacecolor(),
                                     markeredgecolor=line.get_markeredgecolor()))  # fmt: skip
            name = f"{part.n_runs:,} {'fitted to' if fitted else 'held out'}"
            figure.words(BESIDE + 18, y, name, fontsize=12)
            y += 16
            figure.words(BESIDE + 18, y, f"{part.low:.2f}  {part.median:.2f}  {part.high:.2f}", fontsize=12)
        y += 18
    for words in ("three numbers: predicted /", "measured, 10th, median, 90th;", f"dotted: {BAND:.0%} off"):
        figure.words(BESIDE, y, words, fontsize=12)
        y += 16


def _told(source: str, runs: Sequence[Compared]) -> str:
    part = Errors.of([run.ratio for run in runs])
    return (
        f"{source}: {plural(part.n_runs, 'run')}, predicted / measured {part.median:.2f}, "
        f"from {part.low:.2f} to {part.high:.2f} for eight of ten"
    )
