"""A run as the judge saw it: who sent what to whom in which order, or how many bytes each rank held.

rank 0  ──●────────▭──        ● ↘  a message and where it went, with its bytes     ▭ a collective
rank 1  ────↘●─────▭──        | a mark of the exercise                             the fault is drawn thick, in red
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.plan.breakdown import KINDS
from labkit.view.svg import PALETTE, WIDTH, Picture, arrow, box, cut, headline, line, text
from labkit.view.units import bytes_text

FAULT = PALETTE[6]
LEFT, TOP, ROW = 64.0, 52.0, 46.0
MOST_STEPS = 40


def of_verdict(verdict: str, run: Mapping[str, Any], at: Sequence[int] = (), words: str = "") -> str:
    """The picture for a broken verdict, as HTML; "" where there is nothing to draw.

    `run` is plain data: n_ranks, events (number, seconds, rank, kind, what, to, bytes, axis, tag, line), timelines and
    peaks by rank, plates (words beside a rank's line); `at` numbers the events at fault."""
    if verdict == "memory":
        return holdings(run["timelines"], run["peaks"], words).html()
    if not run["events"] and not run["plates"]:
        return ""
    return conversation(run["n_ranks"], run["events"], run["plates"], at, f"{verdict}: {words}").html()


def conversation(
    n_ranks: int, events: Sequence[Any], plates: Mapping[int, str], at: Sequence[int] = (), title: str = ""
) -> Picture:
    """A line for each rank, a place for each event, in the order in which they reached the judge."""
    chosen = _around(events, at)
    step = (WIDTH - LEFT - 150) / max(1, len(chosen))
    place = {each[0]: LEFT + (i + 0.5) * step for i, each in enumerate(chosen)}
    row = [TOP + ROW * (rank + 0.5) for rank in range(n_ranks)]
    body = [headline(cut(title, 110))]
    if len(chosen) < len(events):
        body.append(text(4, 40, f"{len(chosen)} of {len(events)} events", size=12))
    for rank in range(n_ranks):
        body += [text(4, row[rank] + 4, f"rank {rank}"), line(LEFT, row[rank], WIDTH - 150, row[rank])]
        if rank in plates:
            body.append(_plate(WIDTH - 146, row[rank] - 12, cut(plates[rank], 60)))
    taken: set[int] = set()
    for each in chosen:
        x, fault = place[each[0]], each[0] in at
        y = row[each[2]]
        body += _one(each, x, y, step, fault)
        if each[3] == "message" and each[5] is not None and each[5] < n_ranks:
            end = next((later for later in chosen if later[0] not in taken and _received(each, later)), None)
            if end is not None:
                taken.add(end[0])
            to = (
                place[end[0]] if end else x + 0.4 * step,
                row[each[5]] + (0 if end else 12 * (-1) ** (each[5] > each[2])),
            )
            hover = f"{each[6]:,} bytes to rank {each[5]}, line {each[9]}" + ("" if end else ", never received")
            body.append(_thick(arrow([(x, y), to], hover), fault or end is None))
    label = f"{title}; " + "; ".join(f"rank {each[2]} {each[4]} {each[6]} bytes" for each in chosen[:MOST_STEPS])
    return Picture("".join(body), TOP + ROW * n_ranks + 8, label)


def holdings(timelines: Sequence[Sequence[Sequence[float]]], peaks: Sequence[Mapping[str, int]], title: str) -> Picture:
    """For each rank the bytes over time, and beside it those of its peak by kind."""
    most = max((point[1] for line_ in timelines for point in line_), default=0) or 1
    tall, wide = 64.0, 400.0
    body = [headline(cut(f"memory: {title}", 110))]
    for rank, points in enumerate(timelines):
        bottom = TOP + (rank + 1) * (tall + 18)
        body += [text(4, bottom - tall / 2, f"rank {rank}"), line(LEFT, bottom, LEFT + wide, bottom)]
        if points:
            start, span = points[0][0], (points[-1][0] - points[0][0]) or 1.0
            spots = [(LEFT + wide * (t - start) / span, bottom - tall * n / most) for t, n in points]
            steps = f"M{spots[0][0]:.1f} {bottom:.1f}" + "".join(f"L{x:.1f} {y:.1f}" for x, y in spots)
            body.append(
                f'<path d="{steps}L{spots[-1][0]:.1f} {bottom:.1f}z" fill="{PALETTE[0]}" stroke="currentColor"/>'
            )
            top = max(range(len(points)), key=lambda i: points[i][1])
            body.append(_thick(line(*spots[top], spots[top][0], bottom), True))
        kinds = [f"{kind} {bytes_text(peaks[rank][kind])}" for kind in KINDS if peaks[rank].get(kind)]
        total = bytes_text(sum(peaks[rank].values()))
        body.append(text(LEFT + wide + 12, bottom - tall / 2 - 6, f"peak {total}", bold=True))
        body += [text(LEFT + wide + 12, bottom - tall / 2 + 10 + 14 * i, each, size=12)
                 for i, each in enumerate([", ".join(kinds[:2]), ", ".join(kinds[2:])]) if each]  # fmt: skip
    label = "; ".join(f"rank {rank} peak {sum(peak.values()):,} bytes" for rank, peak in enumerate(peaks))
    return Picture("".join(body), TOP + len(timelines) * (tall + 18) + 10, f"{title}; {label}")


def _around(events: Sequence[Any], at: Sequence[int]) -> list[Any]:
    if len(events) <= MOST_STEPS:
        return list(events)
    first = max(0, min(at, default=0) - MOST_STEPS // 4)
    return list(events[first : first + MOST_STEPS])


def _one(each: Any, x: float, y: float, step: float, fault: bool) -> list[str]:
    kind, what, n_bytes, code = each[3], each[4], each[6], each[9]
    if kind == "collective":
        wide = min(step - 2, 96.0)
        fill = FAULT if fault else PALETTE[0]
        return [
            box(
                x - wide / 2,
                y - 11,
                wide,
                22,
                fill,
                cut(what, max(2, int(wide / 8))),
                f"{what}, {n_bytes:,} bytes, line {code}",
            )
        ]
    if kind == "mark":
        words = text(x, y - 14, cut(what, max(3, int(step / 6))), "middle", 11)
        return [line(x, y - 10, x, y + 10, width=4 if fault else 2, colour=FAULT if fault else "currentColor"), words]
    if kind == "message":
        return [text(x, y - 7, bytes_text(n_bytes), "middle", 11)] if step > 44 else []
    return []


def _received(sent: Any, later: Any) -> bool:
    """Whether an event is the arrival of a message: later, at its receiver, from its sender, with its tag."""
    ends = (later[2], later[5], later[8]) == (sent[5], sent[2], sent[8])
    return later[0] > sent[0] and later[3] == "arrival" and ends


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
    return mark + "".join(text(x, y + 10 + 13 * i, each, size=11) for i, each in enumerate(lines))
