"""The switch: routes messages between ranks, computes collectives, and knows which rank waits for which.

A rank blocks only while it waits for an answer of the switch. So when every rank that has not finished waits, and no
answer can be given, that is a deadlock. It is noticed at once and for certain, without a time limit.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from labkit.comm.message import DTYPES, EAGER_BYTES, HEADER, MOST_DIMS
from labkit.course.judge import late_imports
from labkit.course.judge.judge_wire import ASIDE, PIECE_BYTES, ring_bytes, send
from labkit.course.judge.run_record import Event, Race, Wait

MOST_BYTES = 256 << 20
"""A rank that sends more than this at once is taken for broken, and a run whose ranks leave more than this with the
judge, in messages that nobody takes."""
MOST_HEAD_BYTES = 256 << 10
MOST_EVENTS = 20_000
"""No exercise needs so many messages, receives, collectives and marks; a run that has more ends."""
SAID = (
    "begin",
    "send",
    "hand",
    "changed",
    "post",
    "gather",
    "wait",
    "done",
    "still",
    "mark",
    "weigh",
    "resume",
    "end",
    "print",
)
MOST_PRINTED = 20_000


class Flood(Exception):
    """The ranks have said more than the judge keeps."""


@dataclass
class Parcel:
    """What one rank sends in one operation: `data` is None until its bytes have been read, `free` is True when the
    sender need not wait any longer."""

    rank: int
    number: int
    n_bytes: int
    signature: tuple[Any, ...] = ()
    data: bytes | None = None
    free: bool = False


class Switch:
    """`lines` are the pipes by rank. `take(rank)` reads one message of a rank and does what follows from it.

    `look(rank, weighed)` is called when a rank waits for an answer and can do nothing else, before it gets one."""

    def __init__(self, lines: Sequence[Connection], look: Callable[[int, str], None] = lambda rank, moment: None):
        self.lines, self.began, self.look = lines, time.perf_counter(), look
        self.events: list[Event] = []
        self.sent: dict[tuple[Any, ...], deque[Parcel]] = defaultdict(deque)
        self.posted: dict[tuple[Any, ...], deque[tuple[int, int]]] = defaultdict(deque)
        self.gathered: dict[tuple[Any, ...], list[Parcel]] = defaultdict(list)
        self.awaited: dict[tuple[int, int], tuple[Parcel, tuple[Any, ...]]] = {}
        self.ready: dict[tuple[int, int], bytes | str] = {}
        self.waiting: dict[int, tuple[int, int]] = {}
        self.names: dict[tuple[int, int], str] = {}
        self.begun: dict[tuple[int, int], Wait] = {}
        self.small: dict[tuple[Any, ...], deque[Parcel]] = defaultdict(deque)
        self.expected: Counter[tuple[Any, ...]] = Counter()
        self.heads: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.races: list[Race] = []
        self.mismatch = ""
        self.kept_bytes = self.n_said = 0
        self.credit: Counter[int] = Counter()
        self.printed = [""] * len(lines)
        self.last: dict[int, tuple[list[Any], bytes]] = {}

    def take(self, rank: int) -> bool:
        """Read one message of a rank. True if it was its last (`last[rank]`). EOFError if the rank is gone, Flood if
        the ranks have said too much."""
        *head, n_bytes = json.loads(self.lines[rank].recv_bytes(MOST_HEAD_BYTES))
        data = self._pieces(rank, n_bytes or 0)
        kind, *rest = head
        if kind in ("result", "failed"):
            self.last[rank] = (head, data)
            return True
        if kind == "late" and not late_imports.here():
            raise late_imports.Late
        if kind not in SAID:
            raise ValueError(f"a rank cannot say {kind!r}")
        getattr(self, f"_{kind}")(rank, data, *rest)
        return False

    def _pieces(self, rank: int, n_bytes: int) -> bytes:
        if n_bytes > MOST_BYTES:
            raise Flood(f"{n_bytes:,} bytes at once")
        pieces, left = [], n_bytes
        while left > 0:
            pieces.append(self.lines[rank].recv_bytes(PIECE_BYTES))
            left -= len(pieces[-1])
        return b"".join(pieces)

    @property
    def stuck(self) -> bool:
        """True if every rank that has not finished waits for something that cannot come."""
        unfinished = [rank for rank in range(len(self.lines)) if rank not in self.last]
        return bool(unfinished) and all(rank in self.waiting for rank in unfinished)

    def waits(self) -> dict[int, Wait]:
        """For each waiting rank, the message or collective that it waits for."""
        return {rank: Wait(self.names[rank, number], line) for rank, (number, line) in self.waiting.items()}

    def undelivered(self) -> dict[tuple[int, int], int]:
        """Messages that nobody received, by (source, to)."""
        return _counted(self.sent)

    def unanswered(self) -> dict[tuple[int, int], int]:
        """Receives for which no message came, by (source, to). Who asks under many tags reads bits from which of them
        is answered."""
        return _counted(self.posted)

    def unwaited(self) -> dict[int, list[Wait]]:
        """For each rank, the operations that its attempt has started and never waited for, with the lines that started
        them. Its tensors may still be read or written to after the attempt has returned."""
        left: dict[int, list[Wait]] = defaultdict(list)
        for (rank, _), operation in self.begun.items():
            left[rank].append(operation)
        return dict(left)

    # -- what ranks say ----------------------------------------------------------------------------------------------

    def _begin(self, rank: int, data: bytes) -> None:
        self.look(rank, "begin")
        self._reply(rank, ["there"])

    def _weigh(self, rank: int, data: bytes) -> None:
        self.look(rank, "weigh")
        self._reply(rank, ["there"])

    def _end(self, rank: int, data: bytes) -> None:
        self.look(rank, "end")
        self._reply(rank, ["there"])

    def _resume(self, rank: int, data: bytes) -> None:
        self.look(rank, "resume")
        self._reply(rank, ["there"])

    def _send(self, rank: int, data: bytes, number: int, axis: str, to: int, tag: int, size: int, line: int) -> None:
        parcel, key = Parcel(rank, number, size), (axis, rank, to, tag)
        if tag % 1024:  # a payload; its header has gone before
            announced = self.credit[rank] - size
            self.credit[rank] = max(0, announced)
            if announced < 0:  # a payload that no header has announced
                self._event(rank, "message", "send", to, -announced, axis, tag >> 11, line)
            if size <= EAGER_BYTES:
                self.small[axis, rank, to, tag >> 10].append(parcel)
        self._name(rank, number, f"rank {to} to receive its message (tag {tag >> 11})", axis, line, tag % 1024 == 0)
        self.sent[key].append(parcel)
        self.awaited[rank, number] = parcel, (key, line)

    def _hand(self, rank: int, data: bytes, number: int) -> None:
        parcel, (key, *rest) = self.awaited.pop((rank, number))
        if len(data) != parcel.n_bytes:
            raise ValueError(f"{len(data)} bytes came where {parcel.n_bytes} were announced")
        parcel.data = data
        self._keep(len(data))
        if len(key) == 3:
            self._work_out(key)
            return
        axis, _, to, tag = key
        if tag % 1024 == 0:
            announced = _announced(data)
            extra = len(data) if any(data[128:]) else _said_by_sizes(_sizes(data))
            self._event(rank, "message", "send", to, announced + extra, axis, tag >> 11, *rest)
            self.credit[rank] += announced
        self._match(key)
        self._free((axis, rank, to, tag >> 10))

    def _changed(self, rank: int, data: bytes, number: int, line: int) -> None:
        self.races.append(Race(rank, self.names[rank, number], line))

    def _post(self, rank: int, data: bytes, number: int, axis: str, source: int, tag: int, line: int) -> None:
        self._said_more()
        self._name(rank, number, f"a message from rank {source} (tag {tag >> 11})", axis, line, tag % 1024 == 0)
        key = (axis, source, rank, tag)
        self.posted[key].append((rank, number))
        self._match(key)

    def _match(self, key: tuple[Any, ...]) -> None:
        while self.sent[key] and self.posted[key]:
            data = self.sent[key][0].data
            if data is None:  # its bytes are still to be read
                return
            parcel, (to, receiving) = self.sent[key].popleft(), self.posted[key].popleft()
            if key[-1] % 1024 == 0:
                self.heads[to, receiving] = ("arrival", "recv", key[1], _announced(data), key[0], key[-1] >> 11, 0)
                stream = (*key[:3], key[-1] >> 10)
                self.expected[stream] += 0 < _announced(data) <= EAGER_BYTES
                self._free(stream)
            if not parcel.free:
                self._give(parcel.rank, parcel.number, b"")
            self._give(to, receiving, data)

    def _free(self, stream: tuple[Any, ...]) -> None:
        """A small payload is its sender's again as soon as its header is taken, as if it were a part of it."""
        while self.expected[stream] and self.small[stream] and self.small[stream][0].data is not None:
            parcel = self.small[stream].popleft()
            self.expected[stream] -= 1
            if not parcel.free:
                parcel.free = True
                self._give(parcel.rank, parcel.number, b"")

    def _gather(
        self, rank: int, data: bytes, number: int, verb: str, axis: str, members: list[int], seq: int, op: str,
        source: int, dtype: str, shape: list[int], line: int,
    ) -> None:  # fmt: skip
        self._name(rank, number, f"the others in {verb}", axis, line)
        size = math.prod(shape) * getattr(torch, dtype).itemsize
        n_bytes = ring_bytes(verb, len(members), size, rank == source) + _said_by_sizes(shape)
        self._event(rank, "collective", verb, None, n_bytes, axis, line=line)
        key = (axis, tuple(members), seq)
        parcel = Parcel(rank, number, size, (verb, op, source, dtype, tuple(shape)))
        self.gathered[key].append(parcel)
        self.awaited[rank, number] = parcel, (key,)
        requests = self.gathered[key]
        first, other = (
            requests[0],
            next((request for request in requests if request.signature != requests[0].signature), None),
        )
        if other is not None:  # also for a rank that comes after the mismatch was found: it must not wait either
            calls = ", ".join(_told(request) for request in sorted((first, other), key=lambda part: part.rank))
            self.mismatch = f"{calls}, in collective {seq} of the {axis} group"
            for request in requests:
                self._give(request.rank, request.number, f"collectives do not match: {self.mismatch}")

    def _work_out(self, key: tuple[Any, ...]) -> None:
        """Answer a collective when all of its members have handed over their parts."""
        _, members, _ = key
        requests = sorted(self.gathered[key], key=lambda request: members.index(request.rank))
        if len(requests) < len(members) or any(request.data is None for request in requests) or self.mismatch:
            return
        verb, op, source, *_ = requests[0].signature
        del self.gathered[key]
        self._keep(-sum(request.n_bytes for request in requests))
        for request, result in zip(requests, _worked_out(verb, op, members.index(source), list(map(_tensor, requests))),
                                   strict=True):  # fmt: skip
            answer = _bytes(result)
            self._keep(len(answer))
            self._give(request.rank, request.number, answer)

    def _wait(self, rank: int, data: bytes, number: int, line: int) -> None:
        self.waiting[rank] = (number, line)
        self.begun.pop((rank, number), None)
        self.look(rank, "wait")
        self._answer(rank)

    def _done(self, rank: int, data: bytes, number: int) -> None:
        self._reply(rank, [(rank, number) in self.ready])

    def _still(self, rank: int, data: bytes) -> None:
        others = (other for other in range(len(self.lines)) if other != rank)
        self._reply(rank, [all(other in self.waiting or other in self.last for other in others)])

    def _mark(self, rank: int, data: bytes, words: str, line: int) -> None:
        self._event(rank, "mark", words, line=line)

    def _print(self, rank: int, data: bytes, text: str) -> None:
        self.printed[rank] = (self.printed[rank] + text)[:MOST_PRINTED]

    def _name(self, rank: int, number: int, words: str, axis: str, line: int, whole: bool = True) -> None:
        """Give an operation its words. `whole` is False for a payload, which is waited for together with its header."""
        self.names[rank, number] = words
        if whole and (axis != ASIDE or line):
            self.begun[rank, number] = Wait(words, line)

    # -- what ranks are told -----------------------------------------------------------------------------------------

    def _give(self, rank: int, number: int, content: bytes | str) -> None:
        self.ready[rank, number] = content
        self._answer(rank)

    def _answer(self, rank: int) -> None:
        number, _ = self.waiting.get(rank, (0, 0))
        if (rank, number) in self.ready:
            del self.waiting[rank]
            content = self.ready.pop((rank, number))
            self._keep(-len(content) if isinstance(content, bytes) else 0)
            if (rank, number) in self.heads:  # who has asked for a message in advance has it when it waits for it
                self._event(rank, *self.heads.pop((rank, number)))
            if isinstance(content, str):
                self._reply(rank, ["refused", content])
            else:
                self._reply(rank, ["there"], content)

    def _reply(self, rank: int, head: list[Any], data: bytes = b"") -> None:
        try:
            send(self.lines[rank], head, data or None)
        except OSError:  # the rank has died, which its closed pipe will show
            return

    def _event(
        self, rank: int, kind: str, what: str, to: int | None = None, n_bytes: int = 0, axis: str = "world",
        tag: int = 0, line: int = 0,
    ) -> None:  # fmt: skip
        self._said_more()
        at = time.perf_counter() - self.began
        self.events.append(Event(len(self.events), at, rank, kind, what, to, n_bytes, axis, tag, line))

    def _said_more(self) -> None:
        self.n_said += 1
        if self.n_said > MOST_EVENTS:
            raise Flood(f"more than {MOST_EVENTS:,} messages, receives, collectives and marks")

    def _keep(self, n_bytes: int) -> None:
        self.kept_bytes += n_bytes
        if self.kept_bytes > MOST_BYTES:
            raise Flood(f"{self.kept_bytes:,} bytes are on their way, and nobody takes them")


def _counted(parts: Mapping[tuple[Any, ...], Collection[Any]]) -> dict[tuple[int, int], int]:
    counts: Counter[tuple[int, int]] = Counter()
    for (_, source, to, tag), some in parts.items():
        if tag % 1024 == 0:  # a header; its payload travels under another tag (comm/message.py)
            counts[source, to] += len(some)
    return {pair: count for pair, count in counts.items() if count}


def _announced(slab: bytes) -> int:
    return math.prod(_sizes(slab)) * DTYPES[HEADER.unpack_from(slab)[0]].itemsize


def _sizes(slab: bytes) -> list[int]:
    _, dims, *sizes = HEADER.unpack_from(slab)
    return list(sizes[:MOST_DIMS][:dims])


def _said_by_sizes(sizes: Sequence[int]) -> int:
    """Bytes that could hide in the shape of a tensor without numbers; two are free, for an empty part of a tensor."""
    bits = sum(size.bit_length() for size in sizes) if 0 in sizes else 0
    return bits // 8 if bits > 16 else 0


def _told(request: Parcel) -> str:
    verb, op, source, dtype, shape = request.signature
    detail = f" from rank {source}" if verb == "broadcast" else f" {op}" if op != "sum" else ""
    return f"rank {request.rank} called {verb}{detail} on {dtype} {tuple(shape)}"


def _tensor(request: Parcel) -> Tensor:
    dtype, shape = getattr(torch, request.signature[3]), request.signature[4]
    raw = torch.frombuffer(bytearray(request.data), dtype=torch.uint8) if request.data else torch.empty(0)
    return raw.view(dtype).view(shape) if request.data else torch.empty(shape, dtype=dtype)


def _worked_out(verb: str, op: str, source: int, parts: list[Tensor]) -> list[Tensor]:
    n = len(parts)
    if verb in ("all_reduce", "reduce_scatter"):
        total = parts[0].clone()
        for part in parts[1:]:  # in the tensors' own dtype and in rank order, so that the bits are always the same
            total = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)(total, part)
        total = total / n if op == "mean" else total
        return [total] * n if verb == "all_reduce" else list(total.tensor_split(n))
    if verb == "all_gather":
        return [torch.cat(parts)] * n
    if verb == "broadcast":
        return [parts[source]] * n
    if verb == "all_to_all":
        return [torch.cat([part.chunk(n)[place] for part in parts]) for place in range(n)]
    return parts


def _bytes(x: Tensor) -> bytes:
    return bytes(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) if x.numel() else b""
