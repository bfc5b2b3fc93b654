"""How many flops a rank can do in a second on this machine: the peak of which MFU is a share.

    flops of an [m, m] x [m, m] product = 2 m^3

A data sheet says what a chip does at best; on a laptop whose ranks share cores there is no such sheet, so all ranks
multiply at the same time and the slowest counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from labkit.comm.group import Group

LONGEST_S = 0.02
"""A product that is expected to take longer is not tried: twenty are run for a rate."""


def matmul_flops(
    group: Group,
    dtype: torch.dtype = torch.float32,
    size: int = 512,
    repeats: int = 8,
    pick: Callable[[Sequence[float]], float] = statistics.median,
) -> float:
    """flop/s of one rank in products of [size, size] matrices while all ranks of the group do the same.

    What `pick` makes of `repeats` times after two to warm up, the median by default, of the slowest rank, the same
    number on every rank. ValueError for a size or a number of repeats below 1."""
    if size < 1 or repeats < 1:
        raise ValueError(f"size and repeats are at least 1, got {size} and {repeats}")
    a = torch.randn(size, size, device=group.device).to(dtype)
    times = []
    for attempt in range(repeats + 2):
        group.barrier()
        started = time.perf_counter()
        for _ in range(4):
            a @ a
        if a.is_cuda:
            torch.cuda.synchronize()
        if attempt >= 2:
            times.append((time.perf_counter() - started) / 4)
    slowest = group.all_reduce(torch.tensor([pick(times)], dtype=torch.float64, device=group.device), "max")
    return 2 * size**3 / float(slowest)


def peak_flops(group: Group, dtype: torch.dtype = torch.float32) -> float:
    """flop/s of one rank in the products that this machine does best, while all ranks do the same.

    Small products are held back by their start, and large ones, where a CPU has no units for a format, by its memory:
    so the size is doubled until a product would take long, or does half as well as a smaller one. Of several tries the
    shortest counts: other programs only ever make a product slower."""
    size, best = 64, matmul_flops(group, dtype, 64, 3, min)
    while 2 * (2 * size) ** 3 / best < LONGEST_S:
        size *= 2
        rate = matmul_flops(group, dtype, size, 3, min)
        if rate < best / 2:
            break
        best = max(best, rate)
    return best
