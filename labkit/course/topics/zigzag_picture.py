"""Which rank attends where under a causal mask, in order and in zigzag order, and how much work that gives each rank.

    in order, 2 ranks          zigzag             pairs of query and key, as a share of the mean
      keys  0 1 2 3             0 1 2 3           rank 0  ###            ######
    0       0                   0                 rank 1  #########      ######
    1       0 0                 1 1
    2       1 1 1               1 1 1             in each hop all wait for the slowest
    3       1 1 1 1             0 0 0 0

A row of squares is a chunk of queries, a column a chunk of keys; a number is the rank that computes that square. The
squares on the diagonal are half full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil

from labkit.parallel.blockwise_attention import Part
from labkit.view.panels import Panel, below, beside, page, phrase, space, tile
from labkit.view.svg import PALETTE, Picture, box, line, text
from labkit.view.units import plural

COLOURS = (PALETTE[0], PALETTE[1], PALETTE[2], PALETTE[3], PALETTE[4], PALETTE[6], PALETTE[7])
MOST = 8
SIDE = 288.0
"""Width and height of the square of all queries and keys, in units of the picture."""


def scores(queries: Part, keys: Part) -> int:
    """Pairs of a query and a key that it may see, under a causal mask: the key is the query's own, or before it."""
    return sum(min(max(at - run.start + 1, 0), len(run)) for own in queries for at in own for run in keys)


def work(parts: Sequence[Part]) -> list[list[int]]:
    """Pairs that each rank computes in each hop of a ring.   parts of n ranks -> [n hops][n ranks]

    In hop h rank r has the keys of rank r - h."""
    n = len(parts)
    return [[scores(parts[rank], parts[(rank - hop) % n]) for rank in range(n)] for hop in range(n)]


def slowest(parts: Sequence[Part]) -> float:
    """What a ring takes if every hop lasts as long as its slowest rank, over what equal work would take."""
    hops = work(parts)
    return sum(map(max, hops)) * len(parts) / sum(map(sum, hops))


def orders(ways: Mapping[str, Sequence[Part]], title: str = "") -> Picture:
    """A square of queries and keys for each of two orders, side by side, and the work of each rank below.

    `ways` has the parts of all ranks by the name of the order. ValueError for more than MOST ranks, and for other
    than two orders."""
    if len(ways) != 2 or len({len(parts) for parts in ways.values()}) != 1:
        raise ValueError(f"two orders of the same ranks stand side by side, got {', '.join(ways) or 'none'}")
    n = len(next(iter(ways.values())))
    if n > MOST:
        raise ValueError(f"{n} ranks are too many for this picture, which draws up to {MOST}")
    sides, facts = [], []
    for name, parts in ways.items():
        total, shares = slowest(parts), [sum(hops) for hops in zip(*work(parts), strict=True)]
        mean = sum(shares) / n
        facts.append(
            f"{name}: " + ", ".join(f"rank {rank} {share / mean:.2f}" for rank, share in enumerate(shares))
            + f" of the mean; hop by hop {total:.2f} times as long as equal work"
        )  # fmt: skip
        sides.append(below(
            phrase(name, bold=True),
            Panel(SIDE, SIDE, partial(_square, parts)),
            phrase("rows are queries, columns keys, first to last", 12, anchor="middle", width=SIDE),
            _bars([share / mean for share in shares], max(1.0, 2 - 1 / n)),
            phrase(f"a ring waits for the slowest in each hop: {total:.2f} times", 12, width=SIDE),
            gap=8,
        ))  # fmt: skip
    head = title or f"{plural(n, 'rank')}, causal: who computes which scores"
    return page(head, beside(*sides, gap=112).padded(left=32), label="; ".join([head, *facts]))


def _square(parts: Sequence[Part], left: float, top: float) -> str:
    """A square of 2n x 2n chunks: the rank that computes each."""
    length, chunks = sum(len(run) for part in parts for run in part), 2 * len(parts)
    owner = {at: rank for rank, part in enumerate(parts) for run in part for at in run}
    side, out = SIDE / chunks, []
    for row in range(chunks):
        rank = owner[ceil(row * length / chunks)]
        for column in range(row + 1):
            hover = f"queries of chunk {row}, keys of chunk {column}: rank {rank}"
            hover += ", half of the pairs" if row == column else ""
            at = (left + column * side, top + row * side)
            words = rank if side >= 17 else ""
            if row == column:
                out.append(_half(*at, side, COLOURS[rank % len(COLOURS)], hover))
            else:
                out.append(box(*at, side, side, COLOURS[rank % len(COLOURS)], words, hover))
    out.append(line(left, top, left + SIDE, top))
    out.append(line(left + SIDE, top, left + SIDE, top + SIDE))
    return "".join([*out, text(left + SIDE - 6, top + 18, "not seen", "end", 12)])


def _half(x: float, y: float, side: float, fill: str, hover: str) -> str:
    """The lower left half of a square."""
    path = f"M{x:g} {y:g}L{x + side:g} {y + side:g}L{x:g} {y + side:g}z"
    return f'<g><title>{hover}</title><path d="{path}" fill="{fill}" stroke="currentColor"/></g>'


def _bars(shares: Sequence[float], most: float) -> Panel:
    """A bar for each rank: its work over the mean."""
    rows = []
    for rank, share in enumerate(shares):
        hover = f"rank {rank}: {share:.2f} of the mean"
        bar = tile(190 * share / max(most, *shares), 16, COLOURS[rank % len(COLOURS)], "", hover)
        rows.append(beside(phrase(f"rank {rank}", 12, width=46), bar, space(6, 0), phrase(f"{share:.2f}", 12)))
    return below(*rows, gap=5)
