"""Tensor parallelism: each rank draws its shard of a matrix with the same seed.

    rank 0: rows 0 to 7, seed 0     rank 1: rows 8 to 15, seed 0      the whole matrix has the same 8 rows twice

Both shards get the same gradients, and stay alike for ever: the net is as good as one of a single shard. Repaired, each
rank adds its number to the seed. (What is whole on all ranks wants one seed: see "ranks differ by seed".)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import WIDE, forget, rows, step_down
from labkit.parallel.tensor import copy_to, reduce_from

PART, LR = 8, 0.1


def shard(seed: int) -> tuple[Tensor, Tensor]:
    """Weights of eight hidden units: into them [8, 16], and out of them [1, 8]."""
    draw = torch.Generator().manual_seed(seed)
    up = torch.randn(PART, WIDE, generator=draw, dtype=torch.float64) / 4
    return up, torch.randn(1, PART, generator=draw, dtype=torch.float64) / 4


class Cut(nn.Module):
    """This rank's eight hidden units of a net."""

    def __init__(self, group: Group, seed: int) -> None:
        super().__init__()
        self.group = group
        up, down = shard(seed)
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 16] -> [B, 1]"""
        return reduce_from(torch.tanh(copy_to(x, self.group) @ self.up.T) @ self.down.T, self.group)


def train(model: nn.Module, steps: int) -> tuple[list[float], nn.Module]:
    """Train on 64 rows."""
    (x, y), losses = rows(64), []
    for _ in range(steps):
        forget(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        step_down(model.parameters(), LR)
        losses.append(loss.item())
    return losses, model


def broken(group: Group, steps: int = 10) -> tuple[list[float], nn.Module]:
    """Train a net that is cut over all ranks, from a seed."""
    model = Cut(group, seed=0)
    return train(model, steps)


def repaired(group: Group, steps: int = 10) -> tuple[list[float], nn.Module]:
    """Train a net that is cut over all ranks, from a seed."""
    model = Cut(group, seed=0 + group.rank)
    return train(model, steps)


class Whole(nn.Module):
    """All hidden units in one process."""

    def __init__(self, n_ranks: int) -> None:
        super().__init__()
        ups, downs = zip(*map(shard, range(n_ranks)), strict=True)
        self.up, self.down = nn.Parameter(torch.cat(ups)), nn.Parameter(torch.cat(downs, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 16] -> [B, 1]"""
        return torch.tanh(x @ self.up.T) @ self.down.T


def reference(n_ranks: int, steps: int = 10) -> tuple[list[float], nn.Module]:
    """One process with the whole net."""
    return train(Whole(n_ranks), steps)


def shows_cause(chart: Chart) -> bool:
    """True if the shards of all ranks are alike, to the last bit."""
    return len(chart.seen) > 1 and all(rank.weights is not None for rank in chart.seen) and not chart.apart("weights")


TRIAL = Trial(steps=10, look_steps=0)
