"""Star collectives: everything goes through rank 0, the parameter server. Simple, and what not to do.

    1 --x--> 0      0 adds what it gets           0 --sum--> 1
    2 --x--> 0      and answers everybody         0 --sum--> 2
    3 --x--> 0                                    0 --sum--> 3

                    bytes sent by rank 0      by each other rank
    all_reduce      (n-1) N                   N
    reduce_scatter  (n-1)/n N                 N
    all_gather      (n-1) N                   N/n              N = bytes of the whole tensor
    broadcast       (n-1) N  (the source)     0

The busiest link carries (n-1) N where a ring's carries 2(n-1)/n N, so the time grows with the number of ranks:
this is the bottleneck that made parameter servers give way to rings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.comm.group import Group, check_op
from labkit.comm.ring import combine


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Rank 0 sums and answers everybody: the same bits on every rank.   same shape"""
    total = _sum_at_server(x, group, op)
    return broadcast(total, group)


def reduce_scatter(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Rank 0 sums and sends every rank its part.   [n*k, ...] -> [k, ...] (ragged: as tensor_split cuts)"""
    total = _sum_at_server(x, group, op)
    if group.rank != 0:
        return group.recv(0)
    parts = total.tensor_split(group.size)
    _send_to_all(parts, group, 0)
    return parts[0].clone()


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Rank 0 collects and answers with everything. Parts may differ in length.   [k, ...] -> [n*k, ...]"""
    if group.rank != 0:
        group.send(x, 0).wait()
        return group.recv(0)
    whole = torch.cat([x, *(group.recv(rank) for rank in range(1, group.size))])
    _send_to_all([whole] * group.size, group, 0)
    return whole


def broadcast(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """The source sends x to everybody itself.   same shape"""
    out = x.clone(memory_format=torch.contiguous_format)
    if group.rank == source:
        _send_to_all([out] * group.size, group, source)
    else:
        group.recv(source, into=out)
    return out


def _sum_at_server(x: Tensor, group: Group, op: str) -> Tensor:
    check_op(group, x, op)
    total = x.clone(memory_format=torch.contiguous_format)
    if group.rank != 0:
        group.send(total, 0).wait()
        return total
    for rank in range(1, group.size):  # in rank order, whoever comes first: every run rounds the sum alike
        combine(total, group.recv(rank), total, op)
    if op == "mean":
        total /= group.size
    return total


def _send_to_all(parts: list[Tensor] | tuple[Tensor, ...], group: Group, me: int) -> None:
    sent = [group.send(parts[rank], rank) for rank in range(group.size) if rank != me]
    for work in sent:
        work.wait()
