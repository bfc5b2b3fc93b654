"""Work: something that was started on a group and can be waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from labkit.comm.ledger import Call, Ledger

Tap = Callable[[str, int, int, Tensor], None]
"""Is called for every message: event "send" or "recv", peer (a global rank), tag, tensor."""


class Work:
    """Something that was started. `wait()` returns its tensor (None for a send) when it is done; `done` only looks."""

    def __init__(self, ledger: Ledger, call: Call, under_way: Any, number: int | None = None, tap: Tap | None = None):
        self.ledger, self.call, self.under_way, self.number, self.tap = ledger, call, under_way, number, tap
        self.result: Tensor | None = None
        self.finished = False

    @classmethod
    def finished_with(cls, ledger: Ledger, call: Call, x: Tensor) -> Work:
        """What was done before anybody could wait for it."""
        work = cls(ledger, call, None)
        work.result, work.finished = x, True
        return work

    def wait(self) -> Tensor | None:
        """Block until done. For a send this means that the receiver has taken it; the tensor may be changed again."""
        if not self.finished:
            with Watched(self.ledger, self.call):
                self.result = self.under_way.wait()
            self._finish()
        return self.result

    def open(self) -> None:
        """For a message: wait for its announcement and ask for the payload. A wire without tags, such as NCCL's, gives
        payloads in the order of these calls, which must be that of the sends."""
        if not self.finished:
            with Watched(self.ledger, self.call):
                self.under_way.open()

    def pieces(self) -> Iterator[Tensor]:
        """What is being received, bit by bit: flat pieces in order, each as soon as it is there."""
        with Watched(self.ledger, self.call):
            yield from self.under_way.arrive()
        self.result = self.under_way.result
        self._finish()

    @property
    def done(self) -> bool:
        """Whether `wait()` would return at once."""
        if not self.finished and self.under_way.done():
            self.result = self.under_way.wait()
            self._finish()
        return self.finished

    def _finish(self) -> None:
        self.ledger.let_go(self.under_way)
        self.finished, self.under_way = True, None
        if self.number is not None:
            self.ledger.close(self.number)
        if self.call.verb == "recv" and self.call.peer is not None:
            self.ledger.received[self.call.ranks[self.call.peer]] += 1
        if self.call.verb == "recv" and self.tap is not None and self.call.peer is not None:
            assert self.result is not None
            self.tap("recv", self.call.ranks[self.call.peer], self.call.tag, self.result)


class Watched:
    """Tells the ledger's witness before and after something that may block."""

    def __init__(self, ledger: Ledger, call: Call):
        self.witness, self.call = ledger.witness, call

    def __enter__(self) -> None:
        if self.witness is not None:
            self.witness.enter(self.call)

    def __exit__(self, *_: object) -> None:
        if self.witness is not None:
            self.witness.leave(self.call)
