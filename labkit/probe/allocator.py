"""What CUDA's caching allocator says about itself, beside what a probe counts.

    |###|#######|....|##|......................|      # allocated: handed out to tensors, rounded up to 512 bytes
    |<------------ reserved ------------------>|      . free: kept for later, the device sees it as taken
                |....| fragmented: a free piece of a block whose other pieces are in use; only smaller tensors fit

Out of memory with much reserved and little allocated is fragmentation. Source: torch's notes on CUDA semantics, memory
management, and `torch.cuda.memory_stats`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Allocator:
    """Bytes that the allocator has handed out, has taken from the device, and holds in pieces between tensors
    (inactive splits). Peaks are since torch's last `reset_peak_memory_stats`."""

    allocated_bytes: int
    reserved_bytes: int
    fragmented_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int

    @classmethod
    def read(cls) -> Allocator | None:
        """The numbers of the current CUDA device; None without one."""
        if not torch.cuda.is_available():
            return None
        stats = torch.cuda.memory_stats()
        now, top = (
            [int(stats.get(f"{name}_bytes.all.{which}", 0)) for name in ("allocated", "reserved", "inactive_split")]
            for which in ("current", "peak")
        )
        return cls(*now, *top[:2])
