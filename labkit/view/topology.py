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
from labkit.view.places import Edge
from labkit.view.svg import WIDTH, Picture, box, cut, headline, line, shade, text, width_of
from labkit.view.units import bytes_text, metric_text, seconds_text

LEFT, TOP, ROW, HIGH, TOTAL = 70, 52, 34, 28, 92
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
    side = min(84.0, (WIDTH - LEFT - TOTAL - 12) / max(1, len(ranks)))
    last = LEFT + len(ranks) * side + 8
    body = [text(4, 20, "bytes sent, from row to column", size=14, bold=True)]
    body += [text(LEFT + k * side + side / 2 - 2, TOP - 8, f"to {b}", "middle") for k, b in enumerate(ranks)]
    body.append(text(last + TOTAL / 2, TOP - 8, "all sent", "middle", bold=True))
    titles = []
    for row, reply in enumerate(replies):
        a, y = reply.rank, TOP + row * ROW
        body.append(text(4, y + 19, f"rank {a}", bold=True))
        for column, b in enumerate(ranks):
            n_bytes, x = sent[a, b], LEFT + column * side
            if not n_bytes:
                body.append(box(x, y, side - 4, HIGH, "none", "·", f"rank {a} sent nothing to rank {b}"))
                continue
            title = f"rank {a} sent {n_bytes:,} bytes to rank {b}"
            body.append(box(x, y, side - 4, HIGH, shade(n_bytes / most), bytes_text(n_bytes), title))
            titles.append(title)
        total = reply.ledger.sent_bytes()
        body.append(box(last, y, TOTAL, HIGH, "none", bytes_text(total), f"rank {a} sent {total:,} bytes in all"))
    charged = sum(reply.ledger.charged_bytes() for reply in replies)
    label = f"bytes sent between {len(ranks)} ranks: {'; '.join(titles) or 'no messages'}"
    bottom, wide = TOP + 4.0 + ROW * len(ranks), max(300.0, last + TOTAL + 4)
    if charged:
        note = f"{bytes_text(charged)} of all sent charged by a ring's law, not counted"
        body.append(text(4, bottom + 12, note, size=11))
        bottom, wide, label = bottom + 20, max(wide, width_of(note, 11) + 12), f"{label}; {note}"
    return Picture("".join(body), bottom, label, wide)


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
    body = [headline(head)]
    most = max((flow.sent(rank) for rank in range(n)), default=0) if flow else 0
    across = min(COLUMNS, k)
    wide = (WIDTH - 8 - 12 * (across - 1)) / across
    per = max(1, int((wide - 16) // (72 if flow else 44)))
    shown = [node[:MOST_RANKS] for node in nodes[:MOST_NODES]]
    tall = (
        44 + 40 * max(-(-len(node) // per) for node in shown) + (18 if any(len(x) > MOST_RANKS for x in nodes) else 0)
    )
    y, node_facts = 36.0, []
    for first in range(0, len(shown), across):
        for column, ranks in enumerate(shown[first : first + across]):
            number, x = first + column, 4 + column * (wide + 12)
            body += _node(links, number, ranks, (x, y, wide, tall), per, flow, most)
            if k > 1:
                out, into = _crossed(links, flow, nodes[number])
                body.append(line(x + 24, y + tall, x + 24, y + tall + 36, width=3))
                for row, caption in enumerate((f"up {bytes_text(out)}", f"down {bytes_text(into)}") if flow else ()):
                    body.append(text(x + 32, y + tall + 14 + 15 * row, caption, size=12))
                node_facts.append(f"node {number} sent {out:,} bytes to other nodes and took {into:,}")
        y += tall + (36 if k > 1 else 10)
        if k > 1:
            caption = f"between nodes: {_numbers(links, True)}"
            body.append(box(4, y, WIDTH - 8, 20, "#b3b3b3", caption, caption))
            y += 34
    if k > MOST_NODES:
        body.append(text(4, y + 12, f"the first {MOST_NODES} nodes are drawn; {k - MOST_NODES:,} are not", size=12))
        y += 20
    rows, y, words = _wires(links, flow, y + 14)
    table, y, moved = _by_axis(links, ledgers, y) if ledgers is not None else ([], y, [])
    label = f"{head}: " + "; ".join([*words, *(node_facts if flow else []), *moved])
    return Picture("".join([*body, *rows, *table]), y + 10, label)


def _node(
    links: Links,
    number: int,
    ranks: Sequence[int],
    frame: tuple[float, float, float, float],
    per: int,
    flow: Flow | None,
    most: int,
) -> list[str]:
    """A node's frame, its links and its ranks; ranks that sent more are of a fuller blue."""
    (x, y, wide, tall), whole = frame, links.by_node[number]
    out = [box(x, y, wide, tall), text(x + 8, y + 18, f"node {number}", bold=True)]
    if len(whole) > 1:
        out.append(text(x + 8, y + 34, cut(_numbers(links, False), int((wide - 16) / 6.6)), size=11))
    pitch = (wide - 12) / per
    for place, rank in enumerate(ranks):
        a, b = x + 8 + place % per * pitch, y + 42 + place // per * 40
        sent = flow.sent(rank) if flow else 0
        hover = f"rank {rank} on node {number}" + f" sent {sent:,} bytes" * bool(flow)
        fill = shade(sent / most) if most else shade(0)
        out.append(box(a, b, pitch - 4, 18 if flow else 30, fill, f"rank {rank}" if pitch > 70 else rank, hover))
        if flow:
            out.append(text(a + pitch / 2 - 2, b + 31, bytes_text(sent), "middle", 11))
    if len(whole) > len(ranks):
        out.append(text(x + 8, y + tall - 6, f"and {len(whole) - len(ranks):,} more ranks", size=12))
    return out


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


def _wires(links: Links, flow: Flow | None, y: float) -> tuple[list[str], float, list[str]]:
    """A table of the kinds of link: number of edges, latency, bandwidth, and bytes that crossed or ranks joined.

    Returns (elements, the height below, facts in words)."""
    kinds: dict[tuple[bool, Link], list[Edge]] = defaultdict(list)
    for (a, b), link in links.wires:
        kinds[links.home[a] != links.home[b], link].append((a, b))
    cards = [trunk for trunk in links.trunks if trunk.name.startswith("node")]
    columns = ((4.0, "links", "start"), (300.0, "edges", "end"), (400.0, "latency", "end"), (520.0, "bandwidth", "end"),
               (625.0, "bytes" if flow else "", "end"),
               (WIDTH - 4.0, "busiest edge" if flow else "joins", "end"))  # fmt: skip
    out = [text(x, y, word, anchor, bold=True) for x, word, anchor in columns if word] if kinds else []
    out += [line(4, y + 6, WIDTH - 4, y + 6)] if kinds else []
    facts = []
    for (between, link), edges in [*sorted(kinds.items(), key=lambda kind: (kind[0][0], -len(kind[1])))][:MOST_KINDS]:
        y += 20
        where = "between nodes" if between else "inside a node" if len(links.by_node) > 1 else "any two"
        name, moved, last = (
            f"{where}: {link.name}",
            "",
            ", ".join(f"{a}–{b}" for a, b in edges if a < b) * (len(edges) <= 12),
        )
        if flow:
            crossed = {edge: flow.edges[edge][0] for edge in edges if edge in flow.edges}
            moved, last = bytes_text(sum(crossed.values())), "none"
            if crossed:
                a, b = max(crossed, key=crossed.__getitem__)
                last = f"{a} to {b}: {bytes_text(crossed[a, b])}"
        speed = metric_text(link.bytes_per_s, "B/s")
        cells = (cut(name, 32), f"{len(edges):,}", _latency(link), speed, moved, cut(last, 24))
        out += [text(x, y, cell, anchor) for (x, _, anchor), cell in zip(columns, cells, strict=True) if cell]
        facts.append(f"{name}, {cells[1]} edges, {cells[2]}, {speed}" + (f", {moved} crossed, {last}" if flow else ""))
    if len(kinds) > MOST_KINDS:
        out.append(text(4, y := y + 19, f"and {len(kinds) - MOST_KINDS} more kinds of link", size=12))
    if cards:
        speed = metric_text(cards[0].bytes_per_s, "B/s")
        out.append(text(4, y := y + 20, f"the ranks of a node share its card: {speed} up, and as much down", size=12))
    return out, y + 30 if kinds else y, facts


def _by_axis(links: Links, ledgers: Ledgers, y: float) -> tuple[list[str], float, list[str]]:
    """A table, axis by axis, of bytes that stayed inside nodes, that crossed between them, and that have no receiver.

    Returns (elements, the height below, facts in words)."""
    columns = ((4.0, "bytes by axis", "start"), (330.0, "inside nodes", "end"), (450.0, "between", "end"),
               (590.0, "charged", "end"), (610.0, "crossed", "start"))  # fmt: skip
    out = [text(x, y, word, anchor, bold=True) for x, word, anchor in columns] + [line(4, y + 6, WIDTH - 4, y + 6)]
    axes, facts = axes_of(ledgers), []
    for axis in (*axes, None) if len(axes) > 1 else axes:
        flow = Flow.of(ledgers, axis)
        between = sum(n for (a, b), (n, _) in flow.edges.items() if links.home[a] != links.home[b])
        inside = sum(n for n, _ in flow.edges.values()) - between
        backend, y = sum(flow.unplaced.values()), y + 20
        share = f"{100 * between / (inside + between):.3g}% of messages" if inside + between else "no messages"
        cells = (axis or "all", bytes_text(inside), bytes_text(between), bytes_text(backend), share)
        out += [text(x, y, c, anchor, bold=axis is None) for (x, _, anchor), c in zip(columns, cells, strict=True)]
        facts.append(f"{cells[0]}: {inside:,} bytes inside nodes, {between:,} between them, {backend:,} charged")
    if not axes:
        out.append(text(4, y := y + 20, "nothing was sent"))
    return out, y, facts
