"""Latency against batch: what one decode step takes with more and more sequences, and the tokens that it makes.

a step |            __/          tokens   |           ____ fewer ranks
       |         __/  . latency  a second |       ___/
       |________/     |          and      |    __/   ___ more ranks
       |  weights     | memory   device   |  _/  ___/
          sequences                           a step
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.plan.pocket.generation import Generator
from labkit.view import chart
from labkit.view.svg import PALETTE
from labkit.view.units import plural, seconds_text

MOST_ROWS = 4096
PARTS = (("products", chart.LINES[0]), ("attention", chart.LINES[1]), ("sums over tp", chart.LINES[2]))
FULL = PALETTE[6]
CUTS = (1, 2, 4, 8)


def rows_between(most: int = MOST_ROWS) -> list[int]:
    """Numbers of sequences from 1 to `most`, evenly spaced in their logarithm."""
    return sorted({round(2**k) for k in np.linspace(0, np.log2(most), 49)})


@chart.style()
def latency(generator: Generator, rows: int, tokens: int, latency_s: float, title: str = "") -> chart.Chart:
    """A decode step over the sequences, part by part, with the memory's and the latency's bound; beside it tokens
    a second and device over the seconds of a step, for each tp that holds the model. All are predictions.

    ValueError for sizes that Generator refuses, and a latency that is not above 0."""
    step, most = generator.decode(rows, tokens).seconds, generator.rows_in_memory(tokens)
    within = generator.rows_within(latency_s, tokens)
    name = f"{generator.shape.name} on {generator.tp} x {generator.hardware.name}, tp {generator.tp}"
    title = title or f"{name}: {plural(rows, 'sequence')} of {plural(tokens, 'token')}"
    rate = rows / step.total
    own_rate = 1 / step.total
    facts = f"a step takes {seconds_text(step.total)}: {rate:,.0f} tokens a second, {own_rate:,.3g} to each sequence"
    fits = f"memory holds {plural(most, 'sequence')}" if most else "the weights alone do not fit into memory"
    law = f"{fits}; within {seconds_text(latency_s)} a step may have {within:,}; predictions"
    figure = chart.Chart(412, title, f"{title}: {facts}; {law}")
    figure.words(4, 42, facts)
    figure.words(4, 60, law, fontsize=12)
    _over_rows(figure, generator, rows, tokens, most, latency_s)
    _over_seconds(figure, generator, rows, tokens)
    return figure


def _over_rows(figure: chart.Chart, generator: Generator, rows: int, tokens: int, most: int, latency_s: float) -> None:
    """On the left, the seconds of a step and its parts."""
    at = rows_between()
    steps = [generator.decode(b, tokens).seconds for b in at]
    totals = [step.total for step in steps]
    low, high = 10 ** np.floor(np.log10(totals[0]) - 1), 10 ** np.ceil(np.log10(totals[-1]))
    axes = figure.panel(62, 104, 390, 350, xlim=(1, MOST_ROWS), ylim=(low, high), xscale="log", yscale="log")
    axes.plot(at, totals, color="black", label="a step")
    for place, (part, colour) in enumerate(PARTS):
        if part == PARTS[-1][0] and generator.tp == 1:
            continue
        seen = [(b, step[part]) for b, step in zip(at, steps, strict=True) if step[part] >= low]
        axes.plot(*zip(*seen, strict=True), color=colour, linestyle=chart.DASHES[place + 1], label=part)
    if 1 <= most <= MOST_ROWS:
        axes.axvline(most, color=FULL, linewidth=1.5, gid=f"memory is full with {plural(most, 'sequence')}")
    if low <= latency_s <= high:
        axes.axhline(latency_s, color=FULL, linewidth=1.5, linestyle=":", gid=f"the latency, {seconds_text(latency_s)}")
    now = generator.step_s(rows, tokens)
    chart.dot(axes, rows, now, f"chosen: {plural(rows, 'sequence')}, {seconds_text(now)}", **chart.CHOSEN)
    decades = [10.0**k for k in range(round(np.log10(low)), round(np.log10(high)) + 1)]
    chart.marks(axes, [8**k for k in range(5)], decades, "{:,.0f}".format, seconds_text)
    axes.set_xlabel("sequences; upright: memory is full, dotted: the latency")
    figure.keys(4, 86, axes)


def _over_seconds(figure: chart.Chart, generator: Generator, rows: int, tokens: int) -> None:
    """On the right, tokens a second and device, for each tp that holds the model."""
    lines = [(one, _until_full(one, tokens)) for one in _cuts(generator)]
    lines = [(one, points) for one, points in lines if points]
    times = [step_s for _, points in lines for step_s, _ in points]
    rates = [rate for _, points in lines for _, rate in points]
    now = generator.step_s(rows, tokens)
    chosen = now, rows / now / generator.tp
    left, right = min([*times, now]) / 1.5, max([*times, now]) * 1.5
    low, high = 10 ** np.floor(np.log10(min([*rates, chosen[1]]))), 10 ** np.ceil(np.log10(max([*rates, chosen[1]])))
    axes = figure.panel(470, 104, 772, 350, xlim=(left, right), ylim=(low, high), xscale="log", yscale="log")
    for place, (one, points) in enumerate(lines):
        axes.plot(*zip(*points, strict=True), color=chart.LINES[place], linestyle=chart.DASHES[place],
                  label=f"tp {one.tp}")  # fmt: skip
    words = f"chosen: {seconds_text(now)}, {chosen[1]:,.0f} tokens a second and device"
    chart.dot(axes, *chosen, words, **chart.CHOSEN)
    ticks = [times * 10.0**k for k in range(-4, 4) for times in (1, 3) if left <= times * 10.0**k <= right]
    decades = [10.0**k for k in range(round(np.log10(low)), round(np.log10(high)) + 1)]
    chart.marks(axes, ticks, decades, seconds_text, "{:,.6g}".format)
    axes.set_xlabel("a step; upward: tokens/s and device")
    if lines:
        figure.keys(470, 86, axes)


def _cuts(generator: Generator) -> list[Generator]:
    """The same model on 1 to 8 devices, as far as it can be cut."""
    some = []
    for tp in CUTS:
        try:
            some.append(Generator(generator.shape, generator.hardware, tp, generator.precision, generator.word))
        except ValueError:
            continue
    return some


def _until_full(generator: Generator, tokens: int) -> Sequence[tuple[float, float]]:
    """(seconds of a step, tokens a second and device) for more and more sequences, as many as fit into memory."""
    most = min(generator.rows_in_memory(tokens), MOST_ROWS)
    return (
        [(step_s, rate / generator.tp) for _, step_s, rate in generator.curve(rows_between(most), tokens)]
        if most
        else []
    )
