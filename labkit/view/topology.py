"""The bytes that each rank sent to each other rank as a table, and the wires that carried them as a map of nodes.

topology(replies)            a matrix: bytes from the row's rank to the column's
network(links, ledgers)      nodes with their ranks, each kind of link with its latency and its bandwidth, and how
                             many bytes stayed inside nodes and crossed between them, axis by axis

node 0            node 1
[0] [1]           [2] [3]       nvlink inside, 4 edges: 1.9 us, 450 GB/s
  up | down         up | down   infiniband between, 8 edges: 4 us, 50 GB/s; the ranks of a node share its card
-----+--------------+--------
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from labkit.launch.reply import Reply
from labkit.plan.machine.link import Link
from labkit.plan.machine.topology import Links
from labkit.view.flow import Flow, Ledgers, axes_of
from labkit.view.panels import Column, Panel, below, beside, over, page, phrase, space, table, tile
from labkit.view.places import Edge
from labkit.view.svg import WIDTH, Picture, cut, line, shade
from labkit.view.units import bytes_text, metric_text, seconds_text

LEFT, HIGH, TOTAL, GAP = 62.0, 28.0, 92.0, 4.0
"""Of the matrix: the width of the ranks' names, the height of a box, the width of the last column, the gap."""
BY_AXIS = (
    Column("bytes by axis"), Column("inside nodes", "end"), Column("between", "end"), Column("charged", "end"),
    Column("crossed", "end"),
)  # fmt: skip
MOST_NODES, MOST_RANKS, MOST_KINDS, COLUMNS = 16, 16, 8, 4
"""The most nodes of a map, ranks of a node, and kinds of link that are drawn; and the nodes side by side."""


def topology(replies: Sequence[Reply]) -> Picture:
    """A matrix of bytes sent, from the row's rank to the column's. Darker is more; the number is in the box.

    Only messages have a receiver: a collective that the backend carries out counts in the last column only."""
    ranks = [reply.rank for reply in replies]
    sent = {(a, b): 0 for a in ranks for b in ranks}
    for reply in replies:
        for transfer in reply.ledger:
            if transfer.to in ranks:
                sent[reply.rank, transfer.to] += transfer.n_bytes
    most = max(sent.values(), default=0) or 1
    side = min(80.0, (WIDTH - LEFT - TOTAL - 20) / max(1, len(ranks)) - GAP)
    heads = [phrase(f"to {b}", anchor="middle", width=side) for b in ranks]
    last = phrase("all sent", bold=True, anchor="middle", width=TOTAL)
    rows, titles = [beside(space(LEFT, 0), *heads, space(GAP, 0), last, gap=GAP)], []
    for reply in replies:
        cells, a = [phrase(f"rank {reply.rank}", bold=True, width=LEFT)], reply.rank
        for b in ranks:
            if n_bytes := sent[a, b]:
                titles.append(f"rank {a} sent {n_bytes:,} bytes to rank {b}")
                cells.append(tile(side, HIGH, shade(n_bytes / most), bytes_text(n_bytes), titles[-1]))
            else:
                cells.append(tile(side, HIGH, "none", "·", f"rank {a} sent nothing to rank {b}"))
        total = reply.ledger.sent_bytes()
        cells += [space(GAP, 0), tile(TOTAL, HIGH, "none", bytes_text(total), f"rank {a} sent {total:,} bytes in all")]
        rows.append(beside(*cells, gap=GAP))
    label = f"bytes sent between {len(ranks)} ranks: {'; '.join(titles) or 'no messages'}"
    if charged := sum(reply.ledger.charged_bytes() for reply in replies):
        note = f"{bytes_text(charged)} of all sent charged by a ring's law, not counted"
        rows.append(phrase(note, 11))
        label = f"{label}; {note}"
    wide = max(300.0, *(row.width + 8 for row in rows))
    return page("bytes sent, from row to column", below(*rows, gap=6), label=label, width=wide, size=14)


def network(links: Links, ledgers: Ledgers | None = None, title: str = "") -> Picture:
    """The nodes of `links` with their ranks, each kind of wire with its numbers, and the bytes that crossed it.

    With `ledgers` (of ranks 0, 1, ..., or replies) each rank shows the bytes that it sent, each node those that left it
    and came to it, and a table the bytes inside and between nodes by axis. The bytes of the backend's own collectives
    have no receiver, and a column of their own. ValueError for ledgers of another number of ranks."""
    if ledgers is not None and len(ledgers) != links.n_ranks:
        raise ValueError(
            f"these links join {links.n_ranks} ranks, and there are ledgers of {len(ledgers)}: one for each"
        )
    nodes = links.by_node
    flow = Flow.of(ledgers) if ledgers is not None else None
    n, k = links.n_ranks, len(nodes)
    head = title or f"{n} rank{'s' * (n != 1)} on {k} node{'s' * (k != 1)}"
    most = max((flow.sent(rank) for rank in range(n)), default=0) if flow else 0
    across = min(COLUMNS, k)
    wide = (WIDTH - 8 - 12 * (across - 1)) / across
    per = max(1, int((wide - 16) // (72 if flow else 44)))
    shown = [node[:MOST_RANKS] for node in nodes[:MOST_NODES]]
    tall = 48 + 40 * max(-(-len(node) // per) for node in shown) + 18 * any(len(node) > MOST_RANKS for node in nodes)
    drawn = [
        over(tile(wide, tall), _node(links, number, ranks, wide, per, flow, most).padded(8, 4))
        for number, ranks in enumerate(shown)
    ]
    caption = f"between nodes: {_numbers(links, True)}" if k > 1 else ""
    parts, node_facts = [], []
    for first in range(0, len(drawn), across):
        rows = [beside(*drawn[first : first + across], gap=12)]
        if k > 1:
            moved = [_crossed(links, flow, nodes[number]) for number in range(len(drawn))[first : first + across]]
            rows.append(beside(*(_up_and_down(wide, *pair, flow is not None) for pair in moved), gap=12))
            rows.append(tile(WIDTH - 8, 20, "#b3b3b3", caption, caption))
            node_facts += [f"node {number} sent {out:,} bytes to other nodes and took {into:,}"
                           for number, (out, into) in enumerate(moved, first)]  # fmt: skip
        parts.append(below(*rows))
    if k > MOST_NODES:
        parts.append(phrase(f"the first {MOST_NODES} nodes are drawn; {k - MOST_NODES:,} are not", 12))
    kinds, facts = _wires(links, flow)
    by_axis, moved_facts = _by_axis(links, ledgers) if ledgers is not None else (space(0, 0), [])
    label = f"{head}: " + "; ".join([*facts, *(node_facts if flow else []), *moved_facts])
    return page(head, *parts, kinds, by_axis, label=label, gap=14)


def _up_and_down(width: float, sent: int, took: int, counted: bool) -> Panel:
    """The wire between a node of this width and the wire below it, with the bytes of both directions."""
    words = [f"up {bytes_text(sent)}", f"down {bytes_text(took)}"] if counted else []
    wire = Panel(32.0, 36.0, lambda x, y: line(x + 24, y, x + 24, y + 36, width=3))
    captions = below(*(phrase(caption, 12) for caption in words))
    return beside(wire, captions, space(width - wire.width - captions.width, 0))


def _node(
    links: Links, number: int, ranks: Sequence[int], width: float, per: int, flow: Flow | None, most: int
) -> Panel:
    """A node's name, its links and its ranks, `per` in a row; ranks that sent more are of a fuller blue."""
    whole, side = links.by_node[number], (width - 12) / per - 4
    inside = cut(_numbers(links, False), int((width - 16) / 6.6)) if len(whole) > 1 else ""
    cells = []
    for rank in ranks:
        sent = flow.sent(rank) if flow else 0
        hover = f"rank {rank} on node {number}" + f" sent {sent:,} bytes" * bool(flow)
        fill, name = shade(sent / most) if most else shade(0), f"rank {rank}" if side > 66 else rank
        amount = [phrase(bytes_text(sent), 11, anchor="middle", width=side)] if flow else []
        cells.append(below(tile(side, 18 if flow else 30, fill, name, hover), *amount))
    rows = [beside(*cells[first : first + per], gap=4) for first in range(0, len(cells), per)]
    if len(whole) > len(ranks):
        rows.append(phrase(f"and {len(whole) - len(ranks):,} more ranks", 12))
    return below(phrase(f"node {number}", bold=True), phrase(inside, 11), *rows, gap=5)


def _numbers(links: Links, between: bool) -> str:
    """The links inside or `between` nodes: `nvlink, 1.9 us, 450 GB/s`, or the number of kinds if there are several."""
    kinds = {link for (a, b), link in links.wires if (links.home[a] != links.home[b]) == between}
    if len(kinds) > 1:
        return f"{len(kinds)} kinds of link"
    link = kinds.pop()
    return f"{link.name}, {_latency(link)}, {metric_text(link.bytes_per_s, 'B/s')}"


def _latency(link: Link) -> str:
    return seconds_text(link.alpha_s) if link.alpha_s else "no latency"


def _crossed(links: Links, flow: Flow | None, node: Sequence[int]) -> tuple[int, int]:
    """(bytes of messages that left a node, bytes of messages that came to it)."""
    edges = flow.edges.items() if flow else ()
    out = sum(n for (a, b), (n, _) in edges if a in node and links.home[a] != links.home[b])
    return out, sum(n for (a, b), (n, _) in edges if b in node and links.home[a] != links.home[b])


def _wires(links: Links, flow: Flow | None) -> tuple[Panel, list[str]]:
    """A table of the kinds of link: number of edges, latency, bandwidth, and bytes that crossed or ranks joined; and
    the same facts in words."""
    kinds: dict[tuple[bool, Link], list[Edge]] = defaultdict(list)
    for (a, b), link in links.wires:
        kinds[links.home[a] != links.home[b], link].append((a, b))
    rows, facts = [], []
    for (between, link), edges in [*sorted(kinds.items(), key=lambda kind: (kind[0][0], -len(kind[1])))][:MOST_KINDS]:
        where = "between nodes" if between else "inside a node" if len(links.by_node) > 1 else "any two"
        name, speed = f"{where}: {link.name}", metric_text(link.bytes_per_s, "B/s")
        row = [cut(name, 32), f"{len(edges):,}", _latency(link), speed]
        facts.append(f"{name}, {row[1]} edges, {row[2]}, {speed}")
        if flow:
            crossed = {edge: flow.edges[edge][0] for edge in edges if edge in flow.edges}
            moved, busiest = bytes_text(sum(crossed.values())), "none"
            if crossed:
                a, b = max(crossed, key=crossed.__getitem__)
                busiest = f"{a} to {b}: {bytes_text(crossed[a, b])}"
            facts[-1] += f", {moved} crossed, {busiest}"
            row += [moved, busiest]
        else:
            row.append(", ".join(f"{a}–{b}" for a, b in edges if a < b) * (len(edges) <= 12))
        rows.append([*row[:-1], cut(row[-1], 24)])
    names = ("edges", "latency", "bandwidth", *(("bytes", "busiest edge") if flow else ("joins",)))
    columns = [Column("links"), *(Column(name, "end") for name in names)]
    cards = [trunk for trunk in links.trunks if trunk.name.startswith("node")]
    notes = [f"and {len(kinds) - MOST_KINDS} more kinds of link"] if len(kinds) > MOST_KINDS else []
    if cards:
        speed = metric_text(cards[0].bytes_per_s, "B/s")
        notes.append(f"the ranks of a node share its card: {speed} up, and as much down")
    drawn = [table(columns, rows, width=WIDTH - 8)] if rows else []
    return below(*drawn, *(phrase(note, 12) for note in notes), gap=3), facts


def _by_axis(links: Links, ledgers: Ledgers) -> tuple[Panel, list[str]]:
    """A table, axis by axis, of bytes that stayed inside nodes, that crossed between them, and that have no receiver;
    and the same facts in words."""
    axes, rows, facts = axes_of(ledgers), [], []
    for axis in (*axes, None) if len(axes) > 1 else axes:
        flow = Flow.of(ledgers, axis)
        between = sum(n for (a, b), (n, _) in flow.edges.items() if links.home[a] != links.home[b])
        inside = sum(n for n, _ in flow.edges.values()) - between
        backend = sum(flow.unplaced.values())
        share = f"{100 * between / (inside + between):.3g}% of messages" if inside + between else "no messages"
        name = axis or "all"
        rows.append((name, bytes_text(inside), bytes_text(between), bytes_text(backend), share))
        facts.append(f"{name}: {inside:,} bytes inside nodes, {between:,} between them, {backend:,} charged")
    nothing = [] if axes else [phrase("nothing was sent")]
    return below(table(BY_AXIS, rows, width=WIDTH - 8, total=len(axes) > 1), *nothing, gap=3), facts
