"""A router and what its choice costs: rows by expert, rows by rank, who waits for whom, and the bytes on the wire.

    rows by expert     |##|      |##|  -- mean      each bar is an expert, in the colour of the rank that holds it;
                       |##||##|  |##||##|           what stands above the capacity is dropped
                        e0  e1    e2  e3
    a layer in time    rank 0  [======== 412 rows ========]
                       rank 1  [== 100 rows ==][ waits    ]   all leave together: combine needs everybody

It draws rows that a router has chosen (`unfair_router.choose`), and nothing that was not counted.
"""

from __future__ import annotations

from labkit.course.topics.unfair_router import Routing
from labkit.view.svg import PALETTE, WIDTH, Picture, box, headline, line, text, width_of
from labkit.view.units import bytes_text, plural

RANKS = (PALETTE[0], PALETTE[1], PALETTE[2], PALETTE[3], PALETTE[4], PALETTE[7], PALETTE[6], "#8FB8DE")
"""A colour for each rank; dark words can be read on all of them."""
MOST = 32
"""The most experts that a picture has."""
TOP, HIGH, LANE, LEFT, END = 92.0, 128.0, 27.0, 64.0, 620.0


def router(routing: Routing, row_bytes: int = 8192, title: str = "") -> Picture:
    """Rows by expert, and the layer in time with who waits for whom. `row_bytes`: of one row on the wire.

    ValueError for more experts than MOST."""
    rows, slowest = routing.by_rank, routing.by_rank.index(max(routing.by_rank))
    wait = 1 - 1 / routing.imbalance
    n_expert = len(routing.kept[0])
    if n_expert > MOST:
        raise ValueError(f"{n_expert} experts are too many for this picture, which draws up to {MOST}")
    how = "dropless" if routing.capacity is None else f"capacity {routing.capacity:g}"
    head = title or f"{n_expert} experts on {plural(len(rows), 'rank')}, {routing.top_k} a token, {how}"
    verdict = f"rank {slowest} has {routing.imbalance:.2f} times the mean" if len(rows) > 1 else "one rank has all"
    claim = f"{head}: {verdict}"
    total = sum(map(sum, routing.wanted))
    facts = f"{plural(total, 'row')} chosen, {routing.dropped:,} dropped ({routing.dropped / max(1, total):.1%})"
    if len(rows) > 1:
        facts += f"; on average {wait:.0%} of the experts' time is waiting"
    body = [headline(claim), text(4, 42, facts, size=12)]
    drawn, tellings = _experts(routing)
    lanes, lane_tellings, bottom = _lanes(routing, row_bytes, slowest)
    return Picture("".join([*body, *drawn, *lanes]), bottom, "; ".join([claim, facts, *tellings, *lane_tellings]))


def _experts(routing: Routing) -> tuple[list[str], list[str]]:
    """A bar for each expert, and the same in words."""
    n, loads = routing.n_ranks, routing.by_expert
    wanted = [sum(rows) for rows in zip(*routing.wanted, strict=True)]
    mean = sum(wanted) / len(wanted)
    most, per_rank = max([*wanted, routing.room or 0, 1]), len(loads) // n
    gap = 10.0 if n > 1 else 0.0
    wide = (WIDTH - 8 - gap * (n - 1)) / len(loads)
    bottom = TOP + HIGH
    out = [text(4, TOP - 24, "rows by expert", bold=True), line(132, TOP - 28, 158, TOP - 28, "5 3")]
    out.append(text(164, TOP - 24, f"mean {mean:,.0f}", size=12))
    if routing.room is not None:
        out += [line(262, TOP - 28, 288, TOP - 28, "1 3", 2), text(294, TOP - 24, f"room {routing.room:,}", size=12)]
        out += [_pale(400, TOP - 34, 14, 12), text(420, TOP - 24, "dropped", size=12)]
    tellings = []
    for expert, (rows, asked) in enumerate(zip(loads, wanted, strict=True)):
        rank = expert // per_rank
        x = 4 + expert * wide + rank * gap
        high, above = HIGH * rows / most, HIGH * (asked - rows) / most
        hover = f"expert {expert} on rank {rank}: {plural(rows, 'row')}" + f", {asked - rows:,} dropped" * (
            asked > rows
        )
        if above:
            out.append(_pale(x + 1, bottom - high - above, wide - 2, above))
        out.append(box(x + 1, bottom - high, wide - 2, max(high, 0.5), RANKS[rank % len(RANKS)], "", hover))
        if wide >= 34 or expert % 2 == 0:  # names of narrow bars would run together
            out += [text(x + wide / 2, bottom + 14, f"e{expert}", "middle", 11)]
            out += [text(x + wide / 2, bottom + 28, f"{rows:,}", "middle", 11)]
        tellings.append(hover)
    for height, dash, width in ((mean, "5 3", 1), (routing.room, "1 3", 2)):
        if height is not None:
            y = bottom - HIGH * height / most
            out.append(line(4, y, WIDTH - 4, y, dash, width))
    return [*out, line(4, bottom, WIDTH - 4, bottom)], tellings


def _pale(x: float, y: float, w: float, h: float) -> str:
    """Dropped rows: an empty box with a dashed edge."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="none" stroke="currentColor" '
        'stroke-dasharray="2 2"/>'
    )


def _lanes(routing: Routing, row_bytes: int, slowest: int) -> tuple[list[str], list[str], float]:
    """A lane for each rank: its rows as a length of time, then the wait; and its bytes. Elements, words, the height."""
    rows, sent = routing.by_rank, routing.sent(row_bytes)
    y = TOP + HIGH + 62
    out = [text(4, y, "the experts' part of a layer, in time", bold=True)]
    out.append(text(WIDTH - 4, y, "sent, there and back", "end", 12))
    tellings, longest = [], max(*rows, 1)
    y += 10
    for rank, (count, n_bytes) in enumerate(zip(rows, sent, strict=True)):
        wide = (END - LEFT) * count / longest
        words = plural(count, "row")
        hover = f"rank {rank}: {words}, sends {bytes_text(n_bytes)}"
        share = 1 - count / longest
        out.append(text(4, y + 16, f"rank {rank}", bold=rank == slowest))
        fits = width_of(words, 12) + 8 < wide
        out.append(box(LEFT, y, max(wide, 0.5), LANE - 5, RANKS[rank % len(RANKS)], words if fits else "", hover))
        if share > 0:
            wait = f"waits {share:.0%} of it for rank {slowest}"
            room = END - LEFT - wide
            inside = next((w for w in (wait, f"waits {share:.0%}") if width_of(w) + 8 < room), "")
            out.append(box(LEFT + wide, y, room, LANE - 5, "none", inside, f"rank {rank} {wait}"))
            hover += f", {wait}"
        out.append(text(WIDTH - 4, y + 16, bytes_text(n_bytes), "end"))
        tellings.append(hover)
        y += LANE
    return out, tellings, y + 6
