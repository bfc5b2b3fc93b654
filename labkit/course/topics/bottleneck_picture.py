"""Where the time of a step goes, how that scales, and what to watch while it runs.

    speed-up |      / ideal                     communication  |######   | 22 ms, 41%
             |    /   ____ what if                             |==       | 6 ms
             |  o o--- . . law                  data           |###      | 11 ms, 20%
             |___________ ranks                                |###      | 11 ms

On the left, Amdahl's law with measured speed-ups; on the right, a recorded step by its parts, and what is left of each
part when some become faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from labkit.plan.breakdown import Breakdown
from labkit.plan.pocket.scaling import amdahl, fit_serial
from labkit.plan.step.bottlenecks import WORK, RankTime, culprit, gain, outside, scaled, shrunk, split
from labkit.probe.intervals import common, union, without
from labkit.probe.recording import Recording
from labkit.view import chart
from labkit.view.svg import PALETTE
from labkit.view.units import bytes_text, number_text, plural, seconds_text

LAW, IF, IDEAL, SEEN = chart.LINES[0], PALETTE[6], PALETTE[7], PALETTE[2]
MOST = 1024
"""The number of ranks at which curves end."""


def split_of(recording: Recording, data: str = "data", flops: float = 0.0, peak_flops: float = 0.0) -> Breakdown:
    """A recorded step of all ranks by its bottlenecks (plan.step.bottlenecks); spans named `data` are time for input.

    ValueError for a recording of no time."""
    times = []
    for row in recording.rows:
        parts = recording.parts[row.rank]
        reads = common(union((span.t0, span.t1) for span in row.spans if span.name == data), parts.compute)
        times.append(RankTime(without(parts.compute, reads), parts.exposed, parts.bubble, reads))
    return split(times, flops, peak_flops)


@chart.style()
def speed_up(
    measured: Mapping[int, float],
    serial: float,
    guess: tuple[int, float] | None = None,
    title: str = "",
    most: int = 64,
) -> chart.Chart:
    """Amdahl's law for a serial share (0 to 1), measured speed-ups as dots, and a prediction (ranks, speed-up).

    ValueError for a share outside 0 to 1."""
    points = sorted(measured.items())
    asked = [guess] if guess else []
    top = max([x for _, x in (*points, *asked)] + [amdahl(most, serial)]) * 1.25
    limit = "no limit" if not serial else f"never above {1 / serial:.3g}"
    name = title or "speed-up over one rank"
    label = f"{name}: law with serial share {serial:.1%}, {limit}"
    label += f"; you predicted {guess[1]:.3g} times on {plural(guess[0], 'rank')}" if guess else ""
    label += "".join(f"; measured on {plural(n, 'rank')} {x:.3g}, law {amdahl(n, serial):.3g}" for n, x in points)
    figure = chart.Chart(376, f"{name}: serial share {serial:.1%}, {limit}", label, 700)
    axes = _axes(figure.panel(64, 84, 640, 330), [*points, *asked], top, most)
    _law(axes, serial, "law", color=LAW, linestyle="-")
    for k, (n, x) in enumerate(points):
        hover = f"measured on {plural(n, 'rank')}: {x:.3g} times as fast"
        chart.dot(axes, n, x, hover, "" if k else "measured", color=SEEN)
    if guess:
        chart.dot(
            axes,
            *guess,
            f"you predicted {guess[1]:.3g} on {plural(guess[0], 'rank')}",
            "your prediction",
            **chart.CHOSEN,
        )
    figure.keys(64, 58, axes)
    return figure


@chart.style()
def explored(
    splits: Mapping[int, Breakdown], serial: float, n_ranks: int, faster: Mapping[str, float], title: str = ""
) -> chart.Chart:
    """Recorded steps {n_ranks: split}, Amdahl's law for `serial`, and what is left if parts are `faster` {name: times}.

    The bars are those of the largest recorded size up to `n_ranks`. The speed-ups of a curve are over its own smallest
    recorded size. ValueError for fewer than two sizes, and for parts that the splits do not have."""
    if len(splits) < 2:
        raise ValueError(f"a curve needs recorded steps of two sizes or more, got those of {sorted(splits)} ranks")
    after = {n: shrunk(steps, faster) for n, steps in splits.items()}
    was, now = ([(r.n_ranks, r.speed_up) for r in scaled({n: s.total for n, s in steps.items()})]
                for steps in (splits, after))  # fmt: skip
    changed = any(times != 1 for times in faster.values())
    rest = fit_serial(now) if changed else serial
    size = max((n for n in splits if n <= n_ranks), default=min(splits))
    before, left = splits[size], after[size]
    title = title or f"{size} rank{'s' * (size != 1)}: {seconds_text(before.total)} a step"
    title += f", most lost to {culprit(before)}" if any(before[part] for part in before if part not in WORK) else ""
    if changed:
        title += f"; then {seconds_text(left.total)}, {before.total / left.total:.3g} times as fast"
    law = f"at {plural(n_ranks, 'rank')}, by Amdahl's law: {_times(n_ranks, serial)}"
    if changed:
        law += f"; what if: {_times(n_ranks, rest)}"
    top = max([x for _, x in (*was, *now)] + [amdahl(MOST, serial), amdahl(MOST, rest)]) * 1.4
    parts = ", ".join(f"{name} {seconds_text(before[name])}" for name in before)
    seen = ", ".join(f"{x:.3g} on {n}" for n, x in was)
    figure = chart.Chart(412, title, f"{title}. {law}. Measured: {seen}. Parts: {parts}")
    figure.words(4, 42, law, fontsize=13 if len(law) < 105 else 12)
    axes = _axes(figure.panel(50, 96, 372, 350), was + now, top, MOST)
    _law(axes, serial, "law", color=LAW, linestyle="-")
    if changed:
        _law(axes, rest, "what if", color=IF, linestyle=chart.DASHES[1])
        for n, x in now[1:]:
            chart.dot(axes, n, x, f"what if, on {plural(n, 'rank')}: {x:.3g} times as fast", color=IF, marker="x")
    for n, x in was:
        chart.dot(axes, n, x, f"measured on {plural(n, 'rank')}: {x:.3g} times as fast", color=SEEN)
    chart.dot(axes, n_ranks, amdahl(n_ranks, serial), f"chosen: {plural(n_ranks, 'rank')}", **chart.CHOSEN)
    figure.keys(50, 72, axes)
    _parts(figure, before, left, changed)
    return figure


@chart.style()
def dashboard(
    watched: Mapping[str, tuple[Sequence[float], str]],
    limits: Mapping[str, tuple[float, float]] | None = None,
    title: str = "a run, watched",
) -> chart.Chart:
    """A small chart over the steps for each watched number: name -> (values, unit), two side by side.

    `limits` maps a name to (low, high), which are drawn; steps outside are crossed, and the title names the first of
    each number. ValueError if nothing is watched, or if the numbers have different lengths."""
    limits = dict(limits or {})
    lengths = {len(values) for values, _ in watched.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"a dashboard needs as many values of each number, got {sorted(lengths)}")
    outlying = {
        name: outside(values, *limits.get(name, (-math.inf, math.inf))) for name, (values, _) in watched.items()
    }
    alarms = [f"{name} out of its limits from step {steps[0]}" for name, steps in outlying.items() if steps]
    outcome = "; ".join(alarms) if alarms else "all within limits" if limits else "no limits"
    ends = "; ".join(
        f"{name}: first {_short(values[0], unit)}, last {_short(values[-1], unit)}"
        for name, (values, unit) in watched.items()
    )
    height = 60 + 122 * ((len(watched) + 1) // 2)
    figure = chart.Chart(height, f"{title}: {outcome}", f"{title}: {outcome}. {ends}")
    for k, (name, (values, unit)) in enumerate(watched.items()):
        left, top = 74.0 + 400 * (k % 2), 60.0 + 122 * (k // 2)
        axes = figure.panel(left, top, left + 300, top + 72)
        figure.words(left, top - 8, f"{name}: {_short(values[-1], unit)}", weight="bold")
        _watched(axes, values, unit, limits.get(name, ()), outlying[name])
    return figure


def _watched(
    axes: chart.Axes, values: Sequence[float], unit: str, limits: Sequence[float], steps: Sequence[int]
) -> None:
    """One number over the steps, with those of its limits that are near; the `steps` outside of them are crossed."""
    shown = [v for v in values if math.isfinite(v)] or [0.0]
    # a limit far from the values is left out: it would make their curve flat
    near = [v for v in limits if 0 < abs(v) <= 2 * max(map(abs, shown))]
    low, high = min(0.0, *shown, *near), max(0.0, *shown, *near)
    axes.set(xlim=(0, max(1, len(values) - 1)), ylim=(low, high + (0.1 * (high - low) or 1.0)))
    axes.grid(False)
    for limit in near:
        axes.axhline(limit, color="black", linestyle=(0, (6, 4)), linewidth=1)
    axes.plot([v if math.isfinite(v) else math.nan for v in values], color=LAW, linestyle="-")
    for step in steps:
        if math.isfinite(values[step]):
            chart.dot(axes, step, values[step], f"step {step}: {_short(values[step], unit)}", color=IF, marker="x")
    chart.marks(axes, sorted({0, len(values) - 1}), [max(shown)], lambda step: f"step {step:g}" if step else "0",
                lambda value: _short(value, unit))  # fmt: skip
    axes.tick_params(labelsize=11)
    axes.tick_params("x", length=0)


def _short(value: float, unit: str) -> str:
    if unit in ("B", "s"):
        return bytes_text(value) if unit == "B" else seconds_text(value)
    return f"{value:,.0f} {unit}".strip() if abs(value) >= 100 else f"{value:.3g} {unit}".strip()


def _parts(figure: chart.Chart, before: Breakdown, left: Breakdown, changed: bool) -> None:
    """On the right, a bar for each part, below it what is left of it, and the speed-up if the part took no time."""
    figure.words(400, 76, "a step by its parts" + ", and what if" * changed, weight="bold")
    most, bottom = max(before[name] for name in before), 84 + 50 * len(before)
    axes = figure.panel(526, 88, 656, bottom, xlim=(0, most), ylim=(bottom, 88))
    axes.tick_params(bottom=False, left=False, labelbottom=False, labelleft=False)
    axes.spines["bottom"].set_visible(False)
    axes.grid(False)
    for row, name in enumerate(before):
        y, fill = 92.0 + 50 * row, PALETTE[0] if name in WORK else PALETTE[1]
        figure.words(400, y + 12, "underused" if name == "underutilisation" else name, weight="bold")
        if fill == PALETTE[1]:
            figure.words(400, y + 29, f"gone: {gain(before, name):.3g} x", fontsize=12)
        words = f"{seconds_text(before[name])}, {before[name] / before.total:.0%}" if before[name] else "0"
        bars = [(before[name], y, fill, words, f"{name}: {words}")]
        if changed:
            words = seconds_text(left[name]) if left[name] else "0"
            bars.append((left[name], y + 18, chart.CHOSEN["color"], words, f"what if: {words}"))
        for value, top, colour, words, hover in bars:
            chart.box(axes, 0, top, max(1.5 / 130 * most, value), 16, colour, "", hover)
            axes.annotate(words, (value, top + 12), (8, 0), textcoords="offset points")


def _times(n: int, serial: float) -> str:
    speed = amdahl(n, serial)
    share = f"{speed / n:.0%}" if speed / n > 0.01 else f"{speed / n:.2%}"
    limit = f"limit {1 / serial:.3g}" if serial else "no limit"
    return f"{number_text(round(speed, 2))} times, {share} efficient, {limit}"


def _law(axes: chart.Axes, serial: float, label: str, **style: Any) -> None:
    """Draw Amdahl's law over the ranks of the axes."""
    ranks = np.geomspace(1, axes.get_xlim()[1], 41).tolist()
    axes.plot(ranks, [amdahl(n, serial) for n in ranks], label=label, **style)


def _axes(axes: chart.Axes, points: Sequence[tuple[float, float]], top: float, most: int) -> chart.Axes:
    """Set up axes of ranks and of speed-ups up to `top`, both logarithmic, and draw the ideal speed-up."""
    low, high = min([1.0] + [x for _, x in points]) / 1.15, max(top, 2.0)
    last = max([float(most)] + [n for n, _ in points])
    axes.set(xscale="log", yscale="log", xlim=(1, last), ylim=(low, high), xlabel="ranks")
    powers = [2.0**k for k in range(-8, 15)]
    up = powers if high > 8 * low else [0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0]
    chart.marks(axes, powers[8 :: 2 if last > 100 else 1], up, number_text, number_text)
    end = min(last, high)
    axes.plot([1, end], [1, end], color=IDEAL, linestyle=chart.DASHES[2], label="ideal")
    return axes
