"""What each rank holds of a matrix before and after a redistribution, and what it sends for that.

from S(0)     [##]  [  ]        rank 0 holds the upper half, rank 1 the lower one
              [  ]  [##]
to R          [##]  [##]        all_gather: each rank sends (n-1) chunks
              [##]  [##]
"""

from __future__ import annotations

from functools import partial

from labkit.plan.pocket.redistribution import chunk, redistribution
from labkit.view.panels import Panel, below, beside, page, phrase
from labkit.view.svg import PALETTE, Picture, box, striped
from labkit.view.units import bytes_text, plural

MOST = 8
"""Ranks that are drawn."""
SIDE = 72.0
"""Height of a matrix, in units of the picture."""


def placements(shape: tuple[int, int], n: int, before: str, after: str, word: int, on_cpu: bool = False) -> Picture:
    """Both placements of a matrix on up to MOST ranks, and the law of the way from one to the other.

    ValueError for a redistribution that torch refuses, and for a matrix without elements."""
    if min(shape) < 1:
        raise ValueError(f"a matrix has at least one row and one column, got {shape[0]} x {shape[1]}")
    move = redistribution(before, after, shape, n, word, on_cpu=on_cpu)
    drawn = min(n, MOST)
    rows = []
    for title, placement in (("from", before), ("to", after)):
        ranks = [
            below(Panel(SIDE, SIDE, partial(_matrix, shape, n, placement, rank)), phrase(f"rank {rank}", 12), gap=3)
            for rank in range(drawn)
        ]
        rows.append(beside(phrase(f"{title} {placement}", bold=True, width=92), *ranks, gap=10))
    n_bytes = f"{move.verb}: each rank sends {bytes_text(move.sent_bytes)}" if move.verb else "nothing is sent"
    size = f"{shape[0]:,} x {shape[1]:,} of {word} bytes an element: {bytes_text(shape[0] * shape[1] * word)} in all"
    head = f"{before} to {after} on {plural(n, 'rank')}, {'CPUs' if on_cpu else 'GPUs'}: {n_bytes}"
    footnote = [phrase(f"the first {drawn} of {n} ranks", 12)] if drawn < n else []
    return page(head, below(*rows, phrase(size, 12), *footnote, gap=12), label=f"{head}; {size}")


def _matrix(shape: tuple[int, int], n: int, placement: str, rank: int, left: float, top: float) -> str:
    """A square that stands for the matrix, with the part that a rank holds; an addend of a sum is striped."""
    outline = box(left, top, SIDE, SIDE, "none", "", "the matrix")
    if placement == "P(sum)":
        return outline + striped(
            left, top, SIDE, SIDE, (PALETTE[1], PALETTE[2]) * 4, "+", f"rank {rank}: an addend of every element"
        )
    x, y, w, h, hover = left, top, SIDE, SIDE, f"rank {rank}: all of it"
    if placement != "R":
        dim = int(placement[2])
        first, length = chunk(shape[dim], n, rank)
        start, extent = SIDE * first / shape[dim], SIDE * length / shape[dim]
        x, y, w, h = (left, top + start, SIDE, extent) if dim == 0 else (left + start, top, extent, SIDE)
        hover = f"rank {rank}: {length:,} {'rows' if dim == 0 else 'columns'}"
    return outline + (box(x, y, w, h, PALETTE[0], "", hover) if w and h else "")
