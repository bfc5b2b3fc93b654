"""Scaling: why n devices are not n times as fast, in formulas.

    Amdahl         speed-up = 1 / (s + (1 - s) / n)         s: the share of one device's step that does not shrink
                   s = 5%:  n = 8: 5.9x   64: 15.4x   256: 18.6x   without end: 20x
    weak           the batch grows with n: what one device does stays, only communication grows
    strong         the batch stays: what one device does shrinks, until products are too small and messages too many

    four reasons why more devices do not help          seconds of a step that are lost to it
    communication        what is sent and not hidden   tp + pp + dp + overlap
    bubble               ranks wait for their turn     (p-1) / (m + p-1) of a step, or less
    underutilisation     small or memory-bound ops     compute - flops / peak
    data                 input comes too slowly        bytes of a batch / rate - step, if above zero

Sources: Amdahl 1967; Gustafson 1988 (weak); Karp and Flatt 1990 (s from a measured speed-up); Narayanan et al.,
arXiv:2104.04473, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.job.recipe import Recipe
from labkit.plan.job.stages import micro_rows
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.step.time import peak_of, predict_step

AMDAHL = "Amdahl 1967"
MOST_RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def amdahl(n_ranks: float, serial: float) -> float:
    """The speed-up of `n_ranks` devices over one if the share `serial` of the work does not shrink (0 to 1).

    1 / (s + (1 - s) / n). ValueError for less than one rank, and a share outside 0 to 1."""
    if not n_ranks >= 1 or not 0 <= serial <= 1:
        raise ValueError(f"Amdahl's law is for 1 rank or more and a share of 0 to 1, got {n_ranks} and {serial}")
    return 1 / (serial + (1 - serial) / n_ranks)


def amdahl_items(n_ranks: float, serial: float) -> tuple[Item, Item, Item]:
    """(speed-up, efficiency, limit) with formulas; the limit is that of endless ranks."""
    speed = amdahl(n_ranks, serial)
    return (
        Item("speed-up", speed, "", f"1 / (s + (1 - s) / n), s = {serial}, n = {n_ranks:g}", AMDAHL),
        Item("efficiency", speed / n_ranks, "", "speed-up / n", AMDAHL),
        Item("limit", 1 / serial if serial else float("inf"), "", "1 / s", AMDAHL),
    )


def serial_share(n_ranks: float, speed_up: float) -> float:
    """The share s that explains a measured speed-up: (1/x - 1/n) / (1 - 1/n), Karp and Flatt 1990.

    If it grows with n, it is not serial work but communication. ValueError for fewer than two ranks."""
    if not n_ranks > 1 or not speed_up > 0:
        raise ValueError(f"a speed-up above 0 on more than one rank says something, got {speed_up} on {n_ranks}")
    return (1 / speed_up - 1 / n_ranks) / (1 - 1 / n_ranks)


def fit_serial(samples: Sequence[tuple[float, float]]) -> float:
    """The share s of (n_ranks, speed-up) samples, by least squares of 1/x = s + (1 - s)/n; 0 to 1.

    ValueError unless there is a sample of more than one rank with a speed-up above 0."""
    points = [(1 - 1 / n, 1 / x - 1 / n) for n, x in samples if n > 1 and x > 0]
    if not points:
        raise ValueError(f"a sample of more than one rank and a speed-up above 0 is needed, got {list(samples)[:4]}")
    return min(1.0, max(0.0, sum(a * b for a, b in points) / sum(a * a for a, _ in points)))


def bottlenecks(
    shape: Any,
    layout: Layout,
    recipe: Recipe,
    hardware: Hardware,
    data_bytes_per_s: float = float("inf"),
    bytes_per_token: float = 2.0,
) -> Breakdown:
    """Seconds of a step by what they are lost to; "useful" is what is left: flops that the model needs / peak.

    `data_bytes_per_s` is what the input pipeline of one rank delivers. ValueError for a rate that is not above zero."""
    if not data_bytes_per_s > 0:
        raise ValueError(f"input must come at more than 0 bytes/s, got {data_bytes_per_s}")
    shape = ModelShape.of(shape)
    step = predict_step(shape, layout, recipe, hardware)
    rate = layout.size * peak_of(recipe, hardware)
    useful = shape.flops_per_token() * recipe.batch_size * shape.seq / rate
    talk = sum(value for name, value in dict(step).items() if name in ("tp", "cp", "ep", "pp", "dp", "overlap"))
    tokens = recipe.batch_size // layout.dp * shape.seq
    stall = max(0.0, tokens * bytes_per_token / data_bytes_per_s - step.total)
    rest = step["compute"] + step["host"] + step["optimizer"] - useful
    rows = [
        ("useful", useful, "model flops / (n x peak): MFU is this over the sum", "arXiv:2204.02311, B"),
        ("communication", talk, "tp + pp + dp - what is hidden", "labkit.plan.step.time"),
        (
            "bubble",
            step["bubble"],
            f"p = {layout.pp}, m = {recipe.n_micro}, {recipe.schedule}",
            "arXiv:2104.04473, 2.2",
        ),
        (
            "underutilisation",
            rest,
            "compute + host + optimizer - useful: ops that are small, or move bytes",
            "labkit.plan.step.compute_time",
        ),
        ("data", stall, f"{tokens:,} tokens x {bytes_per_token:g} B / {data_bytes_per_s:.3g} B/s - step", "arithmetic"),
    ]
    return Breakdown(Item(name, value, "s", formula, source) for name, value, formula, source in rows)


@dataclass(frozen=True)
class Point:
    """One size of a scaling curve: `speed_up` and `efficiency` (0 to 1) are against the first point of the curve."""

    layout: Layout
    recipe: Recipe
    step: Breakdown
    tokens_per_s: float
    speed_up: float
    efficiency: float

    @property
    def n_ranks(self) -> int:
        """Devices."""
        return self.layout.size


def scaling(
    shape: Any,
    layout: Layout,
    recipe: Recipe,
    hardware: Hardware,
    n_ranks: Sequence[int] = MOST_RANKS,
    weak: bool = True,
) -> list[Point]:
    """The curve from the first to the last of `n_ranks`: dp grows, pp and tp stay as in `layout`.

    Weak: the batch grows with dp, so that a rank always has the rows that it has in `layout`. Strong: the batch stays,
    micro-batches keep their size as long as there are enough. Sizes smaller than pp x tp are left out, as are, when the
    batch stays, those that have no row for a rank. ValueError for sizes that pp x tp does not divide, or none left."""
    shape, group = ModelShape.of(shape), layout.pp * layout.tp * layout.cp
    rows, micro_size = recipe.batch_size // layout.dp, micro_rows(recipe, layout)
    points: list[Point] = []
    for n in (n for n in n_ranks if n >= group):
        if n % group:
            raise ValueError(f"{n} ranks are no multiple of pp x tp = {layout.pp} x {layout.tp} = {group}")
        grown = Layout(n // group, layout.pp, layout.tp, layout.cp)
        batch = rows * grown.dp if weak else recipe.batch_size
        if batch // grown.dp < 1 or batch % grown.dp:
            continue
        changed = replace(recipe, batch_size=batch, n_micro=max(1, batch // grown.dp // micro_size))
        step = predict_step(shape, grown, changed, hardware)
        speed = batch * shape.seq / step.total
        first = points[0] if points else None
        gain = speed / first.tokens_per_s if first else 1.0
        points.append(Point(grown, changed, step, speed, gain, gain * (first.n_ranks if first else n) / n))
    if not points:
        raise ValueError(f"none of {list(n_ranks)} ranks holds pp x tp = {group} and has a row for each")
    return points
