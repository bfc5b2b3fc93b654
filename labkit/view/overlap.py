"""Compute, communication and waiting of every rank on one time axis: what is hidden, and what each rank waits for.

    rank 0   compute 71 ms (71%) · exposed 6 ms (6%) · bubble 23 ms (23%) · wire 36 ms of 42 ms hidden (86%)
    spans    |        forward        |           backward         |
    compute  |######## 29 ms ########|########### 42 ms ##########|
    wire                                |---------- 42 ms ------------|
    waiting                                                       |===|.............|

Compute, wire and waiting have lanes of their own, so that nobody has to tell them by colour alone. In the lane of
waiting, bars of waiting for the wire are half as high as bars of waiting for another rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.probe.intervals import Interval, seconds
from labkit.probe.recording import Recording, overlap_share
from labkit.probe.rows import ProgramSpan
from labkit.view import chart
from labkit.view.svg import PALETTE, WIDTH, width_of
from labkit.view.units import seconds_text

LEFT, RIGHT, TOP, LANE = 66.0, WIDTH - 12.0, 76.0, 18.0
COMPUTE, WIRE, EXPOSED, BUBBLE = PALETTE[0], PALETTE[2], PALETTE[1], PALETTE[7]
KEYS = (("compute", COMPUTE), ("on the wire", WIRE), ("exposed: waits for the wire", EXPOSED),
        ("bubble: waits for a rank", BUBBLE))  # fmt: skip
MOST_RANKS, MOST_BARS = 32, 400
"""The most ranks of a picture, and bars of a lane. The picture says how many ranks are left out; of more bars,
neighbours are joined."""


@chart.style()
def overlap(recording: Recording, title: str = "") -> chart.Chart:
    """A row for each rank, of three lanes: its compute, its messages on the wire, and its waiting.

    The shares stand above the lanes, and seconds on wide bars; the pointer over a bar shows its begin and length. Spans
    that the program named have a lane, too. Bars less than half a unit apart are drawn as one. Time 0 is the begin of
    the first rank. ValueError for a recording of no time."""
    shares = recording.shares()
    first, length = min(row.begin for row in recording.rows), recording.seconds
    scale = (RIGHT - LEFT) / length
    n, hidden = len(recording.rows), overlap_share(recording)
    facts = f"compute {shares.compute:.0%}, exposed {shares.exposed:.0%}, bubble {shares.bubble:.0%}"
    saying = f"{hidden:.0%} of the communication hidden" if recording.wire_s() > 0 else "no communication"
    head = f"{title or f'{n} rank' + 's' * (n != 1)}, {seconds_text(length)}"
    facts = f"{facts}; {saying}" + " (as the host saw it)" * any(row.queued for row in recording.rows)
    rows = recording.rows[:MOST_RANKS]
    named = [_leaves([span._replace(t0=max(span.t0, row.begin), t1=min(span.t1, row.end)) for span in row.spans])
             for row in rows]  # fmt: skip
    bottom = TOP + sum(4 * LANE + 8 + LANE * bool(spans) for spans in named)
    figure = chart.Chart(bottom + (48 if n > MOST_RANKS else 26), head, f"{head}: {facts}")
    figure.words(4, 40, facts)
    figure.swatches(4, 49, KEYS)
    axes = figure.panel(LEFT, TOP, RIGHT, bottom, xlim=(0, length), ylim=(bottom, TOP))
    y, lanes = TOP, dict[float, str]()
    for row, spans in zip(rows, named, strict=True):
        figure.words(4, y + 12, f"rank {row.rank}", weight="bold")
        figure.words(LEFT, y + 12, _numbers(recording, row.rank), fontsize=12)
        parts = recording.parts[row.rank]
        for name, kinds in (
            ("compute", (("computes", COMPUTE, 1.0, parts.compute),)),
            ("wire", (("on the wire", WIRE, 1.0, parts.wire),)),
            ("waiting", (("waits for a rank", BUBBLE, 1.0, parts.bubble), ("waits", EXPOSED, 0.5, parts.exposed))),
        ):
            y += LANE
            lanes[y + LANE - 2] = name
            for state, colour, tall, intervals in kinds:
                for t0, t1, took in _joined(intervals, 0.5 / scale):
                    begin = seconds_text(t0 - first) if t0 > first else "0"
                    hover = f"rank {row.rank} {state}: {seconds_text(took)} from {begin}"
                    words, high = seconds_text(took) if tall == 1 else "", (LANE - 3) * tall
                    chart.box(
                        axes, t0 - first, y + LANE - 3 - high, max(t1 - t0, 0.5 / scale), high, colour, words, hover
                    )
        y += LANE
        if spans:
            lanes[y + LANE - 2] = "spans"
            for span in spans[:MOST_BARS]:
                wide, letter = (span.t1 - span.t0) * scale, span.phase[:1].upper()
                name = f"{span.phase} {span.name}".strip()
                fits = (
                    word for word in (name, f"{letter} {span.name}".strip(), letter) if width_of(word, 12) + 4 <= wide
                )
                hover = f"rank {row.rank} {name}: {seconds_text(span.t1 - span.t0)}"
                place = span.t0 - first, y, max(span.t1 - span.t0, 0.5 / scale), LANE - 3
                chart.box(axes, *place, "none", next(fits, ""), hover, edge=0.5)
            y += LANE
        y += 8
    axes.hlines(list(lanes), 0, length, "black", linewidth=0.3, zorder=0.9)
    axes.set_yticks([at - 4 for at in lanes], lanes.values(), va="baseline")
    chart.lanes(axes)
    if n > MOST_RANKS:
        left = f"the first {MOST_RANKS} ranks are drawn; {n - MOST_RANKS:,} are not, and are in the numbers above"
        figure.words(LEFT, bottom + 40, left, fontsize=12)
    return figure


def _numbers(recording: Recording, rank: int) -> str:
    """The line above a rank's lanes: seconds and share of each part, and how much of the communication is hidden."""
    own_parts, shares = recording.parts[rank], recording.shares(rank)
    names, spans_of_all = ("compute", "exposed", "bubble"), (own_parts.compute, own_parts.exposed, own_parts.bubble)
    parts = zip(names, spans_of_all, shares, strict=True)
    words = [f"{name} {seconds_text(seconds(spans)) if spans else '0'} ({share:.0%})" for name, spans, share in parts]
    wire, hidden = recording.wire_s(rank), recording.hidden_s(rank)
    if wire <= 0:
        return " · ".join([*words, "no communication"])
    of = f"{seconds_text(hidden) if hidden else '0'} of {seconds_text(wire)}"
    return " · ".join([*words, f"wire {of} hidden ({hidden / wire:.0%})"])


def _leaves(spans: Sequence[ProgramSpan]) -> list[ProgramSpan]:
    """The spans that contain no other span, without those of a device."""
    leaves = sorted((span for span in spans if span.phase != "gpu" and span.t1 > span.t0), key=lambda s: (s.t0, -s.t1))
    return [span for k, span in enumerate(leaves) if k + 1 == len(leaves) or leaves[k + 1].t0 >= span.t1]


def _joined(spans: Sequence[Interval], least: float) -> list[tuple[float, float, float]]:
    """(begin, end, seconds covered) of the spans, joined where a gap is shorter than `least` seconds, which is
    doubled until there are at most MOST_BARS."""
    while True:
        out: list[tuple[float, float, float]] = []
        for t0, t1 in spans:
            if out and t0 - out[-1][1] < least:
                out[-1] = (out[-1][0], t1, out[-1][2] + t1 - t0)
            else:
                out.append((t0, t1, t1 - t0))
        if len(out) <= MOST_BARS:
            return out
        least *= 2
