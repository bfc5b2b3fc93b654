"""A simulated caching allocator: the tensors are real, and the addresses that a GPU would give them are simulated.

    segment  |##|....|#######|..|      taken from the device in one piece; # handed out, . kept for later
    malloc   take the smallest free piece that is large enough; its rest stays free
             no piece: a new segment; no room: give back segments that are wholly free; still no room: out of memory
    free     the piece joins the free pieces beside it; the segment stays

The simulation leaves out what else torch's allocator does: two pools by size, streams, limits for splitting, expandable
segments. It rounds to 512 bytes as torch does; its segments have 64 KiB instead of 2 MiB, as the programs are small.
Source: torch's notes on CUDA semantics, "Memory management" and "Optimizing memory usage".
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from labkit.comm.private import private

TorchDispatchMode: Any = private("torch.utils._python_dispatch.TorchDispatchMode")
storage_key: Any = private("torch.UntypedStorage._cdata")
tree_leaves: Any = private("torch.utils._pytree.tree_leaves")
ROUND, SEGMENT = 512, 64 * 1024


class PoolPiece:
    """A stretch of a segment, used or free."""

    def __init__(self, segment: list[PoolPiece], n_bytes: int, used: bool = False) -> None:
        self.segment, self.n_bytes, self.used = segment, n_bytes, used


class Pool(TorchDispatchMode):
    """While this context is active, every new storage takes a piece. `cap_bytes` is the device's size, None: no limit.

    allocated, reserved    bytes handed out, bytes taken from the device
    asked                  both when the device was last asked for more, and the largest free piece at that time"""

    def __init__(self, cap_bytes: int | None = None) -> None:
        """A pool that has reserved nothing yet."""
        super().__init__()
        self.cap_bytes, self.segments = cap_bytes, list[list[PoolPiece]]()
        self.allocated = self.reserved = 0
        self.asked = (0, 0, 0)
        self._live: dict[int, tuple[weakref.ref[Any], PoolPiece]] = {}
        self._dead: deque[int] = deque()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's default imports its compiler to answer

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free piece."""
        return max((piece.n_bytes for segment in self.segments for piece in segment if not piece.used), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and take pieces for the tensors that it returns."""
        # A view is no new memory, and what it looks at may be none of the device's: a buffer of the wire, for instance.
        argument_keys = {storage_key(storage) for storage in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage_key(storage) not in argument_keys:
                self._born(storage)
        return out

    def malloc(self, n_bytes: int) -> PoolPiece:
        """A piece of at least `n_bytes`. torch.OutOfMemoryError if the device has no room."""
        n_bytes = -(-n_bytes // ROUND) * ROUND
        free = [
            candidate
            for segment in self.segments
            for candidate in segment
            if not candidate.used and candidate.n_bytes >= n_bytes
        ]
        piece = min(free, key=lambda candidate: candidate.n_bytes) if free else self._segment(n_bytes)
        if piece.n_bytes > n_bytes:
            rest = PoolPiece(piece.segment, piece.n_bytes - n_bytes)
            piece.segment.insert(piece.segment.index(piece) + 1, rest)
        piece.n_bytes, piece.used = n_bytes, True
        self.allocated += n_bytes
        return piece

    def free(self, piece: PoolPiece) -> None:
        """Take a piece back, and join it with the free pieces beside it."""
        piece.used, segment = False, piece.segment
        self.allocated -= piece.n_bytes
        place = segment.index(piece)
        for low in (place, place - 1):
            if low >= 0 and low + 1 < len(segment) and not (segment[low].used or segment[low + 1].used):
                segment[low].n_bytes += segment.pop(low + 1).n_bytes

    def empty_cache(self) -> None:
        """Give free segments back to the device; segments with a piece in use stay."""
        self._settle()
        self._return()

    def _return(self) -> None:
        self.segments = [segment for segment in self.segments if len(segment) > 1 or segment[0].used]
        self.reserved = sum(piece.n_bytes for segment in self.segments for piece in segment)

    def _segment(self, n_bytes: int) -> PoolPiece:
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
        segment: list[PoolPiece] = []
        segment.append(PoolPiece(segment, size))
        self.segments.append(segment)
        self.reserved += size
        return segment[0]

    def _born(self, storage: torch.UntypedStorage) -> None:
        self._settle()
        key = storage_key(storage)
        if key not in self._live:
            piece = self.malloc(storage.nbytes())
            self._live[key] = weakref.ref(storage, lambda _: self._dead.append(key)), piece  # may run at any moment

    def _settle(self) -> None:
        while self._dead:
            self.free(self._live.pop(self._dead.popleft())[1])


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """The storages of the tensors in `values`, without empty ones, which may still get memory."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return [storage for tensor in tensors if (storage := tensor.untyped_storage()).nbytes()]
