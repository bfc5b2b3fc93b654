"""all_to_all and barrier from messages alone, for wires that have no such verb of their own.

             messages of a rank    bytes sent by a rank
all_to_all   n - 1                 (n-1)/n N; with ragged parts N but for the part that stays
barrier      ceil(log2 n)          0
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from labkit.comm.group import Group


def all_to_all(
    x: Tensor, group: Group, send_rows: Sequence[int] | None = None, receive_rows: Sequence[int] | None = None
) -> Tensor:
    """Part j of x goes to rank j, all at the same time.   [n*k, ...] -> [n*k, ...]; sends (n-1)/n N

    Ragged with `send_rows` and `receive_rows`, see Group.all_to_all; a part without rows is a message without bytes.
    Raises ValueError if a rank sends another number of rows than is expected from it, with both shapes."""
    equal = [x.shape[0] // group.size] * group.size
    send_rows, receive_rows = send_rows or equal, receive_rows or equal
    others = [rank for rank in range(group.size) if rank != group.rank]
    parts = x.contiguous().split(list(send_rows))
    out = x.new_empty((sum(receive_rows), *x.shape[1:]))
    places = out.split(list(receive_rows))
    # all are started before one is waited for: waiting in between, ranks could wait for each other in a circle
    expected = [group.recv_start(rank, into=places[rank]) for rank in others]
    sent = [group.send(parts[rank], rank) for rank in others]
    places[group.rank].copy_(parts[group.rank])
    for work in [*expected, *sent]:
        work.wait()
    return out


def barrier(x: Tensor, group: Group) -> Tensor:
    """Wait for everybody: in round k hear from rank - 2^k, who has heard from 2^k ranks (Hensgen, Finkel and Manber,
    1988). ceil(log2 n) messages without payload a rank."""
    hop = 1
    while hop < group.size:
        group.exchange(x.new_zeros(0), (group.rank + hop) % group.size, (group.rank - hop) % group.size, tag=hop)
        hop *= 2
    return x
