"""A caching allocator on paper: real tensors are born and die, the addresses that a GPU would give them are simulated.

    segment  |##|....|#######|..|      taken from the device in one piece; # handed out, . kept for later
    malloc   the smallest free piece that is large enough, its rest stays free
             no piece: a new segment; no room: segments that are wholly free go back, then out of memory
    free     the piece joins the free pieces beside it; the segment stays

What torch's allocator does besides is left out: two pools by size, streams, limits for splitting, expandable segments.
Its rounding to 512 bytes is here; segments are of 64 KiB in place of 2 MiB and more, as the programs are small.
Source: torch's notes on CUDA semantics, "Memory management" and "Optimizing memory usage".
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROUND, SEGMENT = 512, 64 * 1024


class Piece:
    """Some bytes of a segment."""

    def __init__(self, segment: list[Piece], n_bytes: int, used: bool = False) -> None:
        self.segment, self.n_bytes, self.used = segment, n_bytes, used


class Pool(TorchDispatchMode):
    """While it is entered, every new storage asks for a piece. `cap_bytes` is the size of the device, None for no end.

    allocated, reserved    bytes handed out, bytes taken from the device
    asked                  both when the device was last asked for more, and the largest free piece then"""

    def __init__(self, cap_bytes: int | None = None) -> None:
        """Nothing is reserved yet."""
        super().__init__()
        self.cap_bytes, self.segments = cap_bytes, list[list[Piece]]()
        self.allocated = self.reserved = 0
        self.asked = (0, 0, 0)
        self._live: dict[int, tuple[weakref.ref[Any], Piece]] = {}
        self._dead: deque[int] = deque()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the usual answer imports torch's compiler

    @property
    def largest_free(self) -> int:
        """Bytes of the largest piece that is free."""
        return max((each.n_bytes for segment in self.segments for each in segment if not each.used), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; what it has made asks for its place."""
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.untyped_storage().nbytes():
                self._born(each.untyped_storage())
        return out

    def malloc(self, n_bytes: int) -> Piece:
        """A piece of at least so many bytes. torch.OutOfMemoryError if the device has none."""
        n_bytes = -(-n_bytes // ROUND) * ROUND
        free = [each for segment in self.segments for each in segment if not each.used and each.n_bytes >= n_bytes]
        piece = min(free, key=lambda each: each.n_bytes) if free else self._segment(n_bytes)
        if piece.n_bytes > n_bytes:
            rest = Piece(piece.segment, piece.n_bytes - n_bytes)
            piece.segment.insert(piece.segment.index(piece) + 1, rest)
        piece.n_bytes, piece.used = n_bytes, True
        self.allocated += n_bytes
        return piece

    def free(self, piece: Piece) -> None:
        """Take a piece back, and join it with what is free beside it."""
        piece.used, segment = False, piece.segment
        self.allocated -= piece.n_bytes
        at = segment.index(piece)
        for low in (at, at - 1):
            if low >= 0 and low + 1 < len(segment) and not (segment[low].used or segment[low + 1].used):
                segment[low].n_bytes += segment.pop(low + 1).n_bytes

    def empty_cache(self) -> None:
        """Give segments back to the device; those with a piece in use must stay."""
        self._settle()
        self._return()

    def _return(self) -> None:
        self.segments = [segment for segment in self.segments if len(segment) > 1 or segment[0].used]
        self.reserved = sum(each.n_bytes for segment in self.segments for each in segment)

    def _segment(self, n_bytes: int) -> Piece:
        size = -(-n_bytes // SEGMENT) * SEGMENT
        if self.cap_bytes is not None and self.reserved + size > self.cap_bytes:
            self._return()
            if self.reserved + size > self.cap_bytes:
                raise torch.OutOfMemoryError(
                    f"out of memory: tried to allocate {n_bytes:,} bytes of a device of {self.cap_bytes:,}; "
                    f"{self.allocated:,} are allocated, {self.reserved - self.allocated:,} reserved but unallocated, "
                    f"the largest free piece has {self.largest_free:,}"
                )
        self.asked = self.allocated + n_bytes, self.reserved + size, self.largest_free
        segment: list[Piece] = []
        segment.append(Piece(segment, size))
        self.segments.append(segment)
        self.reserved += size
        return segment[0]

    def _born(self, storage: torch.UntypedStorage) -> None:
        self._settle()
        key = storage._cdata
        if key not in self._live:
            piece = self.malloc(storage.nbytes())
            self._live[key] = weakref.ref(storage, lambda _: self._dead.append(key)), piece  # heard at any moment

    def _settle(self) -> None:
        while self._dead:
            self.free(self._live.pop(self._dead.popleft())[1])
