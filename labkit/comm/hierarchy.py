"""Hierarchical all_reduce: inside the nodes, across them, inside again.

Between nodes the wire is slow and shared by all ranks of a node, so as little as possible should cross it, and no step
inside a node should wait for it. m nodes of k ranks, n = mk, N = bytes of the tensor:

    node 0   [0 1]          reduce_scatter inside       rank i of each node has part i of its node's sum
                   |
             0   1          all_reduce across           the i-th ranks of all nodes sum their parts: k rings side by
             |   |                                      side, N/k each
             2   3
                   |
    node 1   [2 3]          all_gather inside           the parts of all

                        steps       bytes sent by each rank
    inside              2(k - 1)    2(k-1)/k N          on the fast wire
    across              2(m - 1)    2(m-1)/m N/k        on the slow one: 2(m-1)/m N through the card of each node
    a flat ring         2(n - 1)    2(n-1)/n N          as much through each card, each step as slow as the slowest

With two nodes N bytes leave each, where a flat ring's 2(n-1)/n N tend to 2 N: half; and 2 steps wait for the latency of
the slow wire in place of 2(n-1). (Where neighbours in rank lie on different nodes, a flat ring crosses with every step
of every rank, k times as many bytes.)
BlueConnect (Cho et al. 2019, section 3) and NCCL's and Horovod's hierarchical all_reduce are of this kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from labkit.comm import ring
from labkit.comm.group import Group, check_op
from labkit.comm.message import Handle, Lane


def all_reduce(x: Tensor, group: Group, op: str = "sum", nodes: Sequence[Sequence[int]] | None = None) -> Tensor:
    """Sum of x over the group, the same bits on every rank.   same shape

    `nodes` are the members (indexes in the group) of each node; None: as the shaped links of the group say, and one
    node where there are none. Use it as `group.using(all_reduce=hierarchy.all_reduce)`.
    Raises ValueError for nodes of different sizes (their parts would not match), and nodes that are not the group."""
    check_op(group, x, op)
    nodes = nodes_of(group) if nodes is None else nodes
    if sorted(member for node in nodes for member in node) != list(range(group.size)):
        raise ValueError(f"nodes of a group of {group.size} hold its members 0 to {group.size - 1}, got {nodes}")
    if len({len(node) for node in nodes}) != 1:
        raise ValueError(
            f"hierarchical all_reduce wants as many ranks on every node, got {[len(node) for node in nodes]}: "
            "use ring.all_reduce, or other links"
        )
    node_ranks = next(node for node in nodes if group.rank in node)
    inside = part(group, node_ranks)
    # ranks with the same place on their nodes: after the reduce_scatter they hold the same part of x
    across = part(group, [node[inside.rank] for node in nodes])
    summing = "sum" if op == "mean" else op  # divided once, at the end
    shard = ring.reduce_scatter(x.reshape(-1), inside, summing)
    shard = ring.all_reduce(shard, across, summing)
    whole = ring.all_gather(shard, inside).view(x.shape)
    return whole.div_(group.size) if op == "mean" else whole


def nodes_of(group: Group) -> list[list[int]]:
    """The members of the group (indexes) by node, as its shaped links say; one node if they are not shaped."""
    traffic = getattr(group.wire, "traffic", None)
    if traffic is None:
        return [list(range(group.size))]
    home = [traffic.links.home[rank] for rank in group.ranks]
    return [[member for member, at in enumerate(home) if at == node] for node in dict.fromkeys(home)]


def part(group: Group, members: Sequence[int]) -> Group:
    """Some members of a group as a group of their own, for messages between them: no new connections."""
    ranks = tuple(group.ranks[member] for member in members)
    wire = SubWire(group.wire, tuple(members))
    view = Group(group.axis, ranks, list(members).index(group.rank), wire, group.algorithms, group.ledger, group.device)
    view.counted = group.counted
    return view


class SubWire:
    """The wire of a group for some of its members, who are numbered anew from 0."""

    def __init__(self, wire: Any, members: tuple[int, ...]):
        self.wire, self.members = wire, members
        if hasattr(wire, "lane"):
            self.lane = self._lane

    def isend(self, x: Tensor, to: int, tag: int) -> Handle:
        """Start sending to member `to` of the part."""
        return self.wire.isend(x, self.members[to], tag)

    def irecv(self, buffer: Tensor, source: int, tag: int) -> Handle:
        """Start receiving from member `source` of the part."""
        return self.wire.irecv(buffer, self.members[source], tag)

    def _lane(self, peer: int, outgoing: bool) -> Lane:
        return self.wire.lane(self.members[peer], outgoing)
