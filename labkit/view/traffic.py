"""A collective as a graph: the ranks, and what crossed each edge between them, from the ledgers of a real run.

    traffic([ledger of rank 0, ledger of rank 1, ...], law=[bytes that rank 0 should send, ...])

    ring    0 -> 1        every edge as hot as any other       2(n-1)/n N each
            ^    |
            3 <- 2
    star    1 = 0 = 2     the middle takes part in everything  (n-1) N sent by rank 0, as much taken
                3

The picture is drawn from the messages, whatever the algorithm is called, so a learner's own collective looks like what
it did. Width and number of an arrow give its bytes; the table beside it has the bytes that each rank sent and received,
next to the law. (Laws: labkit.plan.machine.collectives; Thakur, Rabenseifner and Gropp 2005, section 4.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from labkit.plan.machine.collectives import sent_bytes
from labkit.view.flow import Flow, Ledgers
from labkit.view.panels import Column, Panel, below, beside, phrase, sample, space, table
from labkit.view.places import RankArea, Spot, places
from labkit.view.strokes import Stroke
from labkit.view.svg import INK, Picture, Room, cut, headline, shade, text, width_of
from labkit.view.units import apart, bytes_text, plural

NUMBERED, LABELLED, MOST_EDGES, MOST_ROWS = 64, 16, 2000, 9
"""The most ranks that show their number, the most ranks with words on their edges, the most edges that are drawn, and
the most rows of a table."""
RIGHT = 522.0
"""The left end of the tables."""


def traffic(
    ledgers: Ledgers,
    law: Sequence[float] | None = None,
    title: str = "who sent how much to whom",
    axis: str | None = None,
    nodes: Sequence[Sequence[int]] | None = None,
) -> Picture:
    """The ranks as a graph, each arrow with the bytes and messages that crossed it, each rank beside its law.

    `ledgers` are `group.ledger` of ranks 0, 1, ... (or replies); `law` is the bytes that each of them should send;
    `nodes` puts the ranks of a node in a row. ValueError for no ledgers, for ledgers of several ranks without any
    transfer, and for a law for another number of ranks."""
    flow = Flow.of(ledgers, axis)
    n = len(flow.ranks)
    if law is not None and len(law) != n:
        raise ValueError(f"the law names the bytes of {len(law)} ranks, the ledgers are of {n}: one number for each")
    if n > 1 and not flow.edges and not flow.unplaced:
        where = f" along {axis}" if axis else ""
        raise ValueError(f"the ledgers of {n} ranks hold no transfers{where}: run a collective first")
    half = 18.0 if n <= LABELLED else 9.5 if n <= NUMBERED else 3.0
    frame = RankArea(8, 62, 510, 190 if n < 3 else 480 if n <= 32 else 560, half)
    shape, spots = places(flow.ranks, flow.edges, RankArea(8, 62, 792, 400, half) if n > 32 else frame)
    wide = n > 32 and shape == "tree"
    if not wide:
        shape, spots = places(flow.ranks, flow.edges, frame, nodes)
    summary = _said(flow)
    body = [headline(title), text(4, 42, summary)]
    body += _arrows(flow, spots, half) + _ranks(flow, spots, half)
    tables = (
        beside(_table(flow, law), _kinds(flow), gap=52, top=True)
        if wide
        else below(_table(flow, law), _kinds(flow), gap=16)
    )
    left, top = (4.0, 412.0) if wide else (RIGHT, 62.0)
    label = f"{title}: {plural(n, 'rank')} as a {shape}; {summary}; " + "; ".join(
        f"rank {a} to rank {b} {n_bytes:,} bytes in {_messages(many)}"
        for (a, b), (n_bytes, many) in [*flow.edges.items()][:64]
    )
    bottom = max(frame.bottom * (not wide), top + tables.height)
    return Picture("".join([*body, tables.draw(left, top)]), bottom + 10, label)


def beside_law(
    ledgers: Ledgers, algorithm: str, verb: str, n_bytes: int, item_bytes: int = 1, title: str = ""
) -> Picture:
    """`traffic` with the law of one "ring", "tree" or "star" collective on a tensor of `n_bytes` in all.

    The ledgers should hold that collective only. ValueError as for `sent_bytes` and `traffic`."""
    n = len(ledgers)
    law = [sent_bytes(algorithm, verb, n, n_bytes, rank, item_bytes) for rank in range(n)]
    return traffic(ledgers, law, title or f"{algorithm} {verb} of {bytes_text(n_bytes)} on {n} ranks")


def _said(flow: Flow) -> str:
    """The traffic in one sentence: the number of edges, and the ranks that send and receive most."""
    if not flow.edges:
        total = sum(flow.unplaced.values())
        if not total:
            return "a world of one: no edge"
        return f"{bytes_text(total)} charged by the law of a ring: the backend does not say what it sent, nor whom to"
    sizes = {n_bytes for n_bytes, _ in flow.edges.values()}
    n = len(flow.edges)
    count = plural(n, "edge")
    through = {rank: flow.through(rank) for rank in flow.ranks}
    most, mean = max(through.values()), sum(through.values()) / len(through)
    if most == min(through.values()):
        same = f"{'both edges' if n == 2 else count} carry {bytes_text(sizes.pop())} each" if len(sizes) == 1 else count
        return f"{same}; every rank sends and takes the same: none is hotter than another"
    hottest = [rank for rank, n_bytes in through.items() if n_bytes == most]
    names = f"rank {hottest[0]} is" if len(hottest) == 1 else f"ranks {cut(_runs(hottest), 24)} are"
    times = f"{most / mean:.3g}"
    beside = f"{times} times the mean of all ranks" if times != "1" else "hardly more than the mean of all ranks"
    return f"{count}; {names} hottest: {bytes_text(most)} sent and taken, {beside}"


def _ranks(flow: Flow, spots: Mapping[int, Spot], half: float) -> list[str]:
    """A disc for each rank, of a fuller blue the more it sends and receives; those with most have a thick edge."""
    through = {rank: flow.through(rank) for rank in flow.ranks}
    most, uneven = max(through.values()) or 1, len(set(through.values())) > 1
    out = []
    for rank, (x, y) in spots.items():
        hover = f"rank {rank} sent {flow.sent(rank):,} bytes and took {flow.took(rank):,}"
        edge = 3 if uneven and through[rank] == most else 1
        disc = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{half:g}" fill="{shade(through[rank] / most)}" '
        disc += f'stroke="currentColor" stroke-width="{edge}"/>'
        size = 13 if half > 12 else 11
        word = f'<text x="{x:.1f}" y="{y + 0.36 * size:.1f}" text-anchor="middle" font-size="{size}" fill="{INK}">'
        out.append(f"<g><title>{hover}</title>{disc}{f'{word}{rank}</text>' if half > 5 else ''}</g>")
    return out


def _arrows(flow: Flow, spots: Mapping[int, Spot], half: float) -> list[str]:
    """The arrows, heaviest first. Two directions that carry the same share their words; among many ranks, one line."""
    most = max((n_bytes for n_bytes, _ in flow.edges.values()), default=0) or 1
    heavy = sorted(flow.edges.items(), key=lambda edge: (-edge[1][0], edge[0]))[:MOST_EDGES]
    few, strokes, marks = len(spots) <= LABELLED, [], []
    for (a, b), (n_bytes, messages) in heavy:
        twin = flow.edges.get((b, a))
        alike = twin == (n_bytes, messages)
        hover = f"rank {a} to rank {b}: {n_bytes:,} bytes in {_messages(messages)}" + ", each way" * alike
        others = [spot for rank, spot in spots.items() if rank not in (a, b)] if len(spots) <= NUMBERED else ()
        stroke = middle = Stroke.between(spots[a], spots[b], half + 1, 0.0, others)
        if few or not alike:
            stroke = Stroke.between(spots[a], spots[b], half + 1, 5.0 if twin else 0.0, others)
            strokes.append(stroke.svg(1.2 + 3.3 * n_bytes / most if few else 0.8, hover))
        elif a < b:
            strokes.append(middle.svg(0.8, hover, head=False))
        if few and (a < b or not alike):
            parts = (bytes_text(n_bytes), f" · {messages} msg", " each way" * alike)
            marks.append((middle if alike else stroke, parts, shade(n_bytes / most), hover))
    taken = tuple((x - half, y - half, 2 * half, 2 * half) for x, y in spots.values())
    # all labels get the longest form at which all fit; of the shortest, those that do not fit are left out
    for length in (3, 2, 1):
        room, plates = Room(2, 48, 514, 486, taken), []
        for mark, parts, fill, hover in marks:
            words = "".join(parts[:length])
            wide = width_of(words, 11) + 6
            along = map(mark.at, (0.5, 0.4, 0.6, 0.3, 0.7, 0.22, 0.78))
            if corner := room.first([(x - wide / 2, y - 8) for x, y in along], wide, 16):
                plates.append(_plate(*corner, wide, words, fill, hover))
        if len(plates) == len(marks):
            break
    return [*strokes, *plates]


def _plate(x: float, y: float, wide: float, words: str, fill: str, hover: str) -> str:
    """Dark words on a light ground, which covers the lines below them."""
    ground = f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="16" rx="3" fill="{fill}"/>'
    label = f'<text x="{x + wide / 2:.1f}" y="{y + 12:.1f}" text-anchor="middle" font-size="11" fill="{INK}">{words}'
    return f"<g><title>{hover}</title>{ground}{label}</text></g>"


def _table(flow: Flow, law: Sequence[float] | None) -> Panel:
    """A table of bytes with one row for all ranks that sent and received the same; below it, in words, where the bytes
    sent differ from the law."""
    alike: dict[tuple[int, float | None, int], list[int]] = defaultdict(list)
    for place, rank in enumerate(flow.ranks):
        alike[flow.sent(rank), None if law is None else law[place], flow.took(rank)].append(rank)
    names = ("sent", "took") if law is None else ("sent", "law", "took")
    columns = [Column("ranks"), *(Column(name, "end") for name in names)]
    rows: list[list[str | Panel]] = []
    off = []
    for (sent, should, took), ranks in [*alike.items()][:MOST_ROWS]:
        who = _runs(ranks) if len(_runs(ranks)) < 9 else f"{len(ranks)} ranks"
        numbers = (sent, took) if should is None else (sent, should, took)
        rows.append([phrase(who).told(f"ranks {_runs(ranks)}"), *map(bytes_text, numbers)])
        if should is not None and should != sent:
            off.append(f"{who}: law {apart(should, sent)}")
    notes = []
    if len(alike) > MOST_ROWS:
        notes.append(f"and {sum(len(ranks) for ranks in [*alike.values()][MOST_ROWS:])} more ranks")
    if law is not None and off:
        notes += off[:4]
    elif law is not None:
        charged = flow.unplaced and not flow.edges
        notes.append("charged by that law, and not counted" if charged else "every rank sent what the law says")
    if flow.unplaced and flow.edges:
        notes.append(f"{bytes_text(sum(flow.unplaced.values()))} charged, not counted: the backend's")
    return _with_notes(columns, rows, notes)


def _kinds(flow: Flow) -> Panel:
    """A table of the number of edges with the same bytes and messages."""
    if not flow.edges:
        return space(0, 0)
    most = max(n_bytes for n_bytes, _ in flow.edges.values()) or 1
    kinds = sorted(Counter(flow.edges.values()).items(), reverse=True)
    columns = [Column("edges", width=66), Column("bytes, each", "end"), Column("messages", "end")]
    rows: list[list[str | Panel]] = [
        [beside(sample(26, 1.2 + 3.3 * n_bytes / most), phrase(count), gap=8), bytes_text(n_bytes), f"{messages}"]
        for (n_bytes, messages), count in kinds[:MOST_ROWS]
    ]
    notes = []
    if len(kinds) > MOST_ROWS:
        notes.append(f"and {len(kinds) - MOST_ROWS} more kinds of edge")
    if len(flow.edges) > MOST_EDGES:
        notes.append(f"the heaviest {MOST_EDGES:,} edges are drawn")
    if len(flow.ranks) > LABELLED and any(flow.edges.get((b, a)) == n for (a, b), n in flow.edges.items()):
        notes.append("a line without a head: both ways alike")
    return _with_notes(columns, rows, notes)


def _with_notes(columns: Sequence[Column], rows: Sequence[Sequence[str | Panel]], notes: Sequence[str]) -> Panel:
    """A table of 274 units, and lines of words below it."""
    return below(table(columns, rows, gap=6, width=274), *(phrase(cut(words, 40), 12) for words in notes), gap=3)


def _runs(ranks: Sequence[int]) -> str:
    """The names of ranks, `0`, `1–7`, `1, 3, 5`, with the ends of runs only."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _messages(count: int) -> str:
    return plural(count, "message")
