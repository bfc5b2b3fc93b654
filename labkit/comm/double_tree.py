r"""An all_reduce over two trees at a time: the latency of a tree, and about the bytes of a ring.

In one binary tree half of the ranks are leaves. A leaf has nobody below it, so half of its link is idle, while each
inner rank takes from two children and gives to two. Two trees repair this. Each spans all ranks and sums one half of
the tensor, and no rank is an inner one of both:

    first tree, n = 6            second tree: the first one mirrored, rank r stands where n-1-r stood
           3                            2
         /   \                        /   \
        1     5                      4     0        n even: ranks 1 3 5 are inner in the first, 0 2 4 in the second
       / \   /                      / \     \
      0   2 4                      5   3     1      n odd: the second is the first moved on by one rank

The ranks of a tree, read from left to right, are 0 to n-1. Each half is cut into pieces, which travel as a pipeline:
while a parent adds piece 0, its children send piece 1. First all pieces go up and are summed on their way, then they
come down from the roots.

    N bytes in all          busiest rank sends     latencies, one after the other
    double tree             2 N  (n > 3)           2 floor(log2 n)
    ring (ring.py)          2(n-1)/n N             2(n-1)
    tree (tree.py)          up to ceil(log2 n) N   2 ceil(log2 n)

More pieces fill the pipeline sooner, and each is a message more for every rank: plan/machine/double_tree.py has the
time. An inner rank needs N bytes of memory besides the result, for what its two children send.

The idea and its analysis: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", Parallel Computing, 2009 (read here: its abstract). NCCL builds its pair of trees alike, mirrored for an even and
moved on for an odd number of ranks (NVIDIA/nccl, src/graph/trees.cc); there the root of each tree has one child.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from labkit.comm.group import Group, Work, check_op
from labkit.comm.ring import combine

PIECE_BYTES = 1 << 18
"""Each half is cut into pieces of about this size, unless the caller says how many."""


class Place(NamedTuple):
    """A rank's place in one tree: the rank above it, None at the root, and the ranks below it, two at most."""

    parent: int | None
    children: tuple[int, ...]


def all_reduce(x: Tensor, group: Group, op: str = "sum", pieces: int | None = None) -> Tensor:
    """Each half of x up its own tree and down again: the same bits on every rank.   same shape; sends up to 2 N

    `pieces` is the number that each half is cut into; None: by `PIECE_BYTES`. Raises ValueError for fewer than 1."""
    check_op(group, x, op)
    if pieces is not None and pieces < 1:
        raise ValueError(f"each half is cut into 1 piece or more, got pieces={pieces}")
    out = x.clone(memory_format=torch.contiguous_format)
    places = [place(group.rank, group.size, tree) for tree in (0, 1)]
    halves = out.view(-1).tensor_split(2)
    cut = [_cut(half, pieces) for half in halves]
    _reduce_(cut, places, group, op)
    if op == "mean":  # once, at the roots, before the sums come down: every rank then has the same bits
        for half, at in zip(halves, places, strict=True):
            if at.parent is None:
                half.div_(group.size)
    _broadcast_(cut, places, group)
    return out


def place(rank: int, n: int, tree: int) -> Place:
    """The parent and the children of a rank in the first tree (0) or in the second (1)."""
    return Place(_parent(rank, n, tree), tuple(below for below in range(n) if _parent(below, n, tree) == rank))


def _parent(rank: int, n: int, tree: int) -> int | None:
    if tree == 1:  # the rank that stands here in the first tree
        above = _parent(n - 1 - rank if n % 2 == 0 else (rank - 1) % n, n, 0)
        return None if above is None else n - 1 - above if n % 2 == 0 else (above + 1) % n
    # Numbered from 1, odd ones are leaves, their parents are 2 mod 4, and those have parents that are 4 mod 8: one
    # level up the lowest set bit moves by one. Where that number does not exist, the next one to the left is above.
    number = rank + 1
    lowest = number & -number
    above = (number - lowest) | 2 * lowest
    return (above if above <= n else number - lowest) - 1 if number != lowest or above <= n else None


def _cut(half: Tensor, pieces: int | None) -> tuple[Tensor, ...]:
    wanted = half.nbytes // PIECE_BYTES if pieces is None else pieces
    return half.tensor_split(max(1, min(wanted, len(half))))  # no message without a number in it


def _reduce_(cut: list[tuple[Tensor, ...]], places: list[Place], group: Group, op: str) -> None:
    """Add what the children send, hand the sum on to the parent, piece by piece."""
    # All receives before the first send: no child has to wait until its parent is ready. Tags are not needed: a rank
    # has children in one tree only, so all that a child sends up to it belongs to that tree, in order.
    coming = [
        [[group.recv_start(child, into=torch.empty_like(piece)) for child in at.children] for piece in cut[tree]]
        for tree, at in enumerate(places)
    ]
    sent: list[Work] = []
    for tree in _leaves_first(places):
        above = places[tree].parent
        for piece, expected in zip(cut[tree], coming[tree], strict=True):
            for work in expected:
                arrived = work.wait()
                assert arrived is not None
                combine(piece, arrived, piece, op)
            if above is not None:
                sent.append(group.send(piece, above))
    for work in sent:  # the pieces are this rank's own again, before sums come down into the same memory
        work.wait()


def _broadcast_(cut: list[tuple[Tensor, ...]], places: list[Place], group: Group) -> None:
    """Take each piece from the parent and pass it on to the children."""
    coming = [
        [] if at.parent is None else [group.recv_start(at.parent, into=piece) for piece in cut[tree]]
        for tree, at in enumerate(places)
    ]
    sent: list[Work] = []
    for tree in reversed(_leaves_first(places)):
        for number, piece in enumerate(cut[tree]):
            if coming[tree]:
                coming[tree][number].wait()
            sent += [group.send(piece, child) for child in places[tree].children]
    for work in sent:
        work.wait()


def _leaves_first(places: list[Place]) -> list[int]:
    """The trees, first the one in which this rank is a leaf: what a leaf sends waits for nobody, and must not stand
    behind a piece that waits for children. Their messages then share the rank's link."""
    return sorted((0, 1), key=lambda tree: len(places[tree].children))
