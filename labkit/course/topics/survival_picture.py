"""A run that survives: its goodput over the interval between checkpoints, and over the number of devices.

    goodput |    ___                goodput | ----____      async
            |   /   \\___  async            |  ---    \\___
            |  / __     \\__                |     \\___    sync
            | / /  \\__ sync                |         \\
               interval                        devices
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from labkit.plan.pocket.survival import (
    HOUR_S,
    LLAMA3_DEVICE_MTBF_S,
    LLAMA3_DEVICES,
    Job,
    best_interval,
    goodput,
    job_mtbf,
    shares,
)
from labkit.view import chart
from labkit.view.svg import PALETTE
from labkit.view.units import plural, seconds_text

SYNC, ASYNC, SEEN = PALETTE[6], chart.LINES[0], PALETTE[2]
LEAST_S, MOST_S = 10.0, 1e5
FEWEST, MOST = 16, 131_072


class Played(NamedTuple):
    """One simulated or real run: its interval in seconds, its goodput, and the standard error of that."""

    interval_s: float
    goodput: float
    error: float


def of_devices(n_devices: int, block_s: float, write_s: float, restart_s: float,
               device_mtbf_s: float = LLAMA3_DEVICE_MTBF_S) -> Job:  # fmt: skip
    """The job on n devices that fail as often as those of Llama 3, if nothing else is said."""
    return Job(job_mtbf(device_mtbf_s, n_devices), block_s, restart_s, write_s)


@chart.style()
def survival(
    job: Job, interval_s: float, n_devices: int = LLAMA3_DEVICES, played: tuple[Played, ...] = (), title: str = ""
) -> chart.Chart:
    """Goodput over intervals with the chosen one and with `played` runs, beside goodput over numbers of devices, each
    with the write behind the steps (as in `job`) and before them. ValueError for an interval that `job` cannot keep."""
    parts = shares(job, interval_s)
    best = best_interval(job)
    title = title or f"{plural(n_devices, 'device')}, saved every {seconds_text(interval_s)}"
    facts = ", ".join(f"{item.name} {item.value:.1%}" for item in parts.items)
    sync = job.synchronous()
    law = (
        f"a failure every {job.mtbf_s / HOUR_S:.3g} h; "
        f"best every {seconds_text(best)} with {goodput(job, best):.1%} useful; "
        f"if the steps wait for the write, {goodput(sync, best_interval(sync)):.1%}"
    )
    figure = chart.Chart(412, f"{title}: {parts['useful']:.1%} useful", f"{title}: {facts}; {law}")
    figure.words(4, 42, facts)
    figure.words(4, 60, law, fontsize=12)
    _over_intervals(figure, job, interval_s, played)
    _over_devices(figure, job, n_devices)
    return figure


def _over_intervals(figure: chart.Chart, job: Job, interval_s: float, played: tuple[Played, ...]) -> None:
    """On the left, goodput over intervals, by law; dots are runs that were played."""
    axes = figure.panel(54, 104, 390, 350, xlim=(LEAST_S, MOST_S), ylim=(0, 1), xscale="log")
    for one, name, colour, dash in ((job, "async", ASYNC, "-"), (job.synchronous(), "sync", SYNC, chart.DASHES[1])):
        at = np.geomspace(max(LEAST_S, one.write_s - one.block_s, 1e-9), MOST_S, 120)
        axes.plot(at, [goodput(one, float(x) * (1 + 1e-9)) for x in at], color=colour, linestyle=dash, label=name)
    for run in played:
        hover = f"played: every {seconds_text(run.interval_s)}, {run.goodput:.1%} useful, error {run.error:.1%}"
        chart.dot(axes, run.interval_s, run.goodput, hover, color=SEEN)
    words = f"chosen: every {seconds_text(interval_s)}, {goodput(job, interval_s):.1%} useful"
    chart.dot(axes, interval_s, goodput(job, interval_s), words, **chart.CHOSEN)
    chart.marks(axes, (10, 100, 1000, 10_000, 100_000), (0, 0.25, 0.5, 0.75, 1), seconds_text, "{:.0%}".format)
    axes.set_xlabel("interval between checkpoints" + ("; dots: played" if played else ""))
    figure.words(54, 90, "useful", weight="bold", fontsize=12)
    figure.keys(120, 86, axes)


def _over_devices(figure: chart.Chart, job: Job, n_devices: int) -> None:
    """On the right, goodput at the best interval over numbers of devices."""
    axes = figure.panel(452, 104, 784, 350, xlim=(FEWEST, MOST), ylim=(0, 1), xscale="log")
    device_s = job.mtbf_s * n_devices
    for one, name, colour, dash in ((job, "async", ASYNC, "-"), (job.synchronous(), "sync", SYNC, chart.DASHES[1])):
        at = np.geomspace(FEWEST, MOST, 60)
        jobs = [Job(device_s / float(n), one.block_s, one.restart_s, one.write_s) for n in at]
        axes.plot(at, [goodput(k, best_interval(k)) for k in jobs], color=colour, linestyle=dash, label=name)
    words = f"chosen: {plural(n_devices, 'device')}, at best {goodput(job, best_interval(job)):.1%} useful"
    chart.dot(axes, n_devices, goodput(job, best_interval(job)), words, **chart.CHOSEN)
    chart.marks(axes, [16 * 8**k for k in range(5)], (0, 0.25, 0.5, 0.75, 1), "{:,.0f}".format, "{:.0%}".format)
    axes.set_xlabel("devices, each at its best interval")
    figure.words(452, 90, "useful", weight="bold", fontsize=12)
    figure.keys(518, 86, axes)
