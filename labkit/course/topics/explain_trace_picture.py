"""Explain this trace: what a profiler shows of a run, and the diagnosis from a recording.

what a profiler shows     rank 0   computing  |####|    |####|        no causes: it does not show for what a rank
                                   communicates    |====|             in a collective waits
what settles it           shares of compute, exposed (the wire) and bubble (another rank), rank by rank

fine        little waiting: communication is hidden behind compute
exposed     ranks wait for the wire: all ranks have come to the collective, and bytes are on their way
late        ranks wait for one rank, which computes longer than the others
turns       ranks wait for each other, and all compute equally long: a pipeline fills and drains
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from types import MappingProxyType

from labkit.probe.intervals import seconds, union
from labkit.probe.recording import Recording, overlap_share
from labkit.view import chart
from labkit.view.svg import PALETTE, WIDTH
from labkit.view.units import plural, seconds_text

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "fine": "healthy: communication hides behind compute",
        "exposed": "the wire: communication is exposed",
        "late": "a straggler: one rank is late, the others wait for it",
        "turns": "a bubble: ranks wait for their turn in a pipeline",
    }
)
COMPUTE, VERB = PALETTE[0], PALETTE[1]
LEFT, RIGHT, TOP, LANE = 132.0, WIDTH - 14.0, 40.0, 20.0
LITTLE, LONGER = 0.22, 1.3
"""The share of the time up to which waiting is little, and the ratio to the median from which a rank is a straggler."""


def diagnosed(recording: Recording) -> str:
    """The diagnosis, a key of KINDS. ValueError for a recording that is not merged from all ranks, or of no time."""
    shares = recording.shares()
    if not recording.merged:
        raise ValueError("a trace of one rank cannot tell who was late: merge those of all with Recording.of(...)")
    if shares.exposed + shares.bubble < LITTLE:
        return "fine"
    if shares.exposed > shares.bubble:
        return "exposed"
    computing = [seconds(recording.parts[rank].compute) for rank in recording.ranks]
    return "late" if max(computing) > LONGER * median(sorted(computing)[:-1]) else "turns"


def explained(recording: Recording) -> str:
    """The measurements that support the diagnosis, in a sentence or two."""
    kind, shares = diagnosed(recording), recording.shares()
    facts = f"compute {shares.compute:.0%}, waiting for the wire {shares.exposed:.0%}, for a rank {shares.bubble:.0%}"
    computing = {rank: seconds(recording.parts[rank].compute) for rank in recording.ranks}
    if kind == "fine":
        return f"{facts}. {overlap_share(recording):.0%} of the time on the wire, a rank computes meanwhile."
    if kind == "exposed":
        return f"{facts}. When the waiting begins every rank has come: only bytes are missing."
    if kind == "late":
        late = max(computing, key=lambda rank: computing[rank])
        rest = median(value for rank, value in computing.items() if rank != late)
        return (
            f"{facts}. Rank {late} computes for {seconds_text(computing[late])}, the others for {seconds_text(rest)}; "
            f"it waits {recording.shares(late).bubble:.0%} of the time for somebody, they more."
        )
    ends = f"{seconds_text(min(computing.values()))} to {seconds_text(max(computing.values()))}"
    return f"{facts}. All compute about equally long ({ends}), at different times: nobody is late, they take turns."


@chart.style()
def unlabelled(recording: Recording, title: str = "what does this trace show?") -> chart.Chart:
    """Each rank's time as a profiler shows it, computing or communicating, without the cause of any waiting.

    ValueError for a recording of no time."""
    total = recording.seconds
    if total <= 0:
        raise ValueError(f"a recording of {total} seconds shows nothing")
    first, n = min(row.begin for row in recording.rows), len(recording.rows)
    bottom = TOP + (2 * LANE + 6) * n
    label = f"{title} {plural(n, 'rank')}, {seconds_text(total)}, computing or communicating"
    figure = chart.Chart(bottom + 26, title, label)
    axes = figure.panel(LEFT, TOP, RIGHT, bottom, xlim=(0, total), ylim=(bottom, TOP))
    y, names = TOP, dict[float, str]()
    for row in recording.rows:
        parts = recording.parts[row.rank]
        verbs = union(
            (transfer.t0, transfer.t1)
            for transfer in row.transfers
            if not transfer.within and transfer.t1 > transfer.t0
        )
        waits = union((*parts.exposed, *parts.bubble))
        figure.words(4, y + 14, f"rank {row.rank}", weight="bold")
        lanes = ("computes", COMPUTE, parts.compute), ("communicates", VERB, union((*verbs, *waits)))
        for name, colour, spans in lanes:
            names[y + LANE - 1] = name
            for t0, t1 in ((max(t0, row.begin), min(t1, row.end)) for t0, t1 in spans):
                if t1 > t0:
                    hover = f"rank {row.rank} {name}: {seconds_text(t1 - t0)}"
                    wide = max(t1 - t0, total * 0.5 / (RIGHT - LEFT))
                    chart.box(axes, t0 - first, y + 3, wide, LANE - 5, colour, "", hover, edge=0.5)
            y += LANE
        y += 6
    axes.hlines(list(names), 0, total, "black", linewidth=0.3, zorder=0.9)
    axes.set_yticks([at - 5 for at in names], names.values(), va="baseline")
    chart.lanes(axes)
    return figure
