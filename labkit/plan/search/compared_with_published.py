"""Published runs beside what the planner says of them: seconds and bytes, their ratios, and the errors in tables.

    ratio       predicted / measured seconds of a step: 1 is right, 0.5 is a planner that dreams of twice the speed
    band        runs by the MFU that was measured: at least 35%, 20 to 35%, below 20%
    held out    runs to which nothing was fitted; only they say what a prediction is worth

    bytes       what a GPU held, where that is published and labkit knows what the framework holds besides the law's
                parts (plan.search.nanotron). "within 10%" counts the setting that is likely, "either" the better of two

As a search does, long schedules are predicted by their law (plan.step.time). Runs that did not run have no seconds,
and runs with something that the planner does not have (`lacks`) have no prediction: both are only counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from labkit.plan.search.nanotron import likely, settings
from labkit.plan.search.published import PublishedRun, published_runs
from labkit.plan.step.time import predict_step
from labkit.plan.text_columns import in_columns

BANDS = ((0.35, "at least 35%"), (0.20, "20 to 35%"), (0.0, "below 20%"))
"""The least measured MFU of each band, and its name."""


class Compared(NamedTuple):
    """One run: the seconds of a step that were predicted, and those that were measured."""

    run: PublishedRun
    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds."""
        return self.predicted_s / self.measured_s

    @property
    def mfu(self) -> float:
        """The MFU that was reached, 0 to 1: as published, or from the seconds."""
        run = self.run
        speed = run.recipe.batch_size * run.shape.seq / self.measured_s
        return run.mfu or run.shape.mfu(speed, run.layout.size * run.hardware.peak("bf16"))

    @property
    def band(self) -> str:
        """The name of its band of MFU."""
        return next(name for least, name in BANDS if self.mfu >= least)


class Errors(NamedTuple):
    """Ratios of some runs: how many, the median, the 10th and the 90th of a hundred."""

    n_runs: int
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Errors:
        """The errors of these ratios; NaN where there is none."""
        return cls(len(ratios), *(quantile(ratios, share) for share in (0.5, 0.1, 0.9)))


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies, with a straight line between two of them; NaN for none."""
    if not values:
        return math.nan
    ranked = sorted(values)
    place = share * (len(ranked) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (place - below) * (ranked[above] - ranked[below])


class MemoryOfRun(NamedTuple):
    """One run of nanotron: bytes of its fullest GPU in the likely setting, in each of the two, and as published."""

    run: PublishedRun
    likely: int
    either: tuple[int, ...]

    @property
    def fits(self) -> bool:
        """True if the device has that many bytes."""
        return self.likely <= self.run.hardware.memory_bytes.value

    @property
    def ratio(self) -> float:
        """Predicted over published bytes; NaN for a run that did not run."""
        return self.likely / self.run.n_bytes if self.run.n_bytes else math.nan

    @property
    def best_ratio(self) -> float:
        """The same in that of the two settings which comes nearer."""
        ratios = [n_bytes / self.run.n_bytes for n_bytes in self.either] if self.run.n_bytes else [math.nan]
        return min(ratios, key=lambda ratio: abs(math.log(ratio)))


@cache
def held() -> tuple[MemoryOfRun, ...]:
    """All of the playbook's runs, also those that did not run, on layouts that labkit can run."""
    rows = []
    for run in published_runs():
        if run.source == "playbook" and run.layout.pp <= run.shape.n_layer:
            both = settings(run.shape, run.layout, run.recipe)
            rows.append(MemoryOfRun(run, both[likely(run.layout)], tuple(both.values())))
    return tuple(rows)


STAGES = ((1, "no pipeline"), (2, "2 stages"), (4, "4 stages"), (8, "8 stages and more"))
"""The least number of stages of each row of the table of bytes, and its name."""


def memory_table(runs: Sequence[MemoryOfRun]) -> str:
    """The errors of predicted bytes in columns, and below them how often it is rightly said whether a run fits."""
    head = ("stages", "runs", "10th", "median", "90th", "within 10%", "either")
    rows: list[tuple[str, ...]] = [head]
    ran = [run for run in runs if run.run.n_bytes]
    for least, name in (*STAGES, (0, "all")):
        group = [run for run in ran if not least or _stages(run) == name]
        if group:
            spread = [f"{quantile([run.ratio for run in group], share):.2f}" for share in (0.1, 0.5, 0.9)]
            near = [within(run.ratio for run in group), within(run.best_ratio for run in group)]
            rows.append((name, f"{len(group):,}", *spread, *(f"{share:.0%}" for share in near)))
    text = ["predicted / published bytes of the playbook's fullest GPU, by stages of the pipeline", *in_columns(rows)]
    for did, words in ((True, "that ran fit, as predicted"), (False, "that crashed do not fit, as predicted")):
        group = [run for run in runs if run.run.ran == did]
        if group:
            text.append(f"{sum(run.fits == did for run in group) / len(group):.0%} of {len(group):,} runs {words}")
    return "\n".join(text)


def within(ratios: Iterable[float], share: float = 0.1) -> float:
    """The part of these ratios that lies within this share of 1."""
    near = [abs(ratio - 1) <= share for ratio in ratios]
    return sum(near) / len(near)


def _stages(run: MemoryOfRun) -> str:
    return next(name for least, name in reversed(STAGES) if run.run.layout.pp >= least)


@cache
def compared() -> tuple[Compared, ...]:
    """All published runs that have seconds and a prediction."""
    return tuple(
        Compared(run, predict_step(run.shape, run.layout, run.recipe, run.hardware, simulated=0).total, run.step_s)
        for run in published_runs()
        if run.ran and run.step_s is not None and not run.lacks
    )


def errors(runs: Sequence[Compared]) -> dict[tuple[str, str], tuple[Errors, Errors]]:
    """(source, band) -> the errors of runs that were fitted to, and of those that were held out. "all" is each source's
    last band, and is told even if there is only one other."""
    rows = {}
    for source in dict.fromkeys(comparison.run.source for comparison in runs):
        group = [comparison for comparison in runs if comparison.run.source == source]
        for band in (*(name for _, name in BANDS), "all"):
            parts = [
                [c.ratio for c in group if c.run.fitted == fitted and band in (c.band, "all")]
                for fitted in (True, False)
            ]
            if any(parts):
                rows[source, band] = Errors.of(parts[0]), Errors.of(parts[1])
    return rows


def error_table(runs: Sequence[Compared]) -> str:
    """The errors in columns, and below them a line on the runs that are not among them."""
    head = ("source", "MFU", "fitted", "10th", "median", "90th", "held out", "10th", "median", "90th")
    lines: list[tuple[str, ...]] = [head]
    for (source, band), parts in errors(runs).items():
        cells = [source, band]
        for part in parts:
            numbers = ("-",) * 3 if not part.n_runs else (f"{n:.2f}" for n in (part.low, part.median, part.high))
            cells += [str(part.n_runs), *numbers]
        lines.append(tuple(cells))
    text = ["predicted / measured seconds of a step, by the MFU that was measured", *in_columns(lines)]
    return "\n".join(text + left_out())


def experts_table(runs: Sequence[Compared]) -> str:
    """Runs with experts one by one, for there are few: seconds of a step as predicted and as published, and their
    ratio; below them, by its number, what is predicted in the place of something that labkit does not have. "" if there
    are none."""
    head = ("model", "devices", "dp", "pp", "tp", "ep", "MFU", "published", "predicted", "ratio", "differs")
    rows, notes = list[tuple[str, ...]]([head]), dict[str, int]()
    for comparison in runs:
        run, lay = comparison.run, comparison.run.layout
        if run.shape.n_expert:
            where = f"{lay.size:,} {run.hardware.name}"
            sizes, seconds = (lay.dp, lay.pp, lay.tp, lay.ep), (comparison.measured_s, comparison.predicted_s)
            note = f"({notes.setdefault(run.differs, len(notes) + 1)})" if run.differs else ""
            cells = [run.shape.name, where, *map(str, sizes), f"{comparison.mfu:.0%}"]
            rows.append((*cells, *(f"{value:.3g} s" for value in seconds), f"{comparison.ratio:.2f}", note))
    title = "predicted and published seconds of a step of models with experts; nothing is fitted to them"
    remarks = [f"({number}) {words}" for words, number in notes.items()]
    return "\n".join([title, *in_columns(rows), *remarks]) if len(rows) > 1 else ""


def left_out() -> list[str]:
    """In words, the published runs that have no seconds or no prediction."""
    runs = published_runs()
    failed = Counter(run.source for run in runs if not run.ran)
    lines = [f"not among them: {n:,} runs of {source} that crashed or did not fit" for source, n in failed.items()]
    for source in dict.fromkeys(run.source for run in runs if run.lacks):
        lacking = Counter(run.lacks for run in runs if run.source == source and run.lacks)
        reasons = ", ".join(f"{n} with {lacks}" for lacks, n in lacking.items())
        lines.append(f"not among them: {sum(lacking.values())} runs of {source}, which the planner lacks: {reasons}")
    return lines
