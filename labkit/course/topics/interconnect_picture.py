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
from labkit.view.svg import INK, PALETTE, WIDTH, Picture, box, cut, headline, line, text, width_of
from labkit.view.units import bytes_text, plural, seconds_text

MOST = 16
"""The most ranks that a picture has."""
TOP, LEFT, BAR = 62.0, 266.0, 300.0
LAW, SEEN = PALETTE[0], PALETTE[2]


def wires(layout: Layout, demand: Demand, links: Links, measured: Breakdown | None = None, title: str = "") -> Picture:
    """The ranks on their nodes with the lines of each axis, and bars of seconds: by the law, and `measured`.

    ValueError for links of another number of ranks, and for more ranks than MOST."""
    if layout.size > MOST:
        raise ValueError(f"{layout.size} ranks are too many for this picture, which draws up to {MOST}")
    law = on_wires(layout, demand, links)
    head = title or f"dp {layout.dp} x pp {layout.pp} x tp {layout.tp} on {plural(len(links.by_node), 'node')}"
    total = f"{head}: {seconds_text(law.total)} on the wires in one step"
    body = [headline(total), text(4, 42, cut(links.words, 118), size=12)]
    drawn, bottom = _nodes(layout, links)
    rows, y, facts = _bars(layout, demand, links, law, measured, bottom + 34)
    verdict = _verdict(layout, links, law)
    body += [*drawn, *rows, text(4, y + 4, verdict, bold=True)]
    return Picture("".join(body), y + 16, "; ".join([total, *facts, verdict]))


def _nodes(layout: Layout, links: Links) -> tuple[list[str], float]:
    """The nodes' frames with their ranks, and the lines of all groups behind them; and the height below."""
    nodes = links.by_node
    gap = 26.0 if len(nodes) > 1 else 0.0
    wide = (WIDTH - 8 - gap * (len(nodes) - 1)) / len(nodes)
    across = min(4, max(len(node) for node in nodes))
    down = -(-max(len(node) for node in nodes) // across)
    tall = 66 + 62.0 * down
    spots, out = {}, []
    for index, node in enumerate(nodes):
        x = 4 + index * (wide + gap)
        out += [box(x, TOP, wide, tall), text(x + 8, TOP + 18, f"node {links.home[node[0]]}", bold=True)]
        for place, rank in enumerate(node):
            step = wide / across
            spots[rank] = (x + (place % across + 0.5) * step, TOP + 62 + place // across * 62.0)
    for order, axis in enumerate(reversed(AXES)):
        seen = {tuple(sorted(edge)) for pairs in hops(layout, axis) for edge in pairs}
        for a, b in sorted(seen):
            out.append(_curve(spots[a], spots[b], axis, 14.0 + 9.0 * order, links.home[a] != links.home[b], (a, b)))
    for rank, (x, y) in spots.items():
        at = layout.coords(rank)
        hover = f"rank {rank}: dp {at['dp']}, pp {at['pp']}, tp {at['tp']}"
        middle = f'x="{x:.1f}" text-anchor="middle" fill="{INK}"'
        out.append(
            f'<g><title>{hover}</title><rect x="{x - 23:.1f}" y="{y - 16:.1f}" width="46" height="32" rx="3" '
            f'fill="{PALETTE[4]}" stroke="currentColor"/><text {middle} y="{y - 3:.1f}" font-weight="600">{rank}</text>'
            f'<text {middle} y="{y + 11:.1f}" font-size="11">{at["dp"]},{at["pp"]},{at["tp"]}</text></g>'
        )
    return [*out, text(WIDTH - 4, TOP + tall + 14, "in each box: rank; dp,pp,tp", "end", 11)], TOP + tall


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
    layout: Layout, demand: Demand, links: Links, law: Breakdown, measured: Breakdown | None, y: float
) -> tuple[list[str], float, list[str]]:
    """Two bars for each axis, the law and the measurement. Returns (elements, the height below, facts in words)."""
    seen = {item.name: item.value for item in measured.items} if measured is not None else {}
    longest = max([*(item.value for item in law.items), *seen.values()]) or 1.0
    out, facts = [], []
    for axis in ("tp", "pp", "dp"):
        count, n_bytes = demand[axis]
        out.append(line(8, y - 4, 40, y - 4, DASHES[axis], 4, COLOURS[axis]))
        if not count:
            out += [text(50, y, axis, bold=True), text(82, y, "one rank: nothing to send", size=12)]
            y += 30
            continue
        over = crosses(layout, axis, links)
        where = f"{plural(over, 'edge')} between nodes" if over else "inside the nodes"
        call = "round trip" if axis == "pp" else "all_reduce"
        calls = f"{count} {call}{'s' * (count > 1)} of {bytes_text(n_bytes)}"
        out += [text(50, y, axis, bold=True), text(82, y, calls, size=12), text(82, y + 17, where, size=12)]
        facts.append(f"{axis}: {calls}, {where}, law {seconds_text(law[axis])}")
        out += _bar(y - 13, law[axis] / longest, LAW, f"law {seconds_text(law[axis])}")
        if axis in seen:
            words = f"measured {seconds_text(seen[axis])}"
            out += _bar(y + 6, seen[axis] / longest, SEEN, words)
            facts.append(f"{axis} {words}")
        y += 48
    return out, y, facts


def _bar(y: float, share: float, fill: str, words: str) -> list[str]:
    wide = max(2.0, BAR * share)
    x = min(LEFT + wide + 8, WIDTH - 4 - width_of(words))
    return [box(LEFT, y, wide, 16, fill, "", words), text(x, y + 13, words)]


def _verdict(layout: Layout, links: Links, law: Breakdown) -> str:
    """A sentence on the axis that takes most seconds, and where its wires are."""
    if not law.total:
        return "one rank on each axis: no wire is used"
    axis = max(("tp", "pp", "dp"), key=lambda candidate: law[candidate])
    where = "between the nodes" if crosses(layout, axis, links) else "inside the nodes"
    return f"{axis} takes {100 * law[axis] / law.total:.0f}% of these seconds, {where}"
