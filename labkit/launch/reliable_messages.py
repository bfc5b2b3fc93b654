"""Messages that survive a broken connection: numbered, kept until the other end has them, sent again when it is back.

ZeroMQ mends a connection by itself, but what was on the wire when it broke is gone, and nobody is told. So each end
numbers what it writes, and says with each message how many of the other's it has:

    frames of a message    [ number, count of the other's that have come ] [ ... ]

A message with number 0 may get lost: it is not kept. Both ends have a `Letters` for each other.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

_HEAD = struct.Struct("<QQ")


class Letters:
    """One end of a correspondence."""

    def __init__(self) -> None:
        self.written = self.read = 0
        self.kept: deque[tuple[int, list[Any]]] = deque()

    def write(self, frames: Sequence[Any]) -> list[Any]:
        """The message with its number; it is kept until the other end says that it has come."""
        self.written += 1
        self.kept.append((self.written, list(frames)))
        return self._numbered(self.written, frames)

    def note(self, frames: Sequence[Any]) -> list[Any]:
        """A message that may get lost."""
        return self._numbered(0, frames)

    def opened(self, head: bytes | memoryview) -> bool:
        """Whether a message is to be handled: not if it has come before, nor if one before it is missing, since then
        both will come again."""
        number, seen = _HEAD.unpack(head)
        while self.kept and self.kept[0][0] <= seen:
            self.kept.popleft()
        if number == 0:
            return True
        if number != self.read + 1:
            return False
        self.read = number
        return True

    def again(self) -> Iterator[list[Any]]:
        """Everything that the other end may not have."""
        for number, frames in list(self.kept):
            yield self._numbered(number, frames)

    def _numbered(self, number: int, frames: Sequence[Any]) -> list[Any]:
        return [_HEAD.pack(number, self.read), *frames]
