"""Every rank draws its own initial weights.

    rank 0: seed 0      rank 1: seed 1      the mean of their gradients is a gradient of neither

A seed per rank is right for dropout and for data. Repaired, all ranks copy rank 0's weights before the first step.
"""

from __future__ import annotations

import torch
from torch import nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import average, forget, net, own_rows, plain, rows, step_down


def broken(group: Group, steps: int = 10) -> tuple[list[float], nn.Module]:
    """Train with a seed for each rank, and the mean of all gradients."""
    model, losses = net(seed=group.rank), []
    x, y = (own_rows(row, group) for row in rows(16 * group.size))
    for _ in range(steps):
        forget(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        average(model, group)
        step_down(model.parameters())
        losses.append(loss.item())
    return losses, model


def repaired(group: Group, steps: int = 10) -> tuple[list[float], nn.Module]:
    """Train with a seed for each rank, and the mean of all gradients."""
    model, losses = net(seed=group.rank), []
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(group.broadcast(p.detach()))
    x, y = (own_rows(row, group) for row in rows(16 * group.size))
    for _ in range(steps):
        forget(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        average(model, group)
        step_down(model.parameters())
        losses.append(loss.item())
    return losses, model


def reference(n_ranks: int, steps: int = 10) -> tuple[list[float], nn.Module]:
    """One process with all rows and rank 0's weights."""
    return plain(steps, 16 * n_ranks)


def shows_cause(chart: Chart) -> bool:
    """True if weights differ before the first step."""
    return chart.apart("weights") > 1e-3


TRIAL = Trial(steps=10, look_steps=0)
