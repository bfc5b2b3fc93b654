"""Arithmetic of time: intervals (begin, end) in seconds, and sets of them that are disjoint and in order.

a                   |-----|   |---|
b                      |--------|
union((*a, *b))     |-------------|
common(a, b)           |--|   |-|
without(a, b)       |--|        |-|
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(spans: Iterable[Interval]) -> tuple[Interval, ...]:
    """The time that any of them covers, as disjoint intervals in order; empty ones vanish."""
    out: list[Interval] = []
    for a, b in sorted(spans):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(b, out[-1][1]))
        elif b > a:
            out.append((a, b))
    return tuple(out)


def common(left: Sequence[Interval], right: Sequence[Interval]) -> tuple[Interval, ...]:
    """The time that both cover. Both must be disjoint and in order, as `union` returns them."""
    out, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        a, b = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if b > a:
            out.append((a, b))
        i, j = (i + 1, j) if left[i][1] < right[j][1] else (i, j + 1)
    return tuple(out)


def without(spans: Sequence[Interval], holes: Sequence[Interval]) -> tuple[Interval, ...]:
    """The time that `spans` cover and `holes` do not; both disjoint and in order."""
    if not spans:
        return ()
    edges = [spans[0][0], *(edge for hole in holes for edge in hole), spans[-1][1]]
    return common(spans, union(zip(edges[::2], edges[1::2], strict=True)))


def seconds(spans: Iterable[Interval]) -> float:
    """The sum of the lengths of disjoint intervals."""
    return sum(b - a for a, b in spans)
