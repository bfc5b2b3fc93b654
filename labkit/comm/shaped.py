"""A shaped wire: real bytes between real processes, in the time that the links of another machine would take.

    Cluster(4, links=Links.two_nodes(2, intra="nvlink", inter="infiniband", scale=1e-3))

Each message travels over gloo at once and is held back at its receiver until `Traffic` says that it has arrived; its
sender is held back as long, since a send is over when the receiver has the message. Both directions of an edge are
independent (full duplex), and edges that share a port or a network card share its bytes a second.

Collectives are labkit's own over such messages, since gloo's know nothing of the shape:

    all_reduce, reduce_scatter, all_gather, broadcast   ring.py        bytes and steps: see there
    all_to_all      n - 1 exchanges with everybody, hop by hop         (n-1)/n N
    barrier         ceil(log2 n) rounds: tell rank + 2^k, hear from rank - 2^k          0 bytes

Edges are those between global ranks, so the groups of a mesh are shaped as their world is. `verb_start` runs in a
thread of the group, one verb after the other, as a stream of NCCL does: a backward pass overlaps with it for real. A
tensor that changes while it is on its way is noticed (checked_loan.py), since here it would only sometimes show.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor

from labkit.comm import by_messages, ring
from labkit.comm.checked_loan import Lent
from labkit.comm.group import Algorithm, Group
from labkit.comm.ledger import Ledger
from labkit.comm.message import Handle, Lane, Wire
from labkit.comm.stream import Apart, Started, Stream
from labkit.comm.traffic import Traffic


def shape(group: Group, traffic: Traffic) -> Group:
    """The same group; its messages, and so its collectives, take the time that the links of `traffic` would take."""
    traffic.punctual()
    wire = Shaped(group.wire, traffic, group.ranks, group.rank, group.device)
    return Group(group.axis, group.ranks, group.rank, wire, wire.verbs, group.ledger, group.device, group.state)


class Shaped:
    """Wire and collectives of one group; members by their index in it."""

    lends = True

    def __init__(self, wire: Wire, traffic: Traffic, ranks: tuple[int, ...], rank: int, device: str):
        self.wire, self.traffic, self.ranks, self.rank = wire, traffic, ranks, rank
        self.stream, self.n = Stream(), len(ranks)
        self.all_reduce, self.reduce_scatter = self._in_order(ring.all_reduce), self._in_order(ring.reduce_scatter)
        self.all_gather, self.broadcast = self._in_order(ring.all_gather), self._in_order(ring.broadcast)
        self.all_to_all = self._in_order(by_messages.all_to_all)
        names = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
        self.verbs: dict[str, Algorithm] = {name: getattr(self, name) for name in names}
        self.verbs |= {"barrier": self._in_order(by_messages.barrier)}
        inside = copy(self)
        inside.lends = (
            False  # a verb is checked as a whole, at its end: an error in its middle would leave others waiting
        )
        self.apart = Apart("stream", ranks, rank, inside, self.verbs, Ledger(), device)

    # -- messages ----------------------------------------------------------------------------------------------------

    def isend(self, x: Tensor, to: int, tag: int) -> Handle:
        """Start sending the bytes of x at once; `lane` decides when they count as arrived."""
        return self.wire.isend(x, to, tag)

    def irecv(self, buffer: Tensor, source: int, tag: int) -> Handle:
        """Start receiving into `buffer`."""
        return self.wire.irecv(buffer, source, tag)

    def lane(self, peer: int, outgoing: bool) -> Lane:
        """The edge to member `peer`, or from it."""
        a, b = self.ranks[self.rank], self.ranks[peer]
        return self.traffic.road(a, b) if outgoing else self.traffic.road(b, a)

    # -- collectives under way ---------------------------------------------------------------------------------------

    def all_reduce_start(self, x: Tensor, op: str) -> Started:
        """Start the sum of x over the group in the stream, in place."""
        lent = Lent(x.detach(), "the buffer of an all_reduce")

        def reduce() -> Tensor:
            total = ring.all_reduce(lent.x, self.apart, op)
            lent.give_back()
            return lent.x.copy_(total)

        return self._start(reduce, x)

    def reduce_scatter_start(self, x: Tensor, op: str) -> Started:
        """Start a reduce_scatter in the stream.   [n*k, ...] -> [k, ...]"""
        lent = Lent(x, "the tensor of a reduce_scatter")

        def scatter() -> Tensor:
            part = ring.reduce_scatter(x, self.apart, op)
            lent.give_back()
            return part

        return self._start(scatter, x)

    def all_gather_start(self, x: Tensor, into: Tensor | None) -> Started:
        """Start an all_gather in the stream.   [k, ...] -> [n*k, ...]"""
        lent = Lent(x, "the tensor of an all_gather")

        def gather() -> Tensor:
            whole = ring.all_gather(x, self.apart)
            lent.give_back()
            return whole if into is None else into.detach().copy_(whole)

        return self._start(gather, x)

    def all_to_all_start(self, x: Tensor) -> Started:
        """Start an all_to_all of equal parts in the stream.   [n*k, ...] -> [n*k, ...]"""
        lent = Lent(x, "the tensor of an all_to_all")

        def swap() -> Tensor:
            parts = by_messages.all_to_all(x, self.apart)
            lent.give_back()
            return parts

        return self._start(swap, x)

    def _start(self, fn: Callable[[], Tensor], x: Tensor) -> Started:
        def verb() -> Tensor:
            try:
                return fn()
            finally:
                self.apart.ledger.clear()  # the caller's ledger has the verb; this one would only grow

        return self.stream.start(verb, x.device)

    def _in_order(self, algorithm: Algorithm) -> Algorithm:
        def verb(x: Tensor, group: Group, **options: Any) -> Tensor:
            self.stream.drain()  # a verb that was started before goes first, as on a stream of NCCL
            return algorithm(x, group, **options)

        return verb
