"""A wire between threads with the rules of a box of GPUs: what NCCL would do to messages, and what labkit does instead.

    Letters     a process group as gloo has it: a message finds the receive of its tag
    Lanes       one as NCCL has it: no tags; one queue for each direction of a rank, upwards and downwards, in which an
                operation is through when both of its ranks have it at the head of theirs
    on_gpus     labkit's own wire (`Native`) between GPUs: collectives on Lanes, messages on Letters
    on_lanes    the same if payloads went over Lanes, too, and only their headers had tags

A send is over when the receiver has taken it, never before: NCCL promises no more, and small messages hide that.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from labkit.comm import local
from labkit.comm.group import Group
from labkit.comm.ledger import Ledger
from labkit.comm.local import Exchange, LocalWire
from labkit.comm.message import Receiving
from labkit.comm.native import GlooMessage, Native
from labkit.comm.process_groups import Pair


class Handle:
    """torch's handle of a message."""

    def __init__(self, exchange: Exchange, done: Callable[[], bool], what: str):
        self.exchange, self.is_completed, self.what = exchange, done, what

    def wait(self) -> None:
        self.exchange.wait_for(self.is_completed, self.what)


class Letters:
    """gloo's send and recv, on the wire between threads."""

    def __init__(self, wire: LocalWire):
        self.wire = wire

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Handle:
        sent = self.wire.isend(tensors[0], to, tag)
        return Handle(self.wire.exchange, sent.done, sent.what)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Handle:
        expected = self.wire.irecv(tensors[0], source, tag)
        return Handle(self.wire.exchange, expected.done, expected.what)


class Queue:
    """What a rank has queued in one direction, in order: (what, this rank, its peer, tensor)."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[str, int, int, Tensor]] = deque()
        self.n_queued = self.n_through = 0


class Lanes:
    """NCCL's send and recv."""

    def __init__(self, wire: LocalWire):
        self.wire, self.exchange = wire, wire.exchange
        with self.exchange.changed:
            self.queues: defaultdict[Any, Queue] = self.exchange.__dict__.setdefault("queues", defaultdict(Queue))

    def rank(self) -> int:
        return self.wire.rank

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Handle:
        return self._queue("send", to, tensors[0])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Handle:
        return self._queue("recv", source, tensors[0])

    def _queue(self, what: str, peer: int, x: Tensor) -> Handle:
        with self.exchange.changed:
            queue = self._of(what, self.wire.rank, peer)
            queue.waiting.append((what, self.wire.rank, peer, x))
            queue.n_queued += 1
            number = queue.n_queued
            while any(self._meet(queue) for queue in list(self.queues.values()) if queue.waiting):
                self.exchange.changed.notify_all()
        return Handle(self.exchange, lambda: queue.n_through >= number, f"{what} of rank {self.wire.rank} with {peer}")

    def _of(self, what: str, rank: int, peer: int) -> Queue:
        upwards = peer > rank if what == "send" else rank > peer
        return self.queues[self.wire.axis, self.wire.ranks, rank, upwards]

    def _meet(self, queue: Queue) -> bool:
        what, rank, peer, x = queue.waiting[0]
        other = self._of("recv" if what == "send" else "send", peer, rank)
        if not other.waiting or other.waiting[0][2] != rank or other.waiting[0][0] == what:
            return False
        theirs = other.waiting[0][3]
        source, into = (x, theirs) if what == "send" else (theirs, x)
        assert source.numel() == into.numel(), f"{source.numel()} bytes met a receive of {into.numel()}"
        into.copy_(source)
        for side in (queue, other):
            side.waiting.popleft()
            side.n_through += 1
        return True


class OnGpus(Native):
    """labkit's wire between GPUs. Collectives are made of messages here: threads have no NCCL."""

    def __init__(self, wire: LocalWire):
        self.wire = wire
        super().__init__(Pair(Lanes(wire), Letters(wire)), "cpu", len(wire.ranks))

    def along(self, world: Group, axis: str, ranks: tuple[int, ...], rank: int) -> Group:
        """A group of some of the world's ranks, as a mesh wants it."""
        return over(type(self), local.group_on(self.wire.exchange, axis, ranks, rank, Ledger()), world.ledger)


class OnLanes(OnGpus):
    """The wire that gives payloads to NCCL, each when its header has come, and into a new tensor. A header's tag is a
    multiple of 1,024 (labkit/comm/message.py)."""

    reads_late = True  # no payload may travel in a header, which lies in host memory

    def isend(self, x: Tensor, to: int, tag: int) -> Any:
        return super().isend(x, to, tag) if tag % 1024 == 0 else GlooMessage(self.pg.send([x.clone()], to, 0), x)

    def irecv(self, buffer: Tensor, source: int, tag: int) -> Any:
        return super().irecv(buffer, source, tag) if tag % 1024 == 0 else GlooMessage(self.pg.recv([buffer], source, 0))

    def receiving(self, source: int, tag: int, into: Tensor | None, device: str) -> Receiving:
        return Receiving(self, source, tag, None, device)


def over(kind: type[OnGpus], group: Group, ledger: Ledger) -> Group:
    return Group(group.axis, group.ranks, group.rank, kind(group.wire), group.algorithms, ledger)


def on_gpus(group: Group) -> Group:
    """A group between threads, on labkit's wire between GPUs."""
    return over(OnGpus, group, group.ledger)


def on_lanes(group: Group) -> Group:
    """The same, with payloads on NCCL."""
    return over(OnLanes, group, group.ledger)
