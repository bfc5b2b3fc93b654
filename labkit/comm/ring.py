"""Ring collectives from send and recv alone (Patarasuk and Yuan, 2009, section 3).

n ranks stand on a ring. At each step everybody gives one chunk to the right and takes one from the left:

    step 0          step 1          step 2          n = 4, reduce-scatter: chunk c starts at rank c+1
    0 --3--> 1      0 --2--> 1      0 --1--> 1      and is complete when it reaches its owner, rank c
    1 --0--> 2      1 --3--> 2      1 --2--> 2
    2 --1--> 3      2 --0--> 3      2 --3--> 3
    3 --2--> 0      3 --1--> 0      3 --0--> 0

                   steps       bytes sent by each rank (n divides the tensor)
    reduce_scatter n - 1        (n-1)/n N
    all_gather     n - 1        (n-1)/n N
    all_reduce     2(n - 1)    2(n-1)/n N         N = bytes of the whole tensor
    broadcast      n - 1        N (the last rank of the chain 0)

A ring is bandwidth-optimal: no rank can send less. It pays in latency, n - 1 hops where a tree needs log n.
Sums are taken in the tensor's own dtype, in ring order, as NCCL's rings do; every rank ends with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group, Work, check_op

SEGMENT_BYTES = 4 << 20
"""A broadcast is passed on in pieces of this size, so that the last rank does not wait for the first to finish."""


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Sum of x over the ring, the same bits on every rank.   same shape; sends 2(n-1)/n N"""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    chunks = out.view(-1).tensor_split(group.size)
    _reduce_scatter(x.reshape(-1).tensor_split(group.size), chunks, group, op)
    _all_gather(chunks, group)
    return out


def reduce_scatter(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Sum of x over the ring; this rank keeps its part.   [n*k, ...] -> [k, ...] (ragged: as tensor_split cuts)"""
    parts = x.contiguous().tensor_split(group.size)
    out = [torch.empty_like(part) for part in parts]
    _reduce_scatter([part.view(-1) for part in parts], [part.view(-1) for part in out], group, op)
    return out[group.rank]


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Every rank's x in rank order, joined along dim 0; parts may differ in length.   [k, ...] -> [n*k, ...]"""
    n, me = group.size, group.rank
    parts: list[Any] = [x.contiguous()] * n
    for step in range(n - 1):
        give, take = (me - step) % n, (me - step - 1) % n
        # both are started before either is waited for: if all ranks waited for their sends, nobody would receive
        expected = group.recv_start((me - 1) % n, tag=take)
        sent = group.send(parts[give], (me + 1) % n, tag=give)
        parts[take] = expected.wait()
        sent.wait()
    return torch.cat(parts)


def broadcast(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """The source's x travels once around the ring, in segments, so that all links are busy at the same time."""
    n, place = group.size, (group.rank - source) % group.size
    out = x.clone(memory_format=torch.contiguous_format)
    sent = []
    for segment in out.view(-1).tensor_split(max(1, out.nbytes // SEGMENT_BYTES)):
        if place > 0:
            group.recv((group.rank - 1) % n, into=segment)
        if place < n - 1:
            # not waited for here: the next segment comes in while this one goes out
            sent.append(group.send(segment, (group.rank + 1) % n))
    for work in sent:
        work.wait()
    return out


def _reduce_scatter(parts: Sequence[Tensor], out: Sequence[Tensor], group: Group, op: str) -> None:
    """After n - 1 steps out[me] is the sum of parts[me] over all ranks; the other chunks of out hold partial sums."""
    check_op(group, out[0], op)
    n, me = group.size, group.rank
    if n == 1:
        out[0].copy_(parts[0])
    scratch = [torch.empty_like(max(parts, key=len)) for _ in range(min(2, n - 1))]

    def expect(step: int) -> Work:
        take = (me - step - 2) % n
        return group.recv_start((me - 1) % n, tag=take, into=scratch[step % 2][: len(parts[take])])

    coming = [expect(step) for step in range(min(2, n - 1))]  # one step ahead: no sender waits for its receiver
    for step in range(n - 1):
        give, take = (me - step - 1) % n, (me - step - 2) % n
        # first the rank's own chunk as it is, then each time the partial sum of the step before: x need not be copied
        sent = group.send(parts[give] if step == 0 else out[give], (me + 1) % n, tag=give)
        start = 0
        for arrived in coming.pop(0).pieces():  # added while the rest of the chunk is on the wire
            stop = start + len(arrived)
            combine(parts[take][start:stop], arrived, out[take][start:stop], op)
            start = stop
        if step + 2 < n - 1:
            coming.append(expect(step + 2))
        sent.wait()
    if op == "mean":  # once, by the owner, before all_reduce passes it on: every rank then has the same bits
        out[me].div_(n)


def _all_gather(chunks: Sequence[Tensor], group: Group) -> None:
    """Pass complete chunks around the ring, each straight into its place."""
    n, me = group.size, group.rank
    takes = [(me - step - 1) % n for step in range(n - 1)]
    # all receives at once: no place is written twice, so a sender never has to wait until its receiver is ready
    coming = [group.recv_start((me - 1) % n, tag=take, into=chunks[take]) for take in takes]
    sent = []
    for step, expected in enumerate(coming):
        give = (me - step) % n
        sent.append(group.send(chunks[give], (me + 1) % n, tag=give))
        expected.wait()
    for work in sent:
        work.wait()


def combine(own: Tensor, theirs: Tensor, out: Tensor, op: str) -> None:
    """out = mine (op) theirs, for every op that a collective knows (a mean is a sum until the end)."""
    if op in ("sum", "mean"):
        torch.add(own, theirs, out=out)
    elif op == "max":
        torch.maximum(own, theirs, out=out)
    else:
        torch.minimum(own, theirs, out=out)
