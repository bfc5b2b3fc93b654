"""A wire between threads of one process: fast tests, and stepping through a collective in a single cell.

A message is read when its receiver asks for it, as on a real wire, and no copy is made before. Whoever changes a tensor
that is still on its way sees wrong numbers arrive, and a ValueError when it waits.

results = run_threads(lambda group: ring.all_reduce(torch.ones(3), group), n_ranks=4)
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from labkit.comm import by_messages, ring
from labkit.comm.group import Group
from labkit.comm.ledger import Ledger


class Exchange:
    """The place where threads meet: for each (axis, source, to, tag) sent messages and posted receives, in order."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.sent: dict[tuple[Any, ...], deque[_Message]] = defaultdict(deque)
        self.posted: dict[tuple[Any, ...], deque[_Expected]] = defaultdict(deque)
        self.failed: BaseException | None = None

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until `ready()`; RuntimeError if another rank has failed, or after the time-out."""
        with self.changed:
            self.changed.wait_for(lambda: ready() or self.failed is not None, self.timeout_s)
            if ready():
                return
            if self.failed is not None:
                raise RuntimeError(f"gave up in {what}: another rank has failed")
            raise RuntimeError(f"{what} has waited {self.timeout_s:g} s: nobody answers")

    def match(self, key: tuple[Any, ...]) -> None:
        """Give the oldest message to the oldest receive, as long as there are both. The caller holds `changed`."""
        while self.sent[key] and self.posted[key]:
            message, expected = self.sent[key].popleft(), self.posted[key].popleft()
            expected.take(message.x)
            message.taken = True
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """A rank has failed: wake everybody who waits."""
        with self.changed:
            self.failed = self.failed or error
            self.changed.notify_all()

    def undelivered(self) -> int:
        """The number of messages that were sent and never received."""
        return sum(map(len, self.sent.values()))


class _Message:
    def __init__(self, x: Tensor):
        self.x, self.taken = x, False


class LocalWire:
    """One member's end of the exchange."""

    lends = True

    def __init__(self, exchange: Exchange, axis: str, ranks: tuple[int, ...], rank: int):
        self.exchange, self.axis, self.ranks, self.rank = exchange, axis, ranks, rank

    def isend(self, x: Tensor, to: int, tag: int) -> _Sent:
        """Leave x where `to` looks for it."""
        message = _Message(x)
        key = (self.axis, self.ranks[self.rank], self.ranks[to], tag)
        with self.exchange.changed:
            self.exchange.sent[key].append(message)
            self.exchange.match(key)
        return _Sent(self.exchange, message, f"send to rank {self.ranks[to]}")

    def irecv(self, buffer: Tensor, source: int, tag: int) -> _Expected:
        """Expect the next message of this source and tag in `buffer`."""
        key = (self.axis, self.ranks[source], self.ranks[self.rank], tag)
        expected = _Expected(self.exchange, buffer, f"recv from rank {self.ranks[source]}")
        with self.exchange.changed:
            self.exchange.posted[key].append(expected)
            self.exchange.match(key)
        return expected


class _Sent:
    def __init__(self, exchange: Exchange, message: _Message, what: str):
        self.exchange, self.message, self.what = exchange, message, what

    def wait(self) -> None:
        self.exchange.wait_for(self.done, self.what)

    def done(self) -> bool:
        return self.message.taken


class _Expected:
    def __init__(self, exchange: Exchange, buffer: Tensor, what: str):
        self.exchange, self.buffer, self.what = exchange, buffer, what
        self.arrived, self.came = False, buffer.numel()

    def wait(self) -> None:
        self.exchange.wait_for(self.done, self.what)
        if self.came != self.buffer.numel():
            raise ValueError(f"{self.what}: {self.came} bytes came where {self.buffer.numel()} were expected")

    def done(self) -> bool:
        return self.arrived

    def take(self, x: Tensor) -> None:
        self.came = x.numel()
        if self.came == self.buffer.numel():
            self.buffer.copy_(x)
        self.arrived = True


def group_on(exchange: Exchange, axis: str, ranks: tuple[int, ...], rank: int, ledger: Ledger) -> Group:
    """A group over the exchange; its collectives are those of the ring, its barrier and all_to_all are messages."""
    wire = LocalWire(exchange, axis, ranks, rank)
    algorithms = {
        "all_reduce": ring.all_reduce,
        "reduce_scatter": ring.reduce_scatter,
        "all_gather": ring.all_gather,
        "broadcast": ring.broadcast,
        "all_to_all": by_messages.all_to_all,
        "barrier": by_messages.barrier,
    }
    return Group(axis, ranks, rank, wire, algorithms, ledger)


def run_threads(fn: Callable[..., Any], n_ranks: int, *args: Any, timeout_s: float = 20.0) -> list[Any]:
    """Run `fn(group, *args)` on `n_ranks` threads; the results by rank.

    If a rank raises, the others are given up and its exception is raised here with the rank in a note. RuntimeError if
    ranks wait for ever. Messages that nobody received raise a RuntimeError too: a correct program leaves none.
    So does breakpoint(): a debugger is for ranks that are processes."""
    if n_ranks < 1:
        raise ValueError(f"n_ranks must be at least 1, got {n_ranks}")
    exchange = Exchange(timeout_s)
    results: list[Any] = [None] * n_ranks
    errors: list[tuple[float, int, BaseException]] = []

    def life(rank: int) -> None:
        try:
            results[rank] = fn(group_on(exchange, "world", tuple(range(n_ranks)), rank, Ledger()), *args)
        except BaseException as error:
            errors.append((time.monotonic(), rank, error))
            exchange.fail(error)

    threads = [threading.Thread(target=life, args=(rank,), daemon=True) for rank in range(n_ranks)]
    with _no_debugger(threads):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        _, rank, error = min(errors, key=lambda failure: failure[0])
        error.add_note(f"(on rank {rank} of {n_ranks})")
        raise error
    if exchange.undelivered():
        raise RuntimeError(f"{exchange.undelivered()} wire messages were sent and never received")
    return results


@contextmanager
def _no_debugger(threads: list[threading.Thread]) -> Iterator[None]:
    """Let breakpoint() in these threads raise RuntimeError: the debugger would ask for a line in a thread that no stop
    button reaches, while the others give up after their time-out."""
    before = sys.breakpointhook

    def refuse(*args: Any, **options: Any) -> Any:
        if threading.current_thread() in threads:
            raise RuntimeError(
                "breakpoint() in a rank that is a thread: a debugger is for ranks that are processes. Run the same "
                f"function with labkit.run(fn, n_ranks={len(threads)})"
            )
        return before(*args, **options)

    sys.breakpointhook = refuse
    try:
        yield
    finally:
        sys.breakpointhook = before
