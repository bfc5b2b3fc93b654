"""The judge's wire: every message and every collective goes through the judge's hands, and nowhere else.

    rank 0 ──┐            one pipe for each rank; the judge passes messages on, works out collectives, and writes
    rank 1 ──┤ judge      down what went by. A rank cannot send what is not seen, or see what was not sent to it.
    rank 2 ──┘

A collective counts as the bytes that a ring would have each rank send, as with gloo and NCCL (comm/native.py).
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import VERBS, Group
from labkit.comm.ledger import Ledger

ATTEMPT = "<attempt>"
HELPERS = "<helpers>"
"""The file names under which an attempt, and what else of the notebook it uses, are compiled."""


class Line:
    """A rank's end of its pipe to the judge: a head of plain data, and bytes if there are any."""

    __slots__ = ("connection", "numbers", "weigh")

    def __init__(self, connection: Connection):
        self.connection, self.numbers = connection, 0
        self.weigh: Callable[[], None] = lambda: None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Not to be copied, nor anything that holds it: a copy's memory would show it."""
        raise TypeError("a group cannot be copied while an exercise is judged")

    def tell(self, *head: Any, data: bytes | None = None) -> None:
        """Say something; nothing comes back."""
        self.connection.send_bytes(json.dumps([*head, data is not None]).encode())
        if data is not None:
            self.connection.send_bytes(data)

    def ask(self, *head: Any) -> tuple[list[Any], bytes]:
        """Ask, and wait for the answer. ValueError with the judge's words if it refuses."""
        self.tell(*head)
        answer = json.loads(self.connection.recv_bytes())
        data = self.connection.recv_bytes() if answer[-1] else b""
        if answer[0] == "refused":
            raise ValueError(answer[1])
        return answer, data

    def number(self) -> int:
        """A name for something under way."""
        self.numbers += 1
        return self.numbers


class Going:
    """Something under way: `wait` until the judge has matched it; what comes lands in `buffer`."""

    def __init__(self, line: Line, number: int, buffer: Tensor | None = None):
        self._line, self._number, self._buffer, self._over = line, number, buffer, False

    def wait(self) -> Tensor | None:
        """Block until it is done."""
        if not self._over:
            _, data = self._line.ask("wait", self._number, line_of_attempt())
            self._over = True
            if self._buffer is not None and self._buffer.numel():
                size = self._buffer.numel() * self._buffer.element_size()
                if len(data) != size:
                    raise ValueError(f"{len(data)} bytes came where {size} were expected")
                # not by an operator of torch: what the wire does for itself is not the attempt's memory
                ctypes.memmove(self._buffer.data_ptr(), data, len(data))
        return self._buffer

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._over or bool(self._line.ask("done", self._number)[0][0])


class JudgeWire:
    """Messages and collectives of one group. Peers are indexes in the group."""

    def __init__(self, line: Line, axis: str, ranks: tuple[int, ...], rank: int):
        self._line, self.axis, self.ranks, self.rank, self.seq = line, axis, ranks, rank, 0
        self.weigh: Callable[[], None] = line.weigh
        self.bound = {name: getattr(self, name) for name in VERBS}
        self.__dict__.update(self.bound)  # one object each, so that `is` tells a swapped-in algorithm

    def isend(self, x: Tensor, to: int, tag: int) -> Going:
        """Hand the bytes of x to the judge, for member `to`."""
        number = self._line.number()
        self._line.tell("send", number, self.axis, self.ranks[to], tag, line_of_attempt(), data=_raw(x))
        return Going(self._line, number)

    def irecv(self, buffer: Tensor, source: int, tag: int) -> Going:
        """Expect the next message of this source and tag in `buffer`."""
        number = self._line.number()
        self._line.tell("post", number, self.axis, self.ranks[source], tag, buffer.numel())
        return Going(self._line, number, buffer)

    def mark(self, words: str) -> None:
        """Tell the judge how far the exercise has got."""
        self._line.tell("mark", words, line_of_attempt())

    def along(self, world: Group, axis: str, ranks: tuple[int, ...], rank: int) -> Group:
        """The group of `ranks`, over the same pipe."""
        return group_over(self._line, axis, ranks, rank, world.ledger)

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, group: Group, op: str = "sum") -> Tensor:
        """Sum of x over the group.   same shape"""
        return self._whole("all_reduce", x, torch.empty_like(x, memory_format=torch.contiguous_format), group, op)

    def reduce_scatter(self, x: Tensor, group: Group, op: str = "sum") -> Tensor:
        """This rank's part of the sum.   [n*k, ...] -> [k, ...]"""
        return self._whole("reduce_scatter", x, torch.empty_like(x.tensor_split(len(self.ranks))[self.rank]), group, op)

    def all_gather(self, x: Tensor, group: Group) -> Tensor:
        """Everybody's x, joined along dim 0.   [k, ...] -> [n*k, ...]"""
        return self._whole("all_gather", x, x.new_empty((len(self.ranks) * x.shape[0], *x.shape[1:])), group)

    def broadcast(self, x: Tensor, group: Group, source: int = 0) -> Tensor:
        """The source's x.   same shape"""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._whole("broadcast", x, out, group, source=source)

    def all_to_all(self, x: Tensor, group: Group) -> Tensor:
        """Part j of x goes to rank j.   [n*k, ...] -> [n*k, ...]"""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._whole("all_to_all", x, out, group)

    def barrier(self, x: Tensor, group: Group) -> Tensor:
        """Wait for everybody."""
        return self._whole("barrier", x, x, group)

    def all_reduce_start(self, x: Tensor, op: str) -> Going:
        """In place, under way."""
        return self._start("all_reduce", x, x, op)

    def reduce_scatter_start(self, x: Tensor, op: str) -> Going:
        """Under way.   [n*k, ...] -> [k, ...]"""
        return self._start("reduce_scatter", x, torch.empty_like(x.tensor_split(len(self.ranks))[self.rank]), op)

    def all_gather_start(self, x: Tensor, into: Tensor | None) -> Going:
        """Under way.   [k, ...] -> [n*k, ...]"""
        whole = x.new_empty((len(self.ranks) * x.shape[0], *x.shape[1:])) if into is None else into
        return self._start("all_gather", x, whole)

    def _whole(self, verb: str, x: Tensor, out: Tensor, group: Group, op: str = "sum", source: int = 0) -> Tensor:
        group.ledger.charge(ring_bytes(verb, len(self.ranks), x.numel() * x.element_size(), self.rank == source))
        self._start(verb, x, out, op, source).wait()
        return out

    def _start(self, verb: str, x: Tensor, out: Tensor, op: str = "sum", source: int = 0) -> Going:
        number, self.seq = self._line.number(), self.seq + 1
        what = [verb, self.axis, self.ranks, self.seq, op, self.ranks[source], str(x.dtype)[6:], list(x.shape)]
        self._line.tell("gather", number, *what, line_of_attempt(), data=_raw(x))
        return Going(self._line, number, out)


def group_over(line: Line, axis: str, ranks: tuple[int, ...], rank: int, ledger: Ledger) -> Group:
    """A group whose wire is the judge's."""
    wire = JudgeWire(line, axis, ranks, rank)
    return Group(axis, ranks, rank, wire, wire.bound, ledger)


def ring_bytes(verb: str, n_ranks: int, n_bytes: int, source: bool) -> int:
    """What a collective on `n_bytes` a rank counts as: the law of comm/native.py."""
    if verb == "all_gather":
        return (n_ranks - 1) * n_bytes
    if verb == "broadcast":
        return n_bytes * source
    if verb == "barrier":
        return 0
    if verb == "all_reduce":
        return 2 * (n_ranks - 1) * n_bytes // n_ranks
    return max((n_ranks - 1) * n_bytes // n_ranks, min(n_bytes, n_ranks - 1, 1))  # a single byte is not free


def line_of_attempt() -> int:
    """The innermost line of the attempt that is at work, 0 if none is; if only its helpers are, a line of those."""
    frame, helper = sys._getframe(1), 0
    while frame is not None:
        if frame.f_code.co_filename == ATTEMPT:
            return frame.f_lineno
        helper = helper or frame.f_lineno * (frame.f_code.co_filename == HELPERS)
        frame = frame.f_back  # type: ignore[assignment]
    return helper


def _raw(x: Tensor) -> bytes:
    whole = x.detach().contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size())
