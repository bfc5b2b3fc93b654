"""Where ranks stand on a page. The arrangement follows from which ranks exchange messages:

star   one rank talks to all others, and they only to it     that rank in the middle, the others around it
tree   the connections have no circle and reach every rank   the root on top, a level for each hop
rows   the nodes are given                                   a row for each node
ring   anything else                                         on a circle, in order
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

MOST_LEVELS = 8
"""The most levels of a tree; the ranks of a deeper one, such as a chain, stand on a circle."""
Edge = tuple[int, int]
Spot = tuple[float, float]


@dataclass(frozen=True)
class RankArea:
    """The edges of the part of the page in which ranks stand; `half` is half the size of a rank's disc."""

    left: float
    top: float
    right: float
    bottom: float
    half: float

    @property
    def middle(self) -> Spot:
        """The centre of the frame."""
        return (self.left + self.right) / 2, (self.top + self.bottom) / 2

    def around(self, ranks: Sequence[int]) -> dict[int, Spot]:
        """The places of ranks on a circle, clockwise from the top."""
        x, y = self.middle
        radius = min(self.right - self.left, self.bottom - self.top) / 2 - self.half - 2
        turn = 2 * math.pi / max(1, len(ranks))
        return {
            rank: (x + radius * math.sin(k * turn), y - radius * math.cos(k * turn)) for k, rank in enumerate(ranks)
        }

    def across(self, rows: Sequence[Sequence[int]]) -> dict[int, Spot]:
        """The places of ranks in rows, evenly apart in each row."""
        wide, tall = self.right - self.left, self.bottom - self.top
        return {
            rank: (self.left + (k + 0.5) * wide / len(row), self.top + (at + 0.5) * tall / len(rows))
            for at, row in enumerate(rows)
            for k, rank in enumerate(row)
        }


def places(
    ranks: Sequence[int], edges: Collection[Edge], frame: RankArea, nodes: Sequence[Sequence[int]] | None = None
) -> tuple[str, dict[int, Spot]]:
    """("star" | "tree" | "rows" | "ring", where each rank stands). ValueError for nodes that are not the ranks."""
    if nodes:
        if sorted(rank for node in nodes for rank in node) != sorted(ranks):
            raise ValueError(f"nodes= says where each of the ranks {list(ranks)} lies, once; got {list(nodes)}")
        return "rows", frame.across(nodes)
    pairs = {(min(edge), max(edge)) for edge in edges}
    if len(ranks) == 2:
        return "tree" if pairs else "ring", frame.across([ranks])
    if len(ranks) > 2 and len(pairs) == len(ranks) - 1:
        hubs = [rank for rank in ranks if all(rank in pair for pair in pairs)]
        if hubs:
            others = [rank for rank in ranks if rank != hubs[0]]
            return "star", {hubs[0]: frame.middle, **frame.around(others)}
        levels = _levels(_root(ranks, edges, pairs), pairs)
        spots = _tree(levels, frame) if sum(map(len, levels)) == len(ranks) else {}
        if spots:
            return "tree", spots
    return "ring", frame.around(ranks)


def _root(ranks: Sequence[int], edges: Collection[Edge], pairs: Collection[Edge]) -> int:
    """The rank that sends but never receives (in a broadcast) or receives but never sends (in a reduction), if there is
    one; otherwise the rank with most neighbours."""
    for end in (1, 0):
        alone = [rank for rank in ranks if all(edge[end] != rank for edge in edges)]
        if len(alone) == 1:
            return alone[0]
    return max(ranks, key=lambda rank: (sum(rank in pair for pair in pairs), -rank))


def _levels(root: int, pairs: Collection[Edge]) -> list[dict[int, int]]:
    """For each level of the tree: rank -> its parent (the root is its own)."""
    levels, seen = [{root: root}], {root}
    while levels[-1]:
        below = {}
        for parent in levels[-1]:
            for rank in sorted(sum(pair) - parent for pair in pairs if parent in pair):
                if rank not in seen:
                    seen.add(rank)
                    below[rank] = parent
        levels.append(below)
    return levels[:-1]


def _tree(levels: Sequence[Mapping[int, int]], frame: RankArea) -> dict[int, Spot]:
    """The places of a tree: a column for each leaf, a parent above the middle of its children; {} if too wide."""
    children: dict[int, list[int]] = {rank: [] for level in levels for rank in level}
    for level in levels[1:]:
        for rank, parent in level.items():
            children[parent].append(rank)
    leaves = sum(not below for below in children.values())
    step = (frame.right - frame.left) / leaves
    if len(levels) > MOST_LEVELS or step < 2 * frame.half + 2:
        return {}
    depth = {rank: at for at, level in enumerate(levels) for rank in level}
    tall = (frame.bottom - frame.top - 2 * frame.half) / max(1, len(levels) - 1)
    spots: dict[int, Spot] = {}
    used = 0

    def stand(rank: int) -> float:
        nonlocal used
        below = [stand(child) for child in children[rank]]
        if not below:
            used += 1
        x = (below[0] + below[-1]) / 2 if below else frame.left + (used - 0.5) * step
        spots[rank] = (x, frame.top + frame.half + depth[rank] * tall)
        return x

    stand(next(iter(levels[0])))
    return spots
