"""A hang as a picture: a row for each rank, and an arrow from whoever waits to whom it waits for."""

from __future__ import annotations

from labkit.launch.watch import Autopsy
from labkit.view.svg import PALETTE, Picture, arrow, box, text

COLOURS = (
    ("waiting", PALETTE[1]),
    ("running", PALETTE[0]),
    ("finished", PALETTE[2]),
    ("raised", PALETTE[6]),
    ("dead", PALETTE[6]),
    ("idle", PALETTE[7]),
)
ROW = 58


def autopsy(found: Autopsy) -> Picture:
    """What every rank was doing when the call was given up. Hovering over a rank shows its whole sentence."""
    colour = dict(COLOURS)
    body = [text(4, 20, _cut(found.headline, 98), size=14, bold=True)]
    for place, each in enumerate(found.ranks):
        y = 34 + place * ROW
        body.append(box(4, y, 62, 42, "none", f"rank {each.rank}", str(each)))
        word = f"{each.state}{', stuck' if each.rank in found.stuck else ''}"
        body.append(box(74, y, 112, 42, colour[each.state], word, str(each)))
        first = each.call or each.detail or {"running": "Python", "finished": "has returned"}.get(each.state, "")
        said = f"{first}{'  ' + each.shape if each.shape else ''}"
        body.append(text(196, y + 18, _cut(said, 66)))
        body.append(text(196, y + 36, _cut(f"{each.place}  {each.source}".strip(), 74), size=12))
    lanes: list[int] = []
    for a, b in found.waits:
        rows = {each.rank: place for place, each in enumerate(found.ranks)}
        if a in rows and b in rows:
            lanes.append(a)
            y1, y2 = 55 + rows[a] * ROW, 55 + rows[b] * ROW
            body.append(arrow(700, y1, 700, y2, f"rank {a} waits for rank {b}", 40 + 26 * (len(lanes) % 6)))
    if lanes:
        body.append(text(796, 40 + ROW * len(found.ranks), "arrows: waits for", "end", 12))
    return Picture("".join(body), 48 + ROW * len(found.ranks), found.headline or "where every rank was")


def _cut(words: str, length: int) -> str:
    return words if len(words) <= length else words[: length - 1] + "…"
