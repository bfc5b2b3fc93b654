"""A hang as a picture: a row for each rank, and an arrow from each rank that waits to the rank that it waits for.

The arrows of all ranks that wait for the same rank join in one lane on the right. A rank that others wait for and that
will not come by itself has a thick edge and the word "missing".
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

from labkit.launch.hang_diagnosis import Autopsy, Whereabouts
from labkit.view.panels import Panel, below, beside, over, paragraph, phrase, space, tile
from labkit.view.svg import PALETTE, WIDTH, Picture, arrow, cut, line

COLOURS = MappingProxyType(
    {
        "waiting": PALETTE[1],
        "running": PALETTE[0],
        "finished": PALETTE[2],
        "raised": PALETTE[6],
        "dead": PALETTE[6],
        "idle": PALETTE[7],
    }
)
ROW, HIGH, EDGE = 56.0, 42.0, 676.0
"""The height of a row, that of its boxes, and the left end of the arrows."""


def autopsy(report: Autopsy) -> Picture:
    """A picture of all ranks when the call was given up. The pointer over a rank shows its whole sentence."""
    head = paragraph(report.headline or "Where every rank was", size=14, bold=True)
    awaited = {to for _, to in report.waits}
    ranks = [_row(rank, rank.rank in report.stuck, rank.rank in awaited) for rank in report.ranks]
    rows = over(below(*ranks, gap=ROW - HIGH), Panel(WIDTH - 8, 0, partial(_lanes, report)))
    what = phrase("an arrow: waits for", 12, anchor="end", width=WIDTH - 8) if report.waits else space(0, 0)
    whole = below(head, rows, what, gap=10)
    return Picture(whole.draw(4, 4), whole.height + 12, " ".join(report.words().split()))


def _row(whereabouts: Whereabouts, stuck: bool, awaited: bool) -> Panel:
    missing = awaited and whereabouts.state not in ("waiting", "running")
    word = whereabouts.state + (", stuck" if stuck else ", missing" if missing else ", awaited" if awaited else "")
    plain = {"running": "runs Python", "finished": "has returned", "idle": "is not part of this call"}
    first = whereabouts.call or whereabouts.detail or plain.get(whereabouts.state, "")
    second = [part for part in (whereabouts.place, whereabouts.source) if part]
    colour = COLOURS.get(whereabouts.state, PALETTE[7])
    return beside(
        tile(62, HIGH, "none", f"rank {whereabouts.rank}", str(whereabouts)),
        tile(136, HIGH, colour, word, str(whereabouts), 3 if missing else 1),
        below(
            phrase(cut(" · ".join(filter(None, (first, whereabouts.shape))), 64)),
            phrase(cut(" · ".join(second), 72), 12),
        ).padded(left=4),
        gap=8,
    )


def _lanes(autopsy: Autopsy, left: float, top: float) -> str:
    middle = {whereabouts.rank: top + place * ROW + HIGH / 2 for place, whereabouts in enumerate(autopsy.ranks)}
    targets = [to for to in sorted({to for _, to in autopsy.waits}) if to in middle]
    apart = min(18.0, 90 / max(1, len(targets)))
    out = []
    for k, to in enumerate(targets):
        waiting = [rank for rank, awaited in autopsy.waits if awaited == to and rank in middle]
        edge = left + EDGE
        lane, arrives = edge + 22 + apart * k, middle[to] + 7
        for rank in waiting:
            title = f"rank {rank} waits for rank {to}"
            leaves = middle[rank] - 7
            body = line(edge, leaves, lane, leaves, width=1.5)
            out.append(f"<g><title>{title}</title>{body}</g>")
            out.append(arrow([(lane, leaves), (lane, arrives), (edge, arrives)], title))
    return "".join(out)
