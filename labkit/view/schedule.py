"""A pipeline schedule on paper: a row for each rank, a box for each action, and white where the rank waits."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.plan.schedule import Schedule, Span, bubble, simulate
from labkit.view.svg import PALETTE, WIDTH, Picture, box, headline, line, text
from labkit.view.units import seconds_text

LEFT, RIGHT, TOP, LANE = 62, 74, 58, 30
KINDS = (("F", "forward", PALETTE[0], 0), ("B", "backward", PALETTE[1], 4), ("W", "weights", PALETTE[2], 4))
"""Letter, word, colour, and how much lower the box stands: what is too narrow for a letter can still be told apart."""
MOST = 6000
"""Boxes of a picture; below it stands how many actions come later and are left out."""


def rows(what: Schedule | Sequence[Span], title: str = "") -> Picture:
    """A schedule as it runs if a forward takes 1 and a backward 2, or spans, simulated or measured, in seconds.

    Measured ones are the `spans` of every rank's Pipeline, joined, each moved by its `begin` (and its clock's offset,
    see Clock) if ranks did not begin together. A box says action and micro-batch (`F3`; `5F3` names
    stage 5 where a rank has several, whose boxes are paler the later the stage); on the right stands how many
    activations the rank holds at most. ValueError if there is nothing to draw."""
    spans = sorted(simulate(what) if isinstance(what, Schedule) else what, key=lambda span: span.start)
    if not spans:
        raise ValueError("a picture of a schedule needs spans, and there are none")
    ranks = sorted({span.rank for span in spans})
    stages = {rank: sorted({span.action.stage for span in spans if span.rank == rank}) for rank in ranks}
    shown = spans[:MOST]
    first, last = spans[0].start, max(span.end for span in shown)
    scale = (WIDTH - LEFT - RIGHT) / ((last - first) or 1)
    whole = max(span.end for span in spans) - first
    took = f"{whole:g} forwards" if isinstance(what, Schedule) else seconds_text(whole)
    name = f"{what.name}, " if isinstance(what, Schedule) else ""
    micros = len({span.action.micro for span in spans})
    label = title or f"{name}{_count(len(ranks), 'rank')}, {_count(micros, 'micro-batch', 'es')}"
    label = f"{label}: {took}, of which ranks wait {100 * bubble(spans):.3g} %" if whole > 0 else label
    body, right = [headline(label, 14)], 4.0
    for kind, word, colour, _ in KINDS:
        if any(span.action.kind == kind for span in spans):
            body += [box(right, 31, 12, 12, colour), text(right + 17, 42, f"{kind} {word}")]
            right += 48 + 7.2 * len(word)
    body.append(text(WIDTH - 4, 42, "held", "end"))
    for k, rank in enumerate(ranks):
        y = TOP + k * LANE
        body += [
            text(4, y + 18, f"rank {rank}", bold=True),
            line(LEFT, y + LANE - 2, WIDTH - RIGHT, y + LANE - 2, width=0.3),
            text(WIDTH - 4, y + 18, _held([span for span in spans if span.rank == rank]), "end"),
        ]
    for span in shown:
        mine = stages[span.rank]
        body.append(_box(span, mine, TOP + ranks.index(span.rank) * LANE, first, scale, isinstance(what, Schedule)))
    bottom = TOP + len(ranks) * LANE + 4
    body.append(line(LEFT, bottom, WIDTH - RIGHT, bottom))
    for k in range(5):
        x, at = LEFT + (WIDTH - LEFT - RIGHT) * k / 4, (last - first) * k / 4
        said = f"{at:.3g}" if isinstance(what, Schedule) else seconds_text(at)
        body += [line(x, bottom, x, bottom + 5), text(x, bottom + 19, said if k else "0", "middle", 12)]
    if len(spans) > MOST:
        said = f"the first {MOST:,} actions are drawn; {len(spans) - MOST:,} later ones are not"
        body.append(text(LEFT, bottom + 40, said, size=12))
    return Picture("".join(body), bottom + (48 if len(spans) > MOST else 26), label)


def _box(span: Span, stages: Sequence[int], y: float, first: float, scale: float, simulated: bool) -> str:
    kind, stage, micro = span.action
    _, word, colour, lower = next(each for each in KINDS if each[0] == kind)
    x, wide = LEFT + (span.start - first) * scale, max((span.end - span.start) * scale, 0.5)
    words = [f"{kind}{micro}", f"{micro}"]
    if len(stages) > 1:
        colour = _paler(colour, stages.index(stage) / len(stages))
        words.insert(0, str(span.action))
    said = next((each for each in words if wide >= 6 + 5.3 * len(each)), "")
    time = f"{span.start:g} to {span.end:g}" if simulated else f"{seconds_text(span.end - span.start)}"
    title = f"rank {span.rank}, stage {stage}: {word} of micro-batch {micro}, {time}"
    return box(x, y + lower, wide, LANE - 8, colour, said, title, 1 if wide > 6 else 0)


def _count(n: int, what: str, plural: str = "s") -> str:
    return f"{n} {what}{plural if n != 1 else ''}"


def _paler(colour: str, share: float) -> str:
    parts = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * 0.75 * share):02X}" for part in parts)


def _held(spans: Sequence[Span]) -> int:
    """The most activations held at once, in (stage, micro-batch) pairs."""
    last, held, most = "W" if any(span.action.kind == "W" for span in spans) else "B", 0, 0
    for span in spans:
        held += (span.action.kind == "F") - (span.action.kind == last)
        most = max(most, held)
    return most
