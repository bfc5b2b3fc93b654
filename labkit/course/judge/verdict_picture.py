"""A run as the judge saw it: the messages between ranks in their order, or the bytes that each rank held.

rank 0  ──●────────▭──        ● ↘  a message and where it went, with its bytes     ▭ a collective
rank 1  ────↘●─────▭──        | a mark of the exercise                             the fault is drawn thick, in red
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from labkit.course.judge.run_record import Event, Memory, RunRecord
from labkit.course.judge.verdicts import Verdict
from labkit.plan.breakdown import KINDS
from labkit.view.panels import Panel, below, beside, page, phrase
from labkit.view.svg import PALETTE, WIDTH, Picture, arrow, box, cut, headline, line, text
from labkit.view.units import bytes_text

FAULT = PALETTE[6]
LEFT, TOP, ROW = 64.0, 52.0, 46.0
HELD, HIGH = 400.0, 64.0
"""The width and the height of a rank's bytes over time."""
MOST_STEPS = 40


def of_verdict(verdict: Verdict, record: RunRecord) -> str:
    """The picture for a broken verdict on a run, as HTML; "" where there is nothing to draw.

    The events that the verdict is about are marked, and words stand beside the lines of the ranks that it is about."""
    if verdict.name == "memory":
        return holdings(record.memory, verdict.seen).html()
    plates = _plates(verdict, record)
    if not record.events and not plates:
        return ""
    title = f"{verdict.name}: {verdict.seen}"
    return conversation(record.case.n_ranks, record.events, plates, verdict.at, title).html()


def _plates(verdict: Verdict, record: RunRecord) -> dict[int, str]:
    """Rank -> words beside its line: the call in which it waits, or what was expected of it."""
    plates = {rank: f"waits for {wait.words}" for rank, wait in record.waits.items()}
    if verdict.rank is not None and verdict.name in ("values", "wire", "order"):
        plates[verdict.rank] = f"expected {verdict.expected}" if verdict.name == "wire" else "here"
    return plates


def conversation(
    n_ranks: int, events: Sequence[Event], plates: Mapping[int, str], at: Sequence[int] = (), title: str = ""
) -> Picture:
    """A line for each rank, and a place for each event, in the order in which the events reached the judge."""
    chosen = _around(events, at)
    step = (WIDTH - LEFT - 150) / max(1, len(chosen))
    place = {event.number: LEFT + (i + 0.5) * step for i, event in enumerate(chosen)}
    row = [TOP + ROW * (rank + 0.5) for rank in range(n_ranks)]
    body = [headline(cut(title, 110))]
    if len(chosen) < len(events):
        body.append(text(4, 40, f"{len(chosen)} of {len(events)} events", size=12))
    for rank in range(n_ranks):
        body += [text(4, row[rank] + 4, f"rank {rank}"), line(LEFT, row[rank], WIDTH - 150, row[rank])]
        if rank in plates:
            body.append(_plate(WIDTH - 146, row[rank] - 12, cut(plates[rank], 60)))
    taken: set[int] = set()
    for event in chosen:
        x, fault = place[event.number], event.number in at
        y = row[event.rank]
        body += _one(event, x, y, step, fault)
        if event.kind == "message" and event.to is not None and event.to < n_ranks:
            end = next((later for later in chosen if later.number not in taken and _received(event, later)), None)
            if end is not None:
                taken.add(end.number)
            to = (
                place[end.number] if end else x + 0.4 * step,
                row[event.to] + (0 if end else 12 * (-1) ** (event.to > event.rank)),
            )
            hover = f"{event.n_bytes:,} bytes to rank {event.to}, line {event.line}"
            hover += "" if end else ", never received"
            body.append(_thick(arrow([(x, y), to], hover), fault or end is None))
    shown = (f"rank {event.rank} {event.what} {event.n_bytes} bytes" for event in chosen[:MOST_STEPS])
    label = f"{title}; " + "; ".join(shown)
    return Picture("".join(body), TOP + ROW * n_ranks + 8, label)


def holdings(memory: Sequence[Memory | None], title: str) -> Picture:
    """For each rank the bytes over time, and beside them those of its peak by kind."""
    timelines = [rank.timeline if rank else () for rank in memory]
    peaks = [rank.peak if rank else {} for rank in memory]
    most = max((point[1] for line_ in timelines for point in line_), default=0) or 1
    rows = []
    for rank, points in enumerate(timelines):
        kinds = [f"{kind} {bytes_text(peaks[rank][kind])}" for kind in KINDS if peaks[rank].get(kind)]
        rows.append(beside(
            phrase(f"rank {rank}", width=LEFT - 4),
            Panel(HELD, HIGH, partial(_held, points, most)),
            below(
                phrase(f"peak {bytes_text(sum(peaks[rank].values()))}", bold=True),
                *(phrase(", ".join(some), 12) for some in (kinds[:2], kinds[2:]) if some),
            ).padded(left=12),
        ))  # fmt: skip
    label = "; ".join(f"rank {rank} peak {sum(peak.values()):,} bytes" for rank, peak in enumerate(peaks))
    return page(cut(f"memory: {title}", 110), below(*rows, gap=18), label=f"{title}; {label}", gap=20)


def _held(points: Sequence[tuple[float, int]], most: float, left: float, top: float) -> str:
    """The bytes of one rank over time, with a thick line at their peak; `most` is as high as the panel."""
    bottom = top + HIGH
    base = line(left, bottom, left + HELD, bottom)
    if not points:
        return base
    start, span = points[0][0], (points[-1][0] - points[0][0]) or 1.0
    spots = [(left + HELD * (t - start) / span, bottom - HIGH * n / most) for t, n in points]
    steps = f"M{spots[0][0]:.1f} {bottom:.1f}" + "".join(f"L{x:.1f} {y:.1f}" for x, y in spots)
    area = f'<path d="{steps}L{spots[-1][0]:.1f} {bottom:.1f}z" fill="{PALETTE[0]}" stroke="currentColor"/>'
    x, y = min(spots, key=lambda spot: spot[1])
    return base + area + _thick(line(x, y, x, bottom), True)


def _around(events: Sequence[Event], at: Sequence[int]) -> list[Event]:
    if len(events) <= MOST_STEPS:
        return list(events)
    first = max(0, min(at, default=0) - MOST_STEPS // 4)
    return list(events[first : first + MOST_STEPS])


def _one(event: Event, x: float, y: float, step: float, fault: bool) -> list[str]:
    if event.kind == "collective":
        wide = min(step - 2, 96.0)
        fill = FAULT if fault else PALETTE[0]
        words = cut(event.what, max(2, int(wide / 8)))
        hover = f"{event.what}, {event.n_bytes:,} bytes, line {event.line}"
        return [box(x - wide / 2, y - 11, wide, 22, fill, words, hover)]
    if event.kind == "mark":
        words = text(x, y - 14, cut(event.what, max(3, int(step / 6))), "middle", 11)
        return [line(x, y - 10, x, y + 10, width=4 if fault else 2, colour=FAULT if fault else "currentColor"), words]
    if event.kind == "message":
        return [text(x, y - 7, bytes_text(event.n_bytes), "middle", 11)] if step > 44 else []
    return []


def _received(sent: Event, later: Event) -> bool:
    """True if an event is the arrival of a message: later, at its receiver, from its sender, with its tag."""
    arrival = later.kind == "arrival" and later.number > sent.number
    return arrival and (later.rank, later.to, later.tag) == (sent.to, sent.rank, sent.tag)


def _thick(shapes: str, fault: bool) -> str:
    if not fault:
        return shapes
    return (
        f'<g style="color:{FAULT}" fill="{FAULT}" stroke-width="3">'
        + shapes.replace('stroke-width="1.5"', 'stroke-width="3"')
        + "</g>"
    )


def _plate(x: float, y: float, words: str) -> str:
    half = len(words) // 2
    gap = words.find(" ", half)
    lines = [words] if len(words) < 26 or gap < 0 else [words[:gap], words[gap + 1 :]]
    mark = box(x - 10, y, 4, 24, FAULT)
    return mark + "".join(text(x, y + 10 + 13 * i, words_line, size=11) for i, words_line in enumerate(lines))
