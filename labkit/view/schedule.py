"""A pipeline schedule as a picture: a row for each rank, a box for each action, and gaps where the rank waits."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.plan.schedules.schedule import Schedule, Span, bubble, simulate
from labkit.view import chart
from labkit.view.svg import PALETTE, WIDTH, width_of
from labkit.view.units import seconds_text

LEFT, RIGHT, TOP, LANE = 62, 74, 58, 30
KINDS = (("F", "forward", PALETTE[0], 0), ("B", "backward", PALETTE[1], 4), ("W", "weights", PALETTE[2], 4))
"""Letter, word, colour, and how much lower the box stands, by which boxes too narrow for a letter can be told apart."""
MOST = 2000
"""The most boxes of a picture. A line below it says how many later actions are left out."""


@chart.style()
def rows(what: Schedule | Sequence[Span], title: str = "") -> chart.Chart:
    """A schedule as it runs if a forward takes 1 and a backward 2, or spans, simulated or measured, in seconds.

    Measured spans are the `spans` of every rank's Pipeline in one list, each moved by its `begin` (and its clock's
    offset, see Clock) if ranks did not begin together. A box names action and micro-batch, `F3`. If a rank has several
    stages, it names the stage, too, `5F3`, and boxes of later stages are paler. On the right stands the largest number
    of activations that the rank holds. ValueError if there is nothing to draw."""
    spans = sorted(simulate(what) if isinstance(what, Schedule) else what, key=lambda span: span.start)
    if not spans:
        raise ValueError("a picture of a schedule needs spans, and there are none")
    ranks = sorted({span.rank for span in spans})
    stages = {rank: sorted({span.action.stage for span in spans if span.rank == rank}) for rank in ranks}
    shown = spans[:MOST]
    first, last = spans[0].start, max(span.end for span in shown)
    length = max(span.end for span in spans) - first
    took = f"{length:g} forwards" if isinstance(what, Schedule) else seconds_text(length)
    name = f"{what.name}, " if isinstance(what, Schedule) else ""
    micros = len({span.action.micro for span in spans})
    label = title or f"{name}{_count(len(ranks), 'rank')}, {_count(micros, 'micro-batch', 'es')}"
    label = f"{label}: {took}, of which ranks wait {100 * bubble(spans):.3g} %" if length > 0 else label
    bottom = TOP + len(ranks) * LANE + 4
    figure = chart.Chart(bottom + (48 if len(spans) > MOST else 26), label)
    keys = [(f"{kind} {word}", colour) for kind, word, colour, _ in KINDS if any(s.action.kind == kind for s in spans)]
    figure.swatches(4, 31, keys)
    figure.words(WIDTH - 4, 42, "held", "right")
    axes = figure.panel(LEFT, TOP, WIDTH - RIGHT, bottom, xlim=(0, (last - first) or 1), ylim=(bottom - TOP, 0))
    for k, rank in enumerate(ranks):
        held = _held([span for span in spans if span.rank == rank])
        figure.words(4, TOP + k * LANE + 18, f"rank {rank}", weight="bold")
        figure.words(WIDTH - 4, TOP + k * LANE + 18, str(held), "right")
    axes.hlines([k * LANE + LANE - 2 for k in range(len(ranks))], 0, last - first, "black", linewidth=0.3, zorder=0.9)
    for span in shown:
        _box(axes, span, stages[span.rank], ranks.index(span.rank) * LANE, first, isinstance(what, Schedule))
    axes.set_yticks([])
    chart.lanes(axes)
    quarters = [(last - first) * k / 4 for k in range(5)]
    say = "{:.3g}".format if isinstance(what, Schedule) else seconds_text
    axes.set_xticks(quarters, ["0", *map(say, quarters[1:])])
    if len(spans) > MOST:
        words = f"the first {MOST:,} actions are drawn; {len(spans) - MOST:,} later ones are not"
        figure.words(LEFT, bottom + 40, words, fontsize=12)
    return figure


def _box(axes: chart.Axes, span: Span, stages: Sequence[int], y: float, first: float, simulated: bool) -> None:
    kind, stage, micro = span.action
    _, word, colour, lower = next(row for row in KINDS if row[0] == kind)
    words = [f"{kind}{micro}", f"{micro}"]
    if len(stages) > 1:
        colour = _paler(colour, stages.index(stage) / len(stages))
        words.insert(0, str(span.action))
    time = f"{span.start:g} to {span.end:g}" if simulated else f"{seconds_text(span.end - span.start)}"
    hover = f"rank {span.rank}, stage {stage}: {word} of micro-batch {micro}, {time}"
    length, seconds = axes.get_xlim()[1], span.end - span.start
    wide = seconds / length * (WIDTH - LEFT - RIGHT)
    fits = ((text, size) for text in words for size in (13, 12, 11, 10) if width_of(text, size) + 4 <= wide)
    label, size = next(fits, ("", 13))
    high = LANE - 8
    chart.box(axes, span.start - first, y + lower, max(seconds, length * 6e-4), high, colour, label, hover, size)


def _count(n: int, noun: str, plural: str = "s") -> str:
    return f"{n} {noun}{plural if n != 1 else ''}"


def _paler(colour: str, share: float) -> str:
    parts = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * 0.75 * share):02X}" for part in parts)


def _held(spans: Sequence[Span]) -> int:
    """The most activations that a rank with these spans holds at once, counted as (stage, micro-batch) pairs."""
    last, held, most = "W" if any(span.action.kind == "W" for span in spans) else "B", 0, 0
    for span in spans:
        held += (span.action.kind == "F") - (span.action.kind == last)
        most = max(most, held)
    return most
