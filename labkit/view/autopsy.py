"""A hang as a picture: a row for each rank, and an arrow from each rank that waits to the rank that it waits for.

The arrows of all ranks that wait for the same rank join in one lane on the right. A rank that others wait for and that
will not come by itself has a thick edge and the word "missing".
"""

from __future__ import annotations

import textwrap
from types import MappingProxyType

from labkit.launch.hang_diagnosis import Autopsy, Whereabouts
from labkit.view.svg import PALETTE, Picture, arrow, box, cut, line, text

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
ROW, HIGH, WORDS, EDGE = 56, 42, 222, 680


def autopsy(report: Autopsy) -> Picture:
    """A picture of all ranks when the call was given up. The pointer over a rank shows its whole sentence."""
    headline = textwrap.wrap(report.headline, 100) or ["Where every rank was"]
    top = 22 + 19 * len(headline)
    body = [text(4, 20 + 19 * k, words, size=14, bold=True) for k, words in enumerate(headline)]
    awaited = {to for _, to in report.waits}
    for place, whereabouts in enumerate(report.ranks):
        body += _row(whereabouts, top + place * ROW, whereabouts.rank in report.stuck, whereabouts.rank in awaited)
    body += _lanes(report, top)
    bottom = top + ROW * len(report.ranks)
    if report.waits:
        body.append(text(796, bottom + 8, "an arrow: waits for", "end", 12))
    return Picture("".join(body), bottom + 16, " ".join(report.words().split()))


def _row(whereabouts: Whereabouts, y: float, stuck: bool, awaited: bool) -> list[str]:
    missing = awaited and whereabouts.state not in ("waiting", "running")
    word = whereabouts.state + (", stuck" if stuck else ", missing" if missing else ", awaited" if awaited else "")
    plain = {"running": "runs Python", "finished": "has returned", "idle": "is not part of this call"}
    first = whereabouts.call or whereabouts.detail or plain.get(whereabouts.state, "")
    second = [part for part in (whereabouts.place, whereabouts.source) if part]
    return [
        box(4, y, 62, HIGH, "none", f"rank {whereabouts.rank}", str(whereabouts)),
        box(74, y, 136, HIGH, COLOURS.get(whereabouts.state, PALETTE[7]), word, str(whereabouts), 3 if missing else 1),
        text(WORDS, y + 18, cut(" · ".join(filter(None, (first, whereabouts.shape))), 64)),
        text(WORDS, y + 36, cut(" · ".join(second), 72), size=12),
    ]


def _lanes(autopsy: Autopsy, top: float) -> list[str]:
    middle = {whereabouts.rank: top + place * ROW + HIGH / 2 for place, whereabouts in enumerate(autopsy.ranks)}
    targets = [to for to in sorted({to for _, to in autopsy.waits}) if to in middle]
    apart = min(18.0, 90 / max(1, len(targets)))
    out = []
    for k, to in enumerate(targets):
        waiting = [rank for rank, awaited in autopsy.waits if awaited == to and rank in middle]
        lane, arrives = EDGE + 22 + apart * k, middle[to] + 7
        for rank in waiting:
            title = f"rank {rank} waits for rank {to}"
            leaves = middle[rank] - 7
            body = line(EDGE, leaves, lane, leaves, width=1.5)
            out.append(f"<g><title>{title}</title>{body}</g>")
            out.append(arrow([(lane, leaves), (lane, arrives), (EDGE, arrives)], title))
    return out
