"""The judge's wire: every message and every collective of a judged rank goes through the judge.

    rank 0 ──┐            one pipe for each rank; the judge passes messages on, computes collectives, and records
    rank 1 ──┤ judge      all that went by. A rank can send nothing unseen, and sees only what was sent to it.
    rank 2 ──┘

What is on its way belongs to the wire until `wait` returns. So the bytes are read at a moment that is drawn, between
the start and the end of `wait`, and looked at again at its end: who writes to them meanwhile is told, with the line.

A collective counts as the bytes that each rank would send in a ring, as with gloo and NCCL (comm/native.py).
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from labkit.comm import by_messages
from labkit.comm.checked_loan import mark_of
from labkit.comm.group import VERBS, Group
from labkit.comm.ledger import Ledger
from labkit.plan.words import dtype_name

ATTEMPT = "<attempt>"
HELPERS = "<helpers>"
"""The file names under which an attempt, and the other code of the notebook that it uses, are compiled."""
PIECE_BYTES = 64 << 10
ASIDE = "aside"
"""The axis of what the exercise itself sends, and not the attempt."""


def send(connection: Connection, head: Sequence[Any], data: Any = None) -> None:
    """Send a head of plain data and, if `data` is not None, its bytes behind it, in pieces: memory for a whole message
    would be counted as that of the rank."""
    raw = None if data is None else memoryview(data)
    connection.send_bytes(json.dumps([*head, None if raw is None else raw.nbytes]).encode())
    for at in range(0, 0 if raw is None else raw.nbytes, PIECE_BYTES):
        assert raw is not None
        connection.send_bytes(raw[at : at + PIECE_BYTES])


class Payload:
    """A tensor that is on its way: what it was at the start, and whether the judge has read it."""

    __slots__ = ("kept", "mark", "read", "reported")

    def __init__(self, kept: Tensor):
        self.kept, self.mark, self.read, self.reported = kept, mark_of(kept, None), False, False

    @property
    def gone(self) -> bool:
        """True if its memory has been given back (`resize_(0)`)."""
        end = self.kept.storage_offset() + self.kept.numel()
        return self.kept.untyped_storage().nbytes() < end * self.kept.element_size()

    @property
    def changed(self) -> bool:
        """True if its bytes are no longer those of the start."""
        return self.gone or mark_of(self.kept, None) != self.mark

    def taken(self) -> Any:
        """Its bytes as they are now; not a copy."""
        self.read = True
        n_bytes = self.kept.nbytes
        return (
            bytes(n_bytes) if self.gone or not n_bytes else (ctypes.c_char * n_bytes).from_address(self.kept.data_ptr())
        )


class Line:
    """A rank's end of its pipe to the judge. A message is a head of plain data, and bytes if there are any.

    `under_way` has the payloads that were started and not waited for, by number."""

    __slots__ = ("connection", "dice", "numbers", "under_way", "weigh")

    def __init__(self, connection: Connection):
        self.connection, self.numbers, self.dice = connection, 0, random.Random()
        self.under_way: dict[int, Payload] = {}
        self.weigh: Callable[[], None] = lambda: None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies of this object and of anything that holds it: the end of a copy would close the pipe."""
        raise TypeError("a group cannot be copied while an exercise is judged")

    def tell(self, *head: Any, data: Any = None) -> None:
        """Send a message that needs no answer."""
        send(self.connection, head, data)

    def ask(self, *head: Any, into: Tensor | None = None, ends: int = 0) -> list[Any]:
        """Send a request and wait for the answer; bytes that come with it are put `into` a tensor. With the answer the
        operation of number `ends` is over. ValueError with the judge's reason if it refuses."""
        self.read_late()  # whoever waits for this rank must not wait for what it only says that it sends
        self.tell(*head)
        *answer, n_bytes = json.loads(self.connection.recv_bytes())
        if ends in self.under_way:  # the tensor is the caller's again, and is looked at before it gets the answer
            self.notice(ends)
            del self.under_way[ends]
        size = 0 if into is None else into.nbytes
        fits, at = n_bytes in (None, 0, size), 0
        while at < (n_bytes or 0):
            piece = self.connection.recv_bytes()
            if fits and into is not None:  # not with an operator of torch, which would count as the attempt's
                ctypes.memmove(into.data_ptr() + at, piece, len(piece))
            at += len(piece)
        if answer[0] == "refused":
            raise ValueError(answer[1])
        if size and n_bytes != size:
            raise ValueError(f"{n_bytes or 0} bytes came where {size} were expected")
        return answer

    def number(self) -> int:
        """A new number, which names one operation under way."""
        self.numbers += 1
        return self.numbers

    def start(self, number: int, payload: Tensor, at_once: bool = False) -> None:
        """A payload is on its way from now on. Its bytes are read now or later, as the dice fall."""
        self.under_way[number] = Payload(payload)
        if at_once or self.dice.random() < 0.4:
            self._read(number)

    def read_late(self) -> None:
        """Read what has not been read yet: this rank is about to wait, or has ended."""
        for number in self.under_way:
            self._read(number)

    def notice(self, *numbers: int) -> None:
        """Tell the judge which of these payloads (or of all) have changed while they were on their way, each once."""
        for number in numbers or tuple(self.under_way):
            payload = self.under_way.get(number)
            if payload is not None and not payload.reported and payload.changed:
                payload.reported = True
                self.tell("changed", number, line_of_attempt())

    def written(self, tensors: Iterable[Tensor]) -> None:
        """These tensors may have been written to: see whether anything has changed that lies in their memory."""
        places = {x.untyped_storage().data_ptr() for x in tensors if x.layout is torch.strided}
        self.notice(
            *(number for number, payload in self.under_way.items()
              if payload.kept.untyped_storage().data_ptr() in places), 0
        )  # fmt: skip

    def _read(self, number: int) -> None:
        payload = self.under_way[number]
        if not payload.read:
            self.tell("hand", number, data=payload.taken())


class Going:
    """An operation under way. `wait` blocks until the judge has matched it; data that arrives is put into `buffer`."""

    def __init__(self, line: Line, number: int, buffer: Tensor | None = None):
        self._line, self._number, self._buffer, self._over = line, number, buffer, False

    def wait(self) -> Tensor | None:
        """Block until the operation is done; return its buffer."""
        if not self._over:
            self._line.ask("wait", self._number, line_of_attempt(), into=self._buffer, ends=self._number)
            self._over = True
        return self._buffer

    def done(self) -> bool:
        """True if `wait` would return at once."""
        return self._over or bool(self._line.ask("done", self._number)[0])


class JudgeWire:
    """Messages and collectives of one group. Peers are indexes in the group; `ranks` are the members' places among the
    processes of the run, which is how the judge knows them."""

    reads_late = True

    def __init__(self, line: Line, axis: str, ranks: tuple[int, ...], rank: int):
        self._line, self.axis, self.ranks, self.rank, self.seq = line, axis, ranks, rank, 0
        self.weigh: Callable[[], None] = line.weigh
        self.bound = {name: getattr(self, name) for name in VERBS}
        self.__dict__.update(self.bound)  # one object each, so that `is` tells a swapped-in algorithm

    def isend(self, x: Tensor, to: int, tag: int) -> Going:
        """Start sending the bytes of x to group member `to`; a header is the wire's own, and is read at once."""
        number, head = self._line.number(), tag % 1024 == 0
        size = x.nbytes
        self._line.tell("send", number, self.axis, self.ranks[to], tag, size, line_of_attempt())
        self._line.start(number, x, head or self.axis == ASIDE)
        return Going(self._line, number)

    def irecv(self, buffer: Tensor, source: int, tag: int) -> Going:
        """Receive the next message with this source and tag into `buffer`."""
        number = self._line.number()
        self._line.tell("post", number, self.axis, self.ranks[source], tag, line_of_attempt())
        return Going(self._line, number, buffer)

    def mark(self, words: str) -> None:
        """Tell the judge how far the exercise has got; the words become an event in its record."""
        self._line.tell("mark", words, line_of_attempt())

    def others_wait(self) -> bool:
        """True if every other rank waits for an answer that the judge does not have, or has ended."""
        return bool(self._line.ask("still")[0])

    def along(self, world: Group, axis: str, ranks: tuple[int, ...], rank: int) -> Group:
        """A group of other `ranks`, global ones of `world`, over the same pipe."""
        places = tuple(self.ranks[world.ranks.index(other)] for other in ranks)
        return group_over(self._line, axis, places, rank, world.ledger)

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

    def all_to_all(self, x: Tensor, group: Group, **rows: Any) -> Tensor:
        """Part j of x goes to rank j.   [n*k, ...] -> [n*k, ...]; ragged parts are messages between the ranks"""
        if rows:
            return by_messages.all_to_all(x, group, **rows)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._whole("all_to_all", x, out, group)

    def barrier(self, x: Tensor, group: Group) -> Tensor:
        """Wait until every rank of the group has called this."""
        return self._whole("barrier", x, x, group)

    def all_reduce_start(self, x: Tensor, op: str) -> Going:
        """Start a sum of x over the group, in place."""
        return self._start("all_reduce", x, x, op)

    def reduce_scatter_start(self, x: Tensor, op: str) -> Going:
        """Start a reduce-scatter.   [n*k, ...] -> [k, ...]"""
        return self._start("reduce_scatter", x, torch.empty_like(x.tensor_split(len(self.ranks))[self.rank]), op)

    def all_gather_start(self, x: Tensor, into: Tensor | None) -> Going:
        """Start an all-gather.   [k, ...] -> [n*k, ...]"""
        whole = x.new_empty((len(self.ranks) * x.shape[0], *x.shape[1:])) if into is None else into
        return self._start("all_gather", x, whole)

    def _whole(self, verb: str, x: Tensor, out: Tensor, group: Group, op: str = "sum", source: int = 0) -> Tensor:
        group.ledger.charge(ring_bytes(verb, len(self.ranks), x.nbytes, self.rank == source))
        self._start(verb, x, out, op, source).wait()
        return out

    def _start(self, verb: str, x: Tensor, out: Tensor, op: str = "sum", source: int = 0) -> Going:
        number, self.seq = self._line.number(), self.seq + 1
        call = [verb, self.axis, self.ranks, self.seq, op, self.ranks[source], dtype_name(x.dtype), list(x.shape)]
        self._line.tell("gather", number, *call, line_of_attempt())
        self._line.start(number, x.detach().contiguous())
        return Going(self._line, number, out)


def group_over(line: Line, axis: str, places: tuple[int, ...], rank: int, ledger: Ledger) -> Group:
    """A group that talks through the judge's wire; `places` are its members' places among the processes of the run.

    Its global ranks are 1, 3, 5, ...: as in a group of every second rank of a larger world. Were they 0, 1, 2, ...,
    an attempt that takes a global rank for the rank in its group would pass, and fail in a mesh."""
    wire = JudgeWire(line, axis, places, rank)
    return Group(axis, tuple(1 + 2 * place for place in places), rank, wire, wire.bound, ledger)


def ring_bytes(verb: str, n_ranks: int, n_bytes: int, source: bool) -> int:
    """The bytes that a rank sends in a collective on `n_bytes` per rank, by the law of comm/native.py."""
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
    """The line of the attempt that is executing, the innermost; else a line of its helpers, or 0 if neither runs."""
    frame, helper = sys._getframe(1), 0
    while frame is not None:
        if frame.f_code.co_filename == ATTEMPT:
            return frame.f_lineno
        helper = helper or frame.f_lineno * (frame.f_code.co_filename == HELPERS)
        frame = frame.f_back  # type: ignore[assignment]
    return helper
