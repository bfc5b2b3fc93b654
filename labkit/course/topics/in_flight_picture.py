"""What each rank of a pipeline holds between forward and backward, over time: the law, a simulated step, a real one.

    1f1b, p = 4 ranks, m = 8 micro-batches: rank 0 holds 4, gpipe 8: 2 times less
    rank 0   - - - - - - - - - - - - -  law 4      min(p - r, m)      the steps are the simulation,
             __|~~|__|~~|__|~~|__       held 4     F: one more        the dotted line a measurement
    rank 3   - - - - - - - - - - - - -  law 1      B: one less
             |~|_|~|_|~|_|~|_|~|_|~|

The unit is the memory of one micro-batch in one stage. With v stages on a rank, stage and unit are v times smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from labkit.plan.job.recipe import Recipe
from labkit.plan.job.stages import pairs_in_flight
from labkit.plan.partition.layout import Layout
from labkit.plan.schedules.schedule import Schedule, Span, in_flight, simulate
from labkit.view import chart
from labkit.view.svg import PALETTE, WIDTH

LEFT, RIGHT, TOP = 62.0, 590.0, 70.0
LAW, HELD, SEEN = PALETTE[2], PALETTE[0], PALETTE[6]
Steps = Sequence[tuple[float, float]]
"""(time, number of micro-batches held) after each change."""


class Pick(NamedTuple):
    """A schedule by its name and counts: p ranks, m micro-batches, v stages on a rank where it is interleaved."""

    name: str
    p: int
    m: int
    v: int = 1

    @property
    def recipe(self) -> Recipe:
        """The planner's recipe of this schedule. ValueError for a name that the planner does not know."""
        v = self.v if self.name == "interleaved" else 1
        return Recipe(schedule=self.name, n_micro=self.m, batch_size=self.m, stages_per_rank=v)

    @property
    def schedule(self) -> Schedule:
        """The programs of all ranks."""
        return self.recipe.schedule_for(self.p)

    @property
    def most(self) -> list[int]:
        """By rank, the most pairs of stage and micro-batch that it holds, by the law.

        The law of interleaved schedules is for multiples of p only; for another m, as the schedule itself has it."""
        if self.name == "interleaved" and self.m % self.p:
            return in_flight(self.schedule)
        return [sum(pairs_in_flight(self.recipe, Layout(pp=self.p), rank)) for rank in range(self.p)]

    def waiting(self, ratio: float = 2.0) -> str:
        """The share of time that ranks wait, as a law in words, for equally fast ranks; "" where the law does not hold.

        `ratio` is the time of a backward in forwards. The law of interleaved needs an m that p divides, that of
        zero_bubble F = B = W, which is a ratio of 2."""
        p, m, v = self.p, self.m, self.v
        if self.name == "interleaved":
            return f"(p-1)/(vm+p-1) = {(p - 1) / (v * m + p - 1):.1%}" if m % p == 0 and v > 1 else ""
        if self.name == "zero_bubble":
            return f"(p-1)/(3m+p-1) = {(p - 1) / (3 * m + p - 1):.1%}" if m >= p and ratio == 2 else ""
        return f"(p-1)/(m+p-1) = {(p - 1) / (m + p - 1):.1%}"


LAWS = (
    ("gpipe", "m"),
    ("1f1b", "min(p-r, m)"),
    ("zero_bubble", "min(p, m)"),
    ("interleaved", "min(vm, (v-1)p + 2(p-1-r) + 1), in v-ths of a rank's"),
)
"""(schedule, the most micro-batches that rank r holds)."""


@chart.style()
def inflight(pick: Pick, measured: Sequence[Steps] = ()) -> chart.Chart:
    """Held micro-batches over time, a band for each rank, with the law; `measured` has the steps of each rank.

    Measured time is stretched to the simulated step. ValueError for measurements that are not one for each rank."""
    schedule = pick.schedule
    if measured and len(measured) != pick.p:
        raise ValueError(f"a measurement has the steps of each of {pick.p} ranks, got {len(measured)}")
    spans, law, most = simulate(schedule), pick.most, in_flight(schedule)
    whole = max(span.end for span in spans)
    peaks = [max((n for _, n in steps), default=0.0) for steps in measured]
    top = max([*law, *peaks])
    cut = pick.name == "interleaved"
    title = f"{pick.name}, p = {pick.p}, m = {pick.m}" + f", v = {pick.v}" * cut + f": a rank holds {max(law)} at most"
    others = pick.m * (pick.v if cut else 1)
    comparison = f", gpipe {others}: {others / max(law):.3g} times as many" if pick.name != "gpipe" else ""
    words = [f"law {law[rank]}, held {most[rank]}" for rank in range(pick.p)]
    if measured:
        words = [f"{line}, measured {peak:.3g}" for line, peak in zip(words, peaks, strict=True)]
    label = title + comparison + "".join(f"; rank {rank}: {line}" for rank, line in enumerate(words))
    high = 72.0 if pick.p <= 4 else 44.0
    bottom = TOP + pick.p * high
    figure = chart.Chart(bottom + 24, title + comparison, label)
    axes = figure.panel(LEFT, TOP, RIGHT, bottom, xlim=(0, whole), ylim=(pick.p * high, 0))
    for rank in range(pick.p):
        base, tall = (rank + 1) * high - 8, (high - 16) / top
        key = not rank
        level = base - law[rank] * tall
        axes.plot([0, whole], [level] * 2, color=LAW, linestyle=(0, (7, 4)), linewidth=2,
                  label=f"law: {dict(LAWS)[pick.name]}" * key or None)  # fmt: skip
        times, counts = zip(*held([span for span in spans if span.rank == rank], schedule.splits), strict=True)
        heights = [base - count * tall for count in counts]
        axes.fill_between([*times, whole], [*heights, heights[-1]], base, step="post", color=HELD, alpha=0.75,
                          linewidth=0, label="simulated" if key else None)  # fmt: skip
        axes.plot([0, whole], [base] * 2, color="black", linestyle="-", linewidth=0.5)
        if measured:
            times, counts = zip(*_stretched(measured[rank], whole), strict=True)
            axes.step(times, [base - count * tall for count in counts], color=SEEN, linestyle="-", linewidth=1.5,
                      where="post", label="measured" if key else None)  # fmt: skip
        figure.words(4, TOP + base - 4, f"rank {rank}", weight="bold")
        figure.words(WIDTH - 4, TOP + base - 4, words[rank], "right", fontsize=12)
    axes.set_axis_off()
    figure.keys(4, 40, axes)
    figure.words((LEFT + RIGHT) / 2, bottom + 14, "time of one step, from the first forward on", "center", fontsize=12)
    return figure


def held(spans: Sequence[Span], splits: bool) -> list[tuple[float, float]]:
    """(time, micro-batches that one rank holds) after each change. One is held from the end of its F to the end of its
    B, or of its W if the schedule splits backward."""
    last, now, out = "W" if splits else "B", 0, [(0.0, 0.0)]
    for span in sorted(spans, key=lambda span: span.end):
        change = (span.action.kind == "F") - (span.action.kind == last)
        if change:
            now += change
            out.append((span.end, float(now)))
    return out


def _stretched(steps: Steps, whole: float) -> Steps:
    """Measured steps, scaled to the simulated time; of several within a pixel, the highest and the last."""
    first, scale = steps[0][0], whole / ((steps[-1][0] - steps[0][0]) or 1)
    pixels: dict[int, list[float]] = {}
    for when, count in steps:
        pixels.setdefault(round((when - first) * scale / whole * (RIGHT - LEFT)), []).append(count)
    ends = ((pixel, count) for pixel, counts in pixels.items() for count in dict.fromkeys((max(counts), counts[-1])))
    return [(pixel * whole / (RIGHT - LEFT), count) for pixel, count in ends]
