"""A tensor that is lent to the wire: from a verb's start until `wait()` returns it belongs to the wire.

    lent = Lent(x, "the tensor that was sent to rank 2")      # at the start
    lent.give_back()                                          # in `wait()`: ValueError if x has changed meanwhile

A wire reads the bytes at any moment in between, so that a tensor which changes arrives half old and half new. gloo and
NCCL cannot notice that; the wires that carry bytes themselves do, by the bytes before and after.
"""

from __future__ import annotations

import ctypes
import zlib

from torch import Tensor

SAMPLE_BYTES = 64 << 10


def mark_of(x: Tensor, most_bytes: int | None = SAMPLE_BYTES) -> int:
    """A number that changes with the bytes of a contiguous tensor, of a large one with those of an even sample.

    No operator of torch is called, and no memory of torch's is taken. A tensor of another device gives 0."""
    n_bytes = x.nbytes
    if not n_bytes or x.device.type != "cpu":
        return 0
    raw = (ctypes.c_char * n_bytes).from_address(x.data_ptr())
    if most_bytes is None or n_bytes <= most_bytes:
        return zlib.crc32(raw)
    step = n_bytes // most_bytes | 1  # odd, so that it meets each byte of a number in turn
    return zlib.crc32(memoryview(raw)[::step].tobytes())


class Lent:
    """A contiguous tensor, and what its bytes were when it was lent."""

    def __init__(self, x: Tensor, what: str):
        self.x, self.what, self.mark = x, what, mark_of(x)

    def give_back(self) -> None:
        """ValueError if the tensor has changed since it was lent."""
        if mark_of(self.x) != self.mark:
            raise ValueError(
                f"{self.what} was changed while it was on its way, so what arrives is neither the old nor the new: "
                f"wait() for it before you write to it, or hand over a clone"
            )
