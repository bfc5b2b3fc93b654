"""The switch: routes messages between ranks, computes collectives, and knows which rank waits for which.

A rank blocks only while it waits for an answer of the switch. So when every rank that has not finished waits, and no
answer can be given, that is a deadlock. It is noticed at once and for certain, without a time limit.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.comm.message import DTYPES, EAGER_BYTES, HEADER, MOST_DIMS
from labkit.course.judge.judge_wire import ring_bytes
from labkit.course.judge.run_record import Event, Wait

MOST_BYTES = 256 << 20
"""A rank that sends more than this at once is taken for broken."""
MOST_EVENTS = 20_000
SAID = ("send", "post", "gather", "wait", "done", "mark", "print")
MOST_PRINTED = 20_000


class Request(NamedTuple):
    """One rank's part in a collective."""

    rank: int
    number: int
    signature: tuple[Any, ...]
    data: bytes


class Switch:
    """`lines` are the pipes by rank. `take(rank)` reads one message of a rank and does what follows from it."""

    def __init__(self, lines: Sequence[Connection]):
        self.lines, self.began = lines, time.perf_counter()
        self.events: list[Event] = []
        self.sent: dict[tuple[Any, ...], deque[tuple[int, int, bytes]]] = defaultdict(deque)
        self.posted: dict[tuple[Any, ...], deque[tuple[int, int]]] = defaultdict(deque)
        self.gathered: dict[tuple[Any, ...], list[Request]] = defaultdict(list)
        self.ready: dict[tuple[int, int], bytes | str] = {}
        self.waiting: dict[int, tuple[int, int]] = {}
        self.names: dict[tuple[int, int], str] = {}
        self.mismatch = ""
        self.credit: Counter[int] = Counter()
        self.printed = [""] * len(lines)
        self.last: dict[int, tuple[list[Any], bytes]] = {}

    def take(self, rank: int) -> bool:
        """Read one message of a rank. True if it was its last (`last[rank]`). EOFError if the rank is gone."""
        *head, follows = json.loads(self.lines[rank].recv_bytes(MOST_BYTES))
        data = self.lines[rank].recv_bytes(MOST_BYTES) if follows else b""
        kind, *rest = head
        if kind in ("result", "failed"):
            self.last[rank] = (head, data)
            return True
        if kind not in SAID:
            raise ValueError(f"a rank cannot say {kind!r}")
        getattr(self, f"_{kind}")(rank, data, *rest)
        return False

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
        lost: Counter[tuple[int, int]] = Counter()
        for (_, source, to, tag), messages in self.sent.items():
            if tag % 1024 == 0:  # a header; its payload travels under another tag (comm/message.py)
                lost[source, to] += len(messages)
        return {pair: count for pair, count in lost.items() if count}

    # -- what ranks say ----------------------------------------------------------------------------------------------

    def _send(self, rank: int, data: bytes, number: int, axis: str, to: int, tag: int, line: int) -> None:
        announced = _announced(data) if tag % 1024 == 0 else self.credit[rank] - len(data)
        if tag % 1024 == 0:
            extra = len(data) if _smuggles(data, announced) else _said_by_sizes(_sizes(data))
            self._event(rank, "message", "send", to, announced + extra, axis, tag >> 11, line)
            self.credit[rank] += announced if announced > EAGER_BYTES else 0  # a small payload came with its header
        else:
            self.credit[rank] = max(0, announced)
            if announced < 0:  # a payload that no header has announced
                self._event(rank, "message", "send", to, -announced, axis, tag >> 11, line)
        self.names[rank, number] = f"rank {to} to receive its message (tag {tag >> 11})"
        key = (axis, rank, to, tag)
        self.sent[key].append((rank, number, data))
        self._match(key)

    def _post(self, rank: int, data: bytes, number: int, axis: str, source: int, tag: int, size: int) -> None:
        self.names[rank, number] = f"a message from rank {source} (tag {tag >> 11})"
        key = (axis, source, rank, tag)
        self.posted[key].append((rank, number))
        self._match(key)

    def _match(self, key: tuple[Any, ...]) -> None:
        while self.sent[key] and self.posted[key]:
            source, sending, data = self.sent[key].popleft()
            to, receiving = self.posted[key].popleft()
            if key[-1] % 1024 == 0:
                self._event(to, "arrival", "recv", source, _announced(data), key[0], key[-1] >> 11, 0)
            self._give(source, sending, b"")
            self._give(to, receiving, data)

    def _gather(
        self, rank: int, data: bytes, number: int, verb: str, axis: str, members: list[int], seq: int, op: str,
        source: int, dtype: str, shape: list[int], line: int,
    ) -> None:  # fmt: skip
        self.names[rank, number] = f"the others in {verb}"
        n_bytes = ring_bytes(verb, len(members), len(data), rank == source) + _said_by_sizes(shape)
        self._event(rank, "collective", verb, None, n_bytes, axis, line=line)
        key = (axis, tuple(members), seq)
        self.gathered[key].append(Request(rank, number, (verb, op, source, dtype, tuple(shape)), data))
        requests = self.gathered[key]
        first, other = (
            requests[0],
            next((request for request in requests if request.signature != requests[0].signature), None),
        )
        if other is not None:  # also for a rank that comes after the mismatch was found: it must not wait either
            calls = ", ".join(_told(request) for request in sorted((first, other)))
            self.mismatch = f"{calls}, in collective {seq} of the {axis} group"
            for request in requests:
                self._give(request.rank, request.number, f"collectives do not match: {self.mismatch}")
        elif len(requests) == len(members):
            parts = [_tensor(request) for request in sorted(requests, key=lambda request: members.index(request.rank))]
            for place, result in enumerate(_worked_out(verb, op, members.index(source), parts)):
                request = next(candidate for candidate in requests if candidate.rank == members[place])
                self._give(request.rank, request.number, _bytes(result))

    def _wait(self, rank: int, data: bytes, number: int, line: int) -> None:
        self.waiting[rank] = (number, line)
        self._answer(rank)

    def _done(self, rank: int, data: bytes, number: int) -> None:
        self._reply(rank, [(rank, number) in self.ready])

    def _mark(self, rank: int, data: bytes, words: str, line: int) -> None:
        self._event(rank, "mark", words, line=line)

    def _print(self, rank: int, data: bytes, text: str) -> None:
        self.printed[rank] = (self.printed[rank] + text)[:MOST_PRINTED]

    # -- what ranks are told -----------------------------------------------------------------------------------------

    def _give(self, rank: int, number: int, content: bytes | str) -> None:
        self.ready[rank, number] = content
        self._answer(rank)

    def _answer(self, rank: int) -> None:
        number, _ = self.waiting.get(rank, (0, 0))
        if (rank, number) in self.ready:
            del self.waiting[rank]
            content = self.ready.pop((rank, number))
            if isinstance(content, str):
                self._reply(rank, ["refused", content])
            else:
                self._reply(rank, ["there"], content)

    def _reply(self, rank: int, head: list[Any], data: bytes = b"") -> None:
        try:
            self.lines[rank].send_bytes(json.dumps([*head, bool(data)]).encode())
            if data:
                self.lines[rank].send_bytes(data)
        except OSError:  # the rank has died, which its closed pipe will show
            return

    def _event(
        self, rank: int, kind: str, what: str, to: int | None = None, n_bytes: int = 0, axis: str = "world",
        tag: int = 0, line: int = 0,
    ) -> None:  # fmt: skip
        if len(self.events) < MOST_EVENTS:
            at = time.perf_counter() - self.began
            self.events.append(Event(len(self.events), at, rank, kind, what, to, n_bytes, axis, tag, line))


def _announced(slab: bytes) -> int:
    return math.prod(_sizes(slab)) * DTYPES[HEADER.unpack_from(slab)[0]].itemsize


def _sizes(slab: bytes) -> list[int]:
    _, dims, *sizes = HEADER.unpack_from(slab)
    return list(sizes[:MOST_DIMS][:dims])


def _said_by_sizes(sizes: Sequence[int]) -> int:
    """Bytes that could hide in the shape of a tensor without numbers; two are free, for an empty part of a tensor."""
    bits = sum(size.bit_length() for size in sizes) if 0 in sizes else 0
    return bits // 8 if bits > 16 else 0


def _smuggles(slab: bytes, n_bytes: int) -> bool:
    """True if the first page of a message holds more than its header announces (comm/message.py)."""
    return any(slab[128 + n_bytes :]) if n_bytes <= EAGER_BYTES else any(slab[128:])


def _told(request: Request) -> str:
    verb, op, source, dtype, shape = request.signature
    more = f" from rank {source}" if verb == "broadcast" else f" {op}" if op != "sum" else ""
    return f"rank {request.rank} called {verb}{more} on {dtype} {tuple(shape)}"


def _tensor(request: Request) -> Tensor:
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
