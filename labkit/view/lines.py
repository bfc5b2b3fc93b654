"""Time against size: measured points, the fitted line, and the laws of ring, tree and star on that line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from labkit.plan.machine.collectives import ALGORITHMS, Line, crossover_bytes, seconds
from labkit.view import chart
from labkit.view.units import binary_text, bytes_text, seconds_text

Points = Sequence[tuple[float, float]]


def fitted(
    samples: Points,
    link: Line,
    title: str = "one message between two ranks",
    across: str = "bytes",
    upward: str = "time",
) -> chart.Chart:
    """Measured (bytes, seconds) as dots, alpha + bytes * beta as a line; both axes logarithmic, with these names."""
    words = f"fit: alpha {seconds_text(link.alpha_s)}, {link.bandwidth / 1e9:.3g} GB/s"
    return _plot({"measured": samples}, {words: link.seconds}, title, across, upward, ends=False)


def laws(n_ranks: int, link: Line, measured: Mapping[str, Points] | None = None) -> chart.Chart:
    """all_reduce by ring, tree and star on `n_ranks`: the laws as lines, measurements as dots, and the crossover."""
    curves = {name: _law(name, n_ranks, link) for name in ALGORITHMS}
    cross = crossover_bytes(n_ranks, link)
    where = f"ring and tree meet at {bytes_text(round(cross))}" if 0 < cross < math.inf else "ring and tree do not meet"
    title, across, upward = f"all_reduce on {n_ranks} ranks: {where}", "bytes of the tensor", "time of an all_reduce"
    return _plot(measured or {}, curves, title, across, upward, cross)


def _law(name: str, n_ranks: int, link: Line) -> Callable[[float], float]:
    return lambda n_bytes: seconds(name, "all_reduce", n_ranks, n_bytes, link)


@chart.style()
def _plot(
    dots: Mapping[str, Points],
    curves: Mapping[str, Callable[[float], float]],
    title: str,
    across: str,
    upward: str,
    mark: float = 0.0,
    ends: bool = True,
) -> chart.Chart:
    """Curves with their dots; `mark` is a number of bytes with a line of its own, `ends` names curves at their ends."""
    sizes = [size for points in dots.values() for size, _ in points] or [64.0, float(64 << 20)]
    low, high = max(1.0, min(sizes) / 2), max(max(sizes) * 2, 8.0)
    xs = np.geomspace(low, high, 61).tolist()
    times = [time for points in dots.values() for _, time in points] + [f(x) for f in curves.values() for x in xs]
    times = [time for time in times if 0 < time < math.inf] or [1e-6, 1.0]
    figure = chart.Chart(396, title, _words(title, dots, curves, (low, high)), 720)
    axes = figure.panel(74, 72, 660, 350, xscale="log", yscale="log", xlim=(low, high), xlabel=across)
    axes.set_ylim(min(times) / 1.5, max(times) * 1.5)
    if low < mark < high:
        axes.axvline(mark, color="black", linestyle=(0, (5, 4)), linewidth=1)
        axes.annotate(bytes_text(round(mark)), (mark, 0), (5, 8), ("data", "axes fraction"), "offset points", size=13)
    tips: list[tuple[float, str]] = []
    for place, name in enumerate([*curves, *(name for name in dots if name not in curves)]):
        points, colour = dots.get(name, ()), chart.LINES[place % 4]
        words = f"{name}, and measured" if name in curves and name in dots else name
        marker = (
            {"marker": chart.MARKS[place % 4], "markeredgecolor": "white", "markersize": 10} if name in dots else {}
        )
        key = {"color": colour, "linestyle": chart.DASHES[place % 4] if name in curves else "", **marker}
        axes.plot([], [], label=words, **key)
        if name in curves:
            axes.plot(xs, [curves[name](x) for x in xs], **{**key, "marker": ""})
            tips.append((chart.on_page(axes, high, curves[name](high))[1], name))
        for size, time in points:
            hover = f"{name}: {bytes_text(size)} in {seconds_text(time)}"
            axes.plot([size], [time], gid=hover, **{**key, "linestyle": ""})
    last = -math.inf
    for y, name in sorted(tips) if ends else ():  # pushed apart where curves end close together
        last = max(y + 4, last + 15)
        figure.words(666, last, name, weight="bold")
    chart.upward(axes, upward)
    _marks(axes)
    figure.keys(74, 38, axes, fontsize=13)
    return figure


def _marks(axes: chart.Axes) -> None:
    """Mark powers of two on the horizontal axis and round times on the vertical one, few enough to keep apart."""
    (low, high), (floor, ceiling) = axes.get_xlim(), axes.get_ylim()
    doublings, ratio = math.log2(high / low), ceiling / floor
    step = 1 if doublings < 6 else 2 if doublings < 12 else 4
    powers = [2.0**power for power in range(0, 64, step)]
    times = (1.0,) if ratio > 300 else (1.0, 2.0, 5.0) if ratio > 3 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    decade = math.floor(math.log10(floor))
    rounds = [time * 10.0 ** (decade + k) for k in range(14) for time in times]
    chart.marks(axes, powers, rounds, binary_text, seconds_text)


def _words(
    title: str, dots: Mapping[str, Points], curves: Mapping[str, Callable[[float], float]], ends: tuple[float, float]
) -> str:
    """The chart in words, for those who cannot see it: each curve at both ends, and each point."""
    series = [*((name, [(x, f(x)) for x in ends]) for name, f in curves.items()), *dots.items()]
    return "; ".join([title, *(
        f"{name}: " + ", ".join(f"{bytes_text(size)} in {seconds_text(time)}" for size, time in points)
        for name, points in series
    )])  # fmt: skip
