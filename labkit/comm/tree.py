"""Tree collectives from send and recv alone: few steps, many bytes.

A binomial tree. In reduce, pairs at distance 1 meet first, then pairs at distance 2, 4, ...: one of each pair hands
over what it has and is done. Broadcast runs the same tree from the root down.

    n = 8      distance 1         distance 2        distance 4
    reduce     1->0 3->2 5->4 7->6    2->0 6->4         4->0
    broadcast  0->4                   0->2 4->6         0->1 2->3 4->5 6->7

                    steps               bytes sent by a rank            by all ranks
    reduce          ceil(log2 n)        N, the root 0                   (n-1) N
    broadcast       ceil(log2 n)        up to ceil(log2 n) N            (n-1) N
    all_reduce      2 ceil(log2 n)      reduce and broadcast            2(n-1) N
    reduce_scatter  reduce, then the root sends each rank its part
    all_gather      gather to the root along the tree, then broadcast

Where a ring needs 2(n-1) steps a tree needs 2 log n: it wins for small messages, whose time is latency, and loses
for large ones, whose time is bytes. (NCCL chooses between the two by size in the same way.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from labkit.comm.group import Group, check_op
from labkit.comm.ring import combine


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduce to rank 0, then broadcast: the same bits on every rank.   same shape"""
    return _broadcast_(_reduce(x, group, op), group, 0)


def reduce_scatter(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduce to rank 0, which sends every rank its part.   [n*k, ...] -> [k, ...] (ragged: as tensor_split cuts)"""
    whole = _reduce(x, group, op)
    if group.rank != 0:
        return group.recv(0)
    parts = whole.tensor_split(group.size)
    sent = [group.send(parts[rank], rank) for rank in range(1, group.size)]
    for work in sent:
        work.wait()
    return parts[0].clone()


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Gather to rank 0 along the tree, then broadcast. Parts may differ in length.   [k, ...] -> [n*k, ...]"""
    have = x.contiguous()
    for child, parent in _pairs_up(group.size):
        if group.rank == child:
            group.send(have, parent).wait()
        elif group.rank == parent:
            have = torch.cat([have, group.recv(child)])  # a subtree is a run of ranks: order is kept
    for parent, child in _pairs_down(group.size):
        if group.rank == parent:
            group.send(have, child).wait()
        elif group.rank == child:
            have = group.recv(parent)
    return have if have is not x else x.clone()


def broadcast(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """The source's x on every rank, down a tree with the source at its root.   same shape"""
    return _broadcast_(x.clone(memory_format=torch.contiguous_format), group, source)


def _reduce(x: Tensor, group: Group, op: str) -> Tensor:
    """On rank 0 the sum over the group; on others a partial sum."""
    check_op(group, x, op)
    total = x.clone(memory_format=torch.contiguous_format)
    for child, parent in _pairs_up(group.size):
        if group.rank == child:
            group.send(total, parent).wait()
        elif group.rank == parent:
            combine(total, group.recv(child), total, op)
    if op == "mean":
        total /= group.size
    return total


def _broadcast_(x: Tensor, group: Group, source: int) -> Tensor:
    place = (group.rank - source) % group.size  # the source stands where the tree has its root
    for parent, child in _pairs_down(group.size):
        if place == parent:
            group.send(x, (child + source) % group.size).wait()
        elif place == child:
            group.recv((parent + source) % group.size, into=x)
    return x


def _pairs_up(n: int) -> Iterator[tuple[int, int]]:
    """(child, parent), from the leaves to the root."""
    distance = 1
    while distance < n:
        yield from ((parent + distance, parent) for parent in range(0, n - distance, 2 * distance))
        distance *= 2


def _pairs_down(n: int) -> Iterator[tuple[int, int]]:
    """(parent, child), from the root to the leaves."""
    yield from ((parent, child) for child, parent in reversed(list(_pairs_up(n))))
