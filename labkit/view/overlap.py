"""Compute, communication and waiting of every rank on one time axis: what is hidden, and what everybody waits for.

    rank 0   compute 71 ms (71%) · exposed 6 ms (6%) · bubble 23 ms (23%) · wire 36 ms of 42 ms hidden (86%)
    spans    |        forward        |           backward         |
    compute  |######## 29 ms ########|########### 42 ms ##########|
    wire                                |---------- 42 ms ------------|
    waiting                                                       |===|.............|

The lanes tell compute, wire and waiting apart by place, not by colour; in the lane of waiting, what waits for the wire
is half as high as what waits for another rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.probe.intervals import Interval, seconds
from labkit.probe.recording import Recording, overlap_share
from labkit.probe.rows import Span
from labkit.view.svg import PALETTE, WIDTH, Picture, box, headline, line, round_marks, text
from labkit.view.units import seconds_text

LEFT, RIGHT, TOP, LANE = 66.0, WIDTH - 12.0, 76.0, 18.0
COMPUTE, WIRE, EXPOSED, BUBBLE = PALETTE[0], PALETTE[2], PALETTE[1], PALETTE[7]
KEYS = (("compute", COMPUTE), ("on the wire", WIRE), ("exposed: waits for the wire", EXPOSED),
        ("bubble: waits for a rank", BUBBLE))  # fmt: skip
MOST_RANKS, MOST_BARS = 32, 400
"""Ranks of a picture, and bars of a lane; beyond them the picture says what is left out, and bars run together."""


def overlap(recording: Recording, title: str = "") -> Picture:
    """A row for each rank, of three lanes: its compute, what was on its way from or to it, and what it waited for.

    Above the lanes stand the shares, on wide bars their seconds; resting the pointer on a bar tells begin and length.
    Spans that the program named have a lane, too. Bars closer than the eye can tell are drawn as one; 0 is the first
    rank's begin. ValueError for a recording of no time."""
    shares = recording.shares()
    first, whole = min(row.begin for row in recording.rows), recording.seconds
    scale = (RIGHT - LEFT) / whole
    n, hidden = len(recording.rows), overlap_share(recording)
    told = f"compute {shares.compute:.0%}, exposed {shares.exposed:.0%}, bubble {shares.bubble:.0%}"
    saying = f"{hidden:.0%} of the communication hidden" if recording.wire_s() > 0 else "no communication"
    head = f"{title or f'{n} rank' + 's' * (n != 1)}, {seconds_text(whole)}"
    told = f"{told}; {saying}" + " (as the host saw it)" * any(row.queued for row in recording.rows)
    body, x = [headline(head), text(4, 40, told)], 4.0
    for word, colour in KEYS:
        body += [box(x, 49, 12, 12, colour), text(x + 17, 60, word)]
        x += 34 + 6.9 * len(word)
    y = TOP
    for row in recording.rows[:MOST_RANKS]:
        mine = recording.parts[row.rank]
        body += [
            text(4, y + 12, f"rank {row.rank}", bold=True),
            text(LEFT, y + 12, _numbers(recording, row.rank), size=12),
        ]
        lanes: tuple[tuple[str, Sequence[tuple[str, str, float, Sequence[Interval]]]], ...] = (
            ("compute", (("computes", COMPUTE, 1.0, mine.compute),)),
            ("wire", (("on the wire", WIRE, 1.0, mine.wire),)),
            ("waiting", (("waits for a rank", BUBBLE, 1.0, mine.bubble), ("waits", EXPOSED, 0.5, mine.exposed))),
        )
        y += LANE
        for name, kinds in lanes:
            body.append(text(LEFT - 6, y + 12, name, "end", 12))
            body.append(line(LEFT, y + LANE - 2, RIGHT, y + LANE - 2, width=0.3))
            for what, colour, tall, spans in kinds:
                high = (LANE - 3) * tall
                for t0, t1, took in _joined(spans, 0.5 / scale):
                    wide = max((t1 - t0) * scale, 0.5)
                    said = seconds_text(took)
                    hover = f"rank {row.rank} {what}: {said} from {seconds_text(t0 - first) if t0 > first else '0'}"
                    word = said if tall == 1 and wide > 8 * len(said) else ""
                    place = LEFT + (t0 - first) * scale
                    body.append(box(place, y + LANE - 3 - high, wide, high, colour, word, hover, 1 if wide > 4 else 0))
            y += LANE
        inside = (s._replace(t0=max(s.t0, row.begin), t1=min(s.t1, row.end)) for s in row.spans)
        if named := _leaves([*inside]):
            body.append(text(LEFT - 6, y + 12, "spans", "end", 12))
            for span in named[:MOST_BARS]:
                place, wide = LEFT + (span.t0 - first) * scale, (span.t1 - span.t0) * scale
                name = f"{span.phase} {span.name}".strip()
                hover = f"rank {row.rank} {name}: {seconds_text(span.t1 - span.t0)}"
                letter = span.phase[:1].upper()
                words = (name, f"{letter} {span.name}".strip(), letter)
                word = next((each for each in words if wide > 7 * len(each) + 4), "")
                body.append(box(place, y, max(wide, 0.5), LANE - 3, words=word, title=hover, width=0.5))
            y += LANE
        y += 8
    body.append(line(LEFT, y, RIGHT, y))
    for mark in round_marks(whole):
        x, said = LEFT + mark * scale, seconds_text(mark) if mark else "0"
        anchor = "end" if x + 30 > WIDTH else "middle"
        body += [line(x, y, x, y + 5), text(x, y + 19, said, anchor, 12)]
    if n > MOST_RANKS:
        left = f"the first {MOST_RANKS} ranks are drawn; {n - MOST_RANKS:,} are not, and are in the numbers above"
        body.append(text(LEFT, y + 40, left, size=12))
    return Picture("".join(body), y + (48 if n > MOST_RANKS else 26), f"{head}: {told}")


def _numbers(recording: Recording, rank: int) -> str:
    """What stands above a rank's lanes: seconds and share of each part, and how much of the wire is hidden."""
    mine, shares = recording.parts[rank], recording.shares(rank)
    parts = zip(("compute", "exposed", "bubble"), (mine.compute, mine.exposed, mine.bubble), shares, strict=True)
    words = [f"{name} {seconds_text(seconds(spans)) if spans else '0'} ({share:.0%})" for name, spans, share in parts]
    wire, hidden = recording.wire_s(rank), recording.hidden_s(rank)
    if wire <= 0:
        return " · ".join([*words, "no communication"])
    of = f"{seconds_text(hidden) if hidden else '0'} of {seconds_text(wire)}"
    return " · ".join([*words, f"wire {of} hidden ({hidden / wire:.0%})"])


def _leaves(spans: Sequence[Span]) -> list[Span]:
    """The spans that hold no other; those of a device are left out."""
    mine = sorted((span for span in spans if span.phase != "gpu" and span.t1 > span.t0), key=lambda s: (s.t0, -s.t1))
    return [span for k, span in enumerate(mine) if k + 1 == len(mine) or mine[k + 1].t0 >= span.t1]


def _joined(spans: Sequence[Interval], least: float) -> list[tuple[float, float, float]]:
    """(begin, end, seconds covered), with gaps of less than `least` drawn over; coarser where there are too many."""
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
