"""A layout as a cube of ranks: tp to the right, pp down, dp away from you. The groups of one rank are highlighted.

    Layout(dp=2, pp=2, tp=2), rank 5                dp 1   [4]===[5]     === its tp group  {4, 5}
                                                          / :   /  ;     ;   its pp group  {5, 7}
    rank = (dp_index * pp + pp_index) * tp + tp_index    [0]---[1]       /   its dp group  {1, 5}

Every rank is in one group of each axis; the three meet in the rank itself and nowhere else, which is why their traffic
can be counted apart. (Narayanan et al., arXiv:2104.04473, section 3.)
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from labkit.plan.partition.layout import AXES, Layout
from labkit.view.svg import INK, PALETTE, WIDTH, Picture, headline, line, text, width_of

COLOURS = MappingProxyType(
    {"tp": PALETTE[0], "pp": PALETTE[1], "dp": PALETTE[3], "dp_shard": PALETTE[3], "dp_replicate": PALETTE[5]}
)
DASHES = MappingProxyType({"tp": "", "pp": "9 4", "dp": "2 3", "dp_shard": "2 3", "dp_replicate": "2 6"})
WAYS = MappingProxyType({"tp": "solid", "pp": "dashed", "dp": "dotted"})
DOES = MappingProxyType(
    {
        "tp": "cuts each matrix, sums activations in every layer",
        "pp": "cuts the layers, passes activations on",
        "dp": "copies the model, sums gradients once a step",
    }
)
MOST, MOST_TP = 4, 8
"""The most ranks that are drawn along dp and pp, and along tp. Of longer axes the first places, the chosen rank's and
the last are drawn."""
LEFT, TOP, HIGH = 92.0, 84.0, 32.0
PLAIN, CHOSEN = "#e4e4e4", PALETTE[4]
Spots = dict[int, tuple[float, float]]
Shown = dict[str, list[int]]
Groups = dict[str, tuple[int, ...]]


def cube(layout: Layout, rank: int = 0, title: str = "") -> Picture:
    """Every rank with its number and its coordinates dp,pp,tp; ranks that share a group with `rank` are highlighted.

    Long axes are cut: the picture says how many are left out. ValueError for a rank outside the layout."""
    own = layout.coords(rank)
    most = {"dp": MOST if layout.tp < MOST_TP else MOST - 1, "pp": MOST if layout.dp > 1 else 2 * MOST}
    if layout.pp * layout.tp <= 2:
        most["dp"] = 2 * MOST
    shown = {axis: _shown(getattr(layout, axis), own[axis], most[axis]) for axis in ("dp", "pp")}
    deep = len(shown["dp"])
    wide = max(36.0, width_of(",".join(str(getattr(layout, axis) - 1) for axis in AXES), 11) + 4)
    least = (deep - 1) * (wide / 2 + 3) + wide + 8  # from tp to tp, so that no line along pp is hidden behind a box
    fits = max(2, int((WIDTH - LEFT - 8 - least) // least) + 1)
    shown["tp"] = _shown(layout.tp, own["tp"], min(MOST_TP, fits))
    across = len(shown["tp"])
    apart = 40 if across < 4 else 0
    spare = (WIDTH - LEFT - 8 - across * (least + apart)) / across / max(1, deep - 1)
    along = wide / 2 + 3 + min(34.0, max(0.0, spare))
    step = (deep - 1) * along + wide + 8 + apart
    pitch = HIGH + (18 if deep * len(shown["pp"]) <= 6 else 5)
    floor = TOP + (deep - 1) * pitch

    def spot(dp: int, pp: int, tp: int) -> tuple[float, float]:
        """The middle of a rank's box; each (pp, dp) has a line of the page to itself, so no box covers another."""
        x = LEFT + wide / 2 + shown["tp"].index(tp) * step + shown["dp"].index(dp) * along
        return x, floor + (shown["pp"].index(pp) * deep - shown["dp"].index(dp)) * pitch + HIGH / 2

    places = [(d, p, t) for d in reversed(shown["dp"]) for p in shown["pp"] for t in shown["tp"]]
    spots = {layout.rank(*place): spot(*place) for place in places}
    groups = {axis: layout.ranks(axis, rank) for axis in AXES}
    head = title or f"dp {layout.dp} x pp {layout.pp} x tp {layout.tp} = {layout.size:,} rank{'s' * (layout.size > 1)}"
    d, p, t = (own[axis] for axis in AXES)
    facts = f"rank {rank} is dp {d}, pp {p}, tp {t}: ({d} x {layout.pp} + {p}) x {layout.tp} + {t} = {rank}"
    body = [headline(head), text(4, 42, facts)]
    body += _names(layout, shown, spots) + _lines(layout, groups, spots, shown)
    for drawn, (x, y) in spots.items():
        body.append(_box(layout, drawn, rank, groups, x, y, wide))
    bottom = max(y for _, y in spots.values()) + HIGH / 2 + 14
    if len(spots) < layout.size:
        left = ", ".join(
            f"{len(shown[a])} of {getattr(layout, a)} along {a}" for a in AXES if len(shown[a]) < getattr(layout, a)
        )
        note = f"{len(spots):,} of {layout.size:,} ranks are drawn: {left}; a small ring stands for those left out"
        body.append(text(4, bottom + 12, note, size=12))
        bottom += 22
    for axis in ("tp", "pp", "dp"):
        bottom += 24
        body += _legend(axis, groups[axis], bottom)
    label = f"{head}; {facts}; " + "; ".join(f"{axis} group {', '.join(map(str, groups[axis][:64]))}" for axis in AXES)
    return Picture("".join(body), bottom + 12, label)


def _shown(size: int, own: int, most: int) -> list[int]:
    """All indexes of an axis, or the first ones, the chosen one and the last."""
    if size <= most:
        return [*range(size)]
    kept = {0, own, size - 1}
    for index in range(size):
        if len(kept) < most:
            kept.add(index)
    return sorted(kept)


def _names(layout: Layout, shown: Shown, spots: Spots) -> list[str]:
    """The names of places: tp over the furthest row, pp and dp at the left end of each line."""
    out = []
    for tp in shown["tp"]:
        x, y = spots[layout.rank(shown["dp"][-1], 0, tp)]
        out.append(text(x, y - HIGH / 2 - 6, f"tp {tp}", "middle", 12))
    for pp in shown["pp"]:
        for dp in shown["dp"]:
            _, y = spots[layout.rank(dp, pp, 0)]
            out.append(text(4, y + 4, f"dp {dp}  pp {pp}", size=12))
    return out


def _lines(layout: Layout, groups: Groups, spots: Spots, shown: Shown) -> list[str]:
    """Thin lines between neighbours, and thick ones in the highlighted groups, with colour and dashes of the axis."""
    thin, lit = [], []
    for rank, (x, y) in spots.items():
        at = layout.coords(rank)
        for axis in AXES:
            place = shown[axis].index(at[axis])
            if not place:
                continue
            before = shown[axis][place - 1]
            a, b = spots[layout.rank(**{**at, axis: before})]
            gap = at[axis] - before > 1
            if rank in groups[axis]:
                lit.append(line(a, b, x, y, DASHES[axis], 4, COLOURS[axis]))
            else:
                thin.append(line(a, b, x, y, "1 4" if gap else "", 0.5))
            if gap:
                middle = (
                    f'<circle cx="{(a + x) / 2:.1f}" cy="{(b + y) / 2:.1f}" r="3.5" fill="none" stroke="currentColor"/>'
                )
                (lit if rank in groups[axis] else thin).append(
                    f"<g><title>{at[axis] - before - 1} more along {axis}</title>{middle}</g>"
                )
    return thin + lit


def _box(layout: Layout, other: int, rank: int, groups: Groups, x: float, y: float, wide: float) -> str:
    """The box of a rank: its number and coordinates, in the colour and edge of the axis that it shares with `rank`."""
    at = layout.coords(other)
    axis = next((axis for axis in AXES if other in groups[axis] and other != rank), "")
    fill, edge, dash = PLAIN, 0.6, ""
    relation = f"in none of the groups of rank {rank}"
    if other == rank:
        fill, edge, relation = CHOSEN, 4, "the chosen rank"
    elif axis:
        fill, edge, relation = COLOURS[axis], 2, f"in the {axis} group of rank {rank}"
        dash = f' stroke-dasharray="{DASHES[axis]}"' if DASHES[axis] else ""
    hover = f"rank {other}: dp {at['dp']}, pp {at['pp']}, tp {at['tp']}; {relation}"
    middle = f'x="{x:.1f}" text-anchor="middle" fill="{INK}"'
    return (
        f'<g><title>{hover}</title><rect x="{x - wide / 2:.1f}" y="{y - HIGH / 2:.1f}" width="{wide:.1f}" '
        f'height="{HIGH:g}" rx="3" fill="{fill}" stroke="currentColor" stroke-width="{edge:g}"{dash}/>'
        f'<text {middle} y="{y - 3:.1f}" font-size="13" font-weight="600">{other}</text>'
        f'<text {middle} y="{y + 11:.1f}" font-size="11">{at["dp"]},{at["pp"]},{at["tp"]}</text></g>'
    )


def _legend(axis: str, ranks: Sequence[int], y: float) -> list[str]:
    """A line of the legend: how an axis is drawn, which ranks are in the group, what the axis does."""
    members = f"{len(ranks)} ranks: {_some(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]} alone"
    mark = line(8, y - 4, 44, y - 4, DASHES[axis], 4, COLOURS[axis])
    return [mark, text(54, y, f"{axis} group ({WAYS[axis]}), {members}"), text(796, y, DOES[axis], "end", 12)]


def _some(ranks: Sequence[int]) -> str:
    """The ranks in at most 32 letters: all of them, or the first ones and the last."""
    words, kept = ", ".join(map(str, ranks)), len(ranks)
    while len(words) > 32:
        kept -= 1
        words = f"{', '.join(map(str, ranks[:kept]))}, … {ranks[-1]}"
    return words
