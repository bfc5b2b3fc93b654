"""Every rank sends first, and nobody receives.

    rank 0   send to 1 ... waits to be received      rank 1   send to 2 ... waits to be received

A long row of numbers is cut over the ranks and smoothed; every rank needs its neighbour's edge. A send that is waited
for ends when the other side takes the message. Repaired, a rank sends and receives at the same time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import own_rows


def signal(n_ranks: int) -> Tensor:
    """The whole row.   -> [32 n]"""
    return torch.randn(32 * n_ranks, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def broken(group: Group, steps: int = 6) -> tuple[list[float], None]:
    """Smooth: every number becomes the mean of itself and its left neighbour."""
    part, squares = own_rows(signal(group.size), group), []
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for _ in range(steps):
        group.send(part[-1:].clone(), right).wait()
        edge = group.recv(left)
        part = (part + torch.cat([edge, part[:-1]])) / 2
        squares.append(part.square().mean().item())
    return squares, None


def repaired(group: Group, steps: int = 6) -> tuple[list[float], None]:
    """Smooth: every number becomes the mean of itself and its left neighbour."""
    part, squares = own_rows(signal(group.size), group), []
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for _ in range(steps):
        edge = group.exchange(part[-1:].clone(), to=right, source=left)
        part = (part + torch.cat([edge, part[:-1]])) / 2
        squares.append(part.square().mean().item())
    return squares, None


def reference(n_ranks: int, steps: int = 6) -> tuple[list[float], None]:
    """The whole row in one process."""
    whole, squares = signal(n_ranks), []
    for _ in range(steps):
        whole = (whole + whole.roll(1)) / 2
        squares.append(whole.square().mean().item())
    return squares, None


def shows_cause(chart: Chart) -> bool:
    """True if every rank waits in a send."""
    return chart.error is not None and all(rank.verb == "send" for rank in chart.error.autopsy.ranks)
