"""Bottlenecks: where the seconds of a measured step went, and what would be won if some of them shrank.

    rank 0   |-- data --|------ compute ------|== communication ==|          each instant of each rank's main thread
    rank 1   |--------- data ---------|------ compute ------|=====|          belongs to one of four kinds
             |               waits for rank 1 ..............|                waiting = bubble

    compute         works                                       useful: flops / peak    underutilisation: the rest
    communication   waits for the wire                          what is hidden behind compute does not count
    bubble          waits for a rank                            imbalance, fill and drain of a pipeline
    data            has no input, or waits for ranks that have none: no rank works, and one reads

The parts of a split are those of the average rank, and add up to the step. `plan.pocket.scaling.bottlenecks` predicts
the same names. A part p of the step that gets k times as fast makes the step 1 / (1 - p + p/k) times as fast: that is
Amdahl's law again, with k in the place of the ranks.

Sources: Amdahl 1967; Gustafson 1988; MFU: Chowdhery et al., arXiv:2204.02311, appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from labkit.plan.breakdown import Breakdown, Item

Intervals = Sequence[tuple[float, float]]
WORK = ("useful", "compute")
"""The parts of a split that are not lost."""


class RankTime(NamedTuple):
    """The time of one rank's main thread, as disjoint intervals (begin, end): seconds on one time axis of all ranks."""

    compute: Intervals
    communication: Intervals
    bubble: Intervals
    data: Intervals


def split(ranks: Sequence[RankTime], flops: float = 0.0, peak_flops: float = 0.0) -> Breakdown:
    """Seconds of the average rank by what they went to: compute, communication, bubble, data.

    With the `flops` of the model in this time on all ranks together, and the `peak_flops` a second of one rank, compute
    is split: useful is flops / (n x peak), underutilisation the rest; useful over the total is the MFU.
    ValueError for no ranks, for no time, and for flops without a peak."""
    if not ranks or (flops > 0) != (peak_flops > 0) or flops < 0:
        raise ValueError(
            f"a split needs ranks, and flops with a peak; got {len(ranks)} ranks, {flops:g}, {peak_flops:g}"
        )
    n, starved = len(ranks), starved_s(ranks)
    compute, communication, bubble, data = (sum(b - a for rank in ranks for a, b in rank[k]) / n for k in range(4))
    if not compute + communication + bubble + data > 0:
        raise ValueError("ranks that did nothing have no time to split")
    rows = [("compute", compute, "neither waits nor reads")]
    if flops:
        useful = min(compute, flops / (n * peak_flops))
        rows = [("useful", useful, f"{flops:.3g} flops / ({n} x {peak_flops:.3g} flop/s)")]
        rows.append(("underutilisation", compute - useful, "compute - useful: small or memory-bound ops"))
    rows += [
        ("communication", communication, "waits for the wire"),
        ("bubble", max(0.0, bubble - starved / n), "waits for a rank that is at work"),
        ("data", data + starved / n, "reads, or waits for ranks that read"),
    ]
    return Breakdown(Item(name, value, "s", formula, "measured") for name, value, formula in rows)


def starved_s(ranks: Sequence[RankTime]) -> float:
    """Seconds, summed over ranks, in which a rank waits for others while no rank works and at least one reads data."""
    events: list[tuple[float, int, int]] = []
    for rank in ranks:
        for kind, spans in enumerate(((*rank.compute, *rank.communication), rank.bubble, rank.data)):
            events += [(t, kind, by) for a, b in spans for t, by in ((a, 1), (b, -1))]
    now, before, starved = [0, 0, 0], 0.0, 0.0
    for t, kind, by in sorted(events):
        if now[0] == 0 and now[2] > 0:
            starved += now[1] * (t - before)
        now[kind] += by
        before = t
    return starved


# -- what if --------------------------------------------------------------------------------------------------------


def shrunk(parts: Breakdown, faster: Mapping[str, float]) -> Breakdown:
    """The same step with faster parts: {"data": 4.0} makes data 4 times as fast; inf makes a part vanish.

    ValueError for a part that is not there, and for a factor that is not above 0."""
    for name, times in faster.items():
        if name not in parts or not times > 0:
            raise ValueError(f"{name} {times:g} times as fast: the parts are {', '.join(parts)}, and times are above 0")
    rows = []
    for item in parts.items:
        times = faster.get(item.name, 1.0)
        why = item.formula if times == 1 else f"{item.value:.4g} s / {times:g}"
        rows.append(Item(item.name, item.value / times, item.unit, why, item.source))
    return Breakdown(rows)


def gain(parts: Breakdown, name: str, times: float = math.inf) -> float:
    """The speed-up of the step if one part gets `times` times as fast: 1 / (1 - p + p/times), p its share."""
    left = shrunk(parts, {name: times}).total
    return parts.total / left if left > 0 else math.inf


def culprit(parts: Breakdown) -> str:
    """The name of the largest part that is lost. "useful" is not lost; "compute" may be useful, so it does not count.

    ValueError where nothing is lost."""
    lost = {name: parts[name] for name in parts if name not in WORK and parts[name] > 0}
    if not lost:
        raise ValueError(f"nothing is lost: {parts.total:g} s, all of them {' and '.join(parts)}")
    return max(lost, key=lambda name: lost[name])


# -- curves ---------------------------------------------------------------------------------------------------------


class Scaled(NamedTuple):
    """One size of a measured curve. `speed_up`: work a second over that of the first size; `efficiency`: 0 to 1."""

    n_ranks: int
    seconds: float
    speed_up: float
    efficiency: float


def scaled(seconds: Mapping[int, float], weak: bool = False) -> list[Scaled]:
    """{n_ranks: seconds of a step} as a curve against its smallest size, which counts as n_ranks times one.

    Strong: the work of a step stays, so the speed-up is T1 / Tn. Weak: it grows with n, so it is n T1 / Tn.
    ValueError for no sizes, and seconds or ranks that are not above 0."""
    if not seconds or any(n < 1 or not 0 < t < math.inf for n, t in seconds.items()):
        raise ValueError(f"a curve needs seconds above 0 for each number of ranks, got {dict(seconds)}")
    first = min(seconds)
    rows = []
    for n in sorted(seconds):
        speed = seconds[first] / seconds[n] * (n if weak else first)
        rows.append(Scaled(n, seconds[n], speed, speed / n))
    return rows


def gustafson(n_ranks: float, serial: float) -> float:
    """The work that n ranks do in the time of one, in multiples of its work, if the work grows with them:
    n - s (n - 1), Gustafson 1988.

    `serial` is the share of the step *on n ranks* that does not grow. ValueError for less than one rank, and a share
    outside 0 to 1."""
    if not n_ranks >= 1 or not 0 <= serial <= 1:
        raise ValueError(f"Gustafson's law is for 1 rank or more and a share of 0 to 1, got {n_ranks} and {serial}")
    return n_ranks - serial * (n_ranks - 1)


def fed(step_s: float, load_s: float, workers: int = 0) -> float:
    """Seconds a step takes with its input: load + step without workers; with them whichever is slower, for they load
    while the step runs: max(step, load / workers).

    ValueError for seconds or workers below 0."""
    if min(step_s, load_s, workers) < 0:
        raise ValueError(f"seconds and workers are 0 or more, got {step_s}, {load_s} and {workers}")
    return max(step_s, load_s / workers) if workers else step_s + load_s


def outside(values: Sequence[float], low: float = -math.inf, high: float = math.inf) -> list[int]:
    """The steps at which a watched number left its limits, or was no number."""
    return [step for step, value in enumerate(values) if not low <= value <= high]
