"""A layout on the nodes of a machine: which axes cross between nodes, and the seconds that each keeps the wires busy.

    node 0             node 1            tp   ====  inside     law   ## 12 ms
    [0] === [1]        [2] === [3]                        measured   ### 14 ms
     : . . . . . . . . . :               dp   ::::  between    law   ####### 84 ms

Lines join the neighbours of a group, with colour and dashes of the axis as in labkit.view.cube, and are thicker between
nodes. An axis is slow if its lines leave a node and it has many bytes.
"""

from __future__ import annotations

from labkit.plan.breakdown import Breakdown
from labkit.plan.machine.topology import Links
from labkit.plan.partition.layout import AXES, Layout
from labkit.plan.step.wire_time import Demand, crosses, hops, on_wires
from labkit.view.cube import COLOURS, DASHES
from labkit.view.panels import Column, Panel, below, beside, page, phrase, sample, space, table, tile
from labkit.view.svg import INK, PALETTE, WIDTH, Picture, box, cut, text
from labkit.view.units import bytes_text, plural, seconds_text

MOST = 16
"""The most ranks that a picture has."""
BAR = 300.0
"""The width of the longest bar."""
LAW, SEEN = PALETTE[0], PALETTE[2]


def wires(layout: Layout, demand: Demand, links: Links, measured: Breakdown | None = None, title: str = "") -> Picture:
    """The ranks on their nodes with the lines of each axis, and bars of seconds: by the law, and `measured`.

    ValueError for links of another number of ranks, and for more ranks than MOST."""
    if layout.size > MOST:
        raise ValueError(f"{layout.size} ranks are too many for this picture, which draws up to {MOST}")
    law = on_wires(layout, demand, links)
    head = title or f"dp {layout.dp} x pp {layout.pp} x tp {layout.tp} on {plural(len(links.by_node), 'node')}"
    total = f"{head}: {seconds_text(law.total)} on the wires in one step"
    bars, facts = _bars(layout, demand, links, law, measured)
    verdict = _verdict(layout, links, law)
    return page(
        total, phrase(cut(links.words, 118), 12), _nodes(layout, links), bars, phrase(verdict, bold=True),
        label="; ".join([total, *facts, verdict]),
    )  # fmt: skip


def _nodes(layout: Layout, links: Links) -> Panel:
    """The nodes' frames with their ranks, and the lines of all groups behind them."""
    nodes = links.by_node
    gap = 26.0 if len(nodes) > 1 else 0.0
    wide = (WIDTH - 8 - gap * (len(nodes) - 1)) / len(nodes)
    across = min(4, max(len(node) for node in nodes))
    down = -(-max(len(node) for node in nodes) // across)
    tall = 66 + 62.0 * down

    def draw(left: float, top: float) -> str:
        spots, out = {}, []
        for index, node in enumerate(nodes):
            x = left + index * (wide + gap)
            out += [box(x, top, wide, tall), text(x + 8, top + 18, f"node {links.home[node[0]]}", bold=True)]
            for place, rank in enumerate(node):
                spots[rank] = (x + (place % across + 0.5) * wide / across, top + 62 + place // across * 62.0)
        for order, axis in enumerate(reversed(AXES)):
            for a, b in sorted({tuple(sorted(edge)) for pairs in hops(layout, axis) for edge in pairs}):
                between = links.home[a] != links.home[b]
                out.append(_curve(spots[a], spots[b], axis, 14.0 + 9.0 * order, between, (a, b)))
        return "".join([*out, *(_rank(layout, rank, *spot) for rank, spot in spots.items())])

    what = phrase("in each box: rank; dp,pp,tp", 11, anchor="end", width=WIDTH - 8)
    return below(Panel(WIDTH - 8, tall, draw), what)


def _rank(layout: Layout, rank: int, x: float, y: float) -> str:
    """A box around (x, y) with a rank's number and its coordinates."""
    at = layout.coords(rank)
    hover = f"rank {rank}: dp {at['dp']}, pp {at['pp']}, tp {at['tp']}"
    middle = f'x="{x:.1f}" text-anchor="middle" fill="{INK}"'
    return (
        f'<g><title>{hover}</title><rect x="{x - 23:.1f}" y="{y - 16:.1f}" width="46" height="32" rx="3" '
        f'fill="{PALETTE[4]}" stroke="currentColor"/><text {middle} y="{y - 3:.1f}" font-weight="600">{rank}</text>'
        f'<text {middle} y="{y + 11:.1f}" font-size="11">{at["dp"]},{at["pp"]},{at["tp"]}</text></g>'
    )


def _curve(a: tuple[float, float], b: tuple[float, float], axis: str, bend: float, between: bool, ranks: object) -> str:
    """A curve over or under the ranks. Each axis bends more than the one before, so that no curve hides another."""
    (x1, y1), (x2, y2) = a, b
    up = -1 if axis != "dp" else 1
    far = 1 + abs(x2 - x1) / 400
    path = f"M{x1:.1f} {y1:.1f}Q{(x1 + x2) / 2:.1f} {(y1 + y2) / 2 + up * bend * 2 * far:.1f} {x2:.1f} {y2:.1f}"
    if x1 == x2:
        path = f"M{x1:.1f} {y1:.1f}Q{x1 + 2 * bend:.1f} {(y1 + y2) / 2:.1f} {x2:.1f} {y2:.1f}"
    dash = f' stroke-dasharray="{DASHES[axis]}"' if DASHES[axis] else ""
    label = f"{axis}: ranks {ranks}, {'between nodes' if between else 'inside a node'}"
    style = f'fill="none" stroke="{COLOURS[axis]}" stroke-width="{5 if between else 3}"{dash}'
    return f'<g><title>{label}</title><path d="{path}" {style}/></g>'


def _bars(
    layout: Layout, demand: Demand, links: Links, law: Breakdown, measured: Breakdown | None
) -> tuple[Panel, list[str]]:
    """Two bars for each axis, the law and the measurement; and the same facts in words."""
    seen = {item.name: item.value for item in measured.items} if measured is not None else {}
    longest = max([*(item.value for item in law.items), *seen.values()]) or 1.0
    rows, facts = [], []
    for axis in ("tp", "pp", "dp"):
        count, n_bytes = demand[axis]
        named = beside(sample(32, 4, DASHES[axis], COLOURS[axis]), phrase(axis, bold=True, width=24), gap=8)
        if not count:
            rows.append((named, phrase("one rank: nothing to send", 12), space(0, 0)))
            continue
        over = crosses(layout, axis, links)
        where = f"{plural(over, 'edge')} between nodes" if over else "inside the nodes"
        call = "round trip" if axis == "pp" else "all_reduce"
        calls = f"{count} {call}{'s' * (count > 1)} of {bytes_text(n_bytes)}"
        facts.append(f"{axis}: {calls}, {where}, law {seconds_text(law[axis])}")
        bars = [_bar(law[axis] / longest, LAW, f"law {seconds_text(law[axis])}")]
        if axis in seen:
            words = f"measured {seconds_text(seen[axis])}"
            bars.append(_bar(seen[axis] / longest, SEEN, words))
            facts.append(f"{axis} {words}")
        rows.append((named, below(phrase(calls, 12), phrase(where, 12)), below(*bars, gap=2)))
    return table((Column(), Column(), Column()), rows, gap=10, lead=10), facts


def _bar(share: float, fill: str, words: str) -> Panel:
    return beside(tile(max(2.0, BAR * share), 16, fill, "", words), phrase(words), gap=8)


def _verdict(layout: Layout, links: Links, law: Breakdown) -> str:
    """A sentence on the axis that takes most seconds, and where its wires are."""
    if not law.total:
        return "one rank on each axis: no wire is used"
    axis = max(("tp", "pp", "dp"), key=lambda candidate: law[candidate])
    where = "between the nodes" if crosses(layout, axis, links) else "inside the nodes"
    return f"{axis} takes {100 * law[axis] / law.total:.0f}% of these seconds, {where}"
