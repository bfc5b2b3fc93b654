"""How fast is a link, and how fast is a collective on it? Medians of real transfers, after a warm-up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from labkit.comm.group import Group

Samples = list[tuple[float, float]]


QUICKEST = 0.25
"""The share of the messages whose time is that of the link."""


def ping_pong(group: Group, sizes: Sequence[int], repeats: int = 15) -> Samples:
    """One-way time of a message between ranks 0 and 1, for each size in bytes: half the round trip, of the quickest
    quarter of them, since whatever else the machine does can only delay a message.

    Every rank must call it; the same samples come back on all. ValueError for a group of one rank."""
    if group.size < 2:
        raise ValueError("a link joins two ranks, this group has one: use Cluster(2) or more")

    def there_and_back(x: Tensor) -> None:
        if group.rank == 0:
            group.send(x, 1).wait()
            group.recv(1, into=x)
        elif group.rank == 1:
            group.recv(0, into=x)
            group.send(x, 0).wait()

    return [(size, seconds / 2) for size, seconds in sweep(there_and_back, sizes, group, repeats, QUICKEST)]


def sweep(
    verb: Callable[[Tensor], object], sizes: Sequence[int], group: Group, repeats: int = 15, share: float = 0.5
) -> Samples:
    """Seconds of `verb(x)` on a float32 tensor of each size: [(bytes, seconds)], the same on every rank.

    The median of `repeats` counts, or the time within which another `share` of them end; and the slowest rank. Two runs
    of each size warm up first. The sizes take turns, so that a moment in which the machine is busy falls on all of
    them. ValueError for a size below 0 or no repeats."""
    if repeats < 1 or min(sizes, default=0) < 0:
        raise ValueError(f"sizes are 0 bytes or more and repeats at least 1, got {list(sizes)} and {repeats}")
    xs = [torch.zeros(max(1, size // 4), dtype=torch.float32, device=group.device) for size in sizes]
    times: list[list[float]] = [[] for _ in sizes]
    for attempt in range(repeats + 2):
        for x, taken in zip(xs, times, strict=True):
            group.barrier()
            started = time.perf_counter()
            verb(x)
            if x.is_cuda:
                torch.cuda.synchronize()
            if attempt >= 2:  # the first two warm buffers and connections
                taken.append(time.perf_counter() - started)
    quantiles = torch.tensor([np.quantile(taken, share) for taken in times], dtype=torch.float64, device=group.device)
    slowest = group.all_reduce(quantiles, op="max").tolist()
    return [(x.numel() * 4, seconds) for x, seconds in zip(xs, slowest, strict=True)]
