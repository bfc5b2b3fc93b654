"""A router and what its choice costs: rows by expert, rows by rank, who waits for whom, and the bytes on the wire.

    rows by expert     |##|      |##|  -- mean      each bar is an expert, in the colour of the rank that holds it;
                       |##||##|  |##||##|           what stands above the capacity is dropped
                        e0  e1    e2  e3
    a layer in time    rank 0  [======== 412 rows ========]
                       rank 1  [== 100 rows ==][ waits    ]   all leave together: combine needs everybody

It draws rows that a router has chosen (`unfair_router.choose`), and nothing that was not counted.
"""

from __future__ import annotations

from functools import partial

from labkit.course.topics.unfair_router import Routing
from labkit.view.panels import Column, Panel, below, beside, over, page, phrase, rule, sample, table, tile
from labkit.view.svg import PALETTE, WIDTH, Picture, width_of
from labkit.view.units import bytes_text, plural

RANKS = (PALETTE[0], PALETTE[1], PALETTE[2], PALETTE[3], PALETTE[4], PALETTE[7], PALETTE[6], "#8FB8DE")
"""A colour for each rank; dark words can be read on all of them."""
MOST = 32
"""The most experts that a picture has."""
HIGH, LANE = 128.0, 556.0
"""The height of the highest bar, and the length of the longest lane."""


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
    experts, tellings = _experts(routing)
    lanes, lane_tellings = _lanes(routing, row_bytes, slowest)
    label = "; ".join([claim, facts, *tellings, *lane_tellings])
    return page(claim, phrase(facts, 12), experts, lanes, label=label, gap=16)


def _experts(routing: Routing) -> tuple[Panel, list[str]]:
    """A bar for each expert, and the same in words."""
    n, loads = routing.n_ranks, routing.by_expert
    wanted = [sum(rows) for rows in zip(*routing.wanted, strict=True)]
    mean = sum(wanted) / len(wanted)
    most, per_rank = max([*wanted, routing.room or 0, 1]), len(loads) // n
    gap = 10.0 if n > 1 else 0.0
    wide = (WIDTH - 8 - gap * (n - 1)) / len(loads)
    keys = [phrase("rows by expert", bold=True), beside(sample(26, 1, "5 3"), phrase(f"mean {mean:,.0f}", 12), gap=6)]
    if routing.room is not None:
        keys.append(beside(sample(26, 2, "1 3"), phrase(f"room {routing.room:,}", 12), gap=6))
        keys.append(beside(Panel(14, 12, lambda x, y: _pale(x, y, 14, 12)), phrase("dropped", 12), gap=6))
    bars, tellings = [], []
    for expert, (rows, asked) in enumerate(zip(loads, wanted, strict=True)):
        rank = expert // per_rank
        hover = f"expert {expert} on rank {rank}: {plural(rows, 'row')}"
        tellings.append(hover + f", {asked - rows:,} dropped" * (asked > rows))
        high, above = max(HIGH * rows / most, 0.5), HIGH * (asked - rows) / most
        pale = [Panel(wide - 2, above, partial(_pale, w=wide - 2, h=above))] if above else []
        bar = below(*pale, tile(wide - 2, high, RANKS[rank % len(RANKS)], "", tellings[-1]))
        named = wide >= 34 or expert % 2 == 0  # names of narrow bars would run together
        names = (phrase(words * named, 11, anchor="middle", width=wide) for words in (f"e{expert}", f"{rows:,}"))
        spread = gap if rank and expert % per_rank == 0 else 0.0
        bars.append(below(bar.padded(left=1, top=HIGH - bar.height), *names).padded(left=spread))
    levels = [(mean, "5 3", 1.0), (routing.room, "1 3", 2.0), (0.0, "", 1.0)]
    lines = [rule(WIDTH - 8, width, dash).padded(top=HIGH * (1 - height / most) - 0.5)
             for height, dash, width in levels if height is not None]  # fmt: skip
    return below(beside(*keys, gap=20), over(beside(*bars, top=True), *lines), gap=12), tellings


def _pale(x: float, y: float, w: float, h: float) -> str:
    """Dropped rows: an empty box with a dashed edge."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="none" stroke="currentColor" '
        'stroke-dasharray="2 2"/>'
    )


def _lanes(routing: Routing, row_bytes: int, slowest: int) -> tuple[Panel, list[str]]:
    """A lane for each rank: its rows as a length of time, then the wait; and its bytes. And the same in words."""
    lanes, tellings, longest = [], [], max(*routing.by_rank, 1)
    for rank, (count, n_bytes) in enumerate(zip(routing.by_rank, routing.sent(row_bytes), strict=True)):
        wide, words = LANE * count / longest, plural(count, "row")
        telling = f"rank {rank}: {words}, sends {bytes_text(n_bytes)}"
        fits = width_of(words, 12) + 8 < wide
        lane = [tile(max(wide, 0.5), 22, RANKS[rank % len(RANKS)], words if fits else "", telling)]
        if count < longest:
            share = 1 - count / longest
            wait = f"waits {share:.0%} of it for rank {slowest}"
            inside = next((w for w in (wait, f"waits {share:.0%}") if width_of(w) + 8 < LANE - wide), "")
            lane.append(tile(LANE - wide, 22, "none", inside, f"rank {rank} {wait}"))
            telling += f", {wait}"
        lanes.append((phrase(f"rank {rank}", bold=rank == slowest), beside(*lane), bytes_text(n_bytes)))
        tellings.append(telling)
    head = phrase("the experts' part of a layer, in time", bold=True)
    sent = phrase("sent, there and back", 12, anchor="end", width=WIDTH - 8)
    columns = (Column(width=56), Column(width=LANE), Column(anchor="end", width=WIDTH - LANE - 72))
    return below(over(head, sent), table(columns, lanes, gap=4, lead=5), gap=4), tellings
