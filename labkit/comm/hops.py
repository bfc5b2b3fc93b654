"""all_to_all and barrier from messages alone, for wires that have no such verb of their own.

             messages of a rank    bytes sent by a rank
all_to_all   n - 1                 (n-1)/n N
barrier      ceil(log2 n)          0
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.comm.group import Group


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """Part j of x goes to rank j, all at the same time.   [n*k, ...] -> [n*k, ...]; sends (n-1)/n N"""
    others = [rank for rank in range(group.size) if rank != group.rank]
    parts = x.reshape(group.size, x.shape[0] // group.size, *x.shape[1:]).unbind()
    # all are started before one is waited for: waiting in between, ranks could wait for each other in a circle
    expected = [(rank, group.recv_start(rank)) for rank in others]
    sent = [group.send(parts[rank], rank) for rank in others]
    out = [parts[group.rank].clone()] * group.size
    for rank, work in expected:
        arrived = work.wait()
        assert arrived is not None
        out[rank] = arrived
    for work in sent:
        work.wait()
    return torch.cat(out)


def barrier(x: Tensor, group: Group) -> Tensor:
    """Wait for everybody: in round k hear from rank - 2^k, who has heard from 2^k ranks (Hensgen, Finkel and Manber,
    1988). ceil(log2 n) messages without payload a rank."""
    hop = 1
    while hop < group.size:
        group.exchange(x.new_zeros(0), (group.rank + hop) % group.size, (group.rank - hop) % group.size, tag=hop)
        hop *= 2
    return x
