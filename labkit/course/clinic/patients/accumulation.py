"""Gradients of micro-batches are added and never divided.

    8 micro-batches: the gradient is 8 times as long, and so is the step

Repaired: each loss is a sum, divided by the samples of the batch, so micro-batches may also be of unequal size.
"""

from __future__ import annotations

from torch import nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import average, forget, net, own_rows, plain, rows, step_down

MICROS, LR = 8, 0.5


def broken(group: Group, steps: int = 12) -> tuple[list[float], nn.Module]:
    """Train on batches cut into eight micro-batches."""
    model, losses = net(), []
    x, y = (own_rows(row, group) for row in rows(32 * group.size))
    for _ in range(steps):
        forget(model)
        total = 0.0
        for a, b in zip(x.chunk(MICROS), y.chunk(MICROS), strict=True):
            loss = (model(a) - b).square().mean()
            loss.backward()
            total += loss.item() / MICROS
        average(model, group)
        step_down(model.parameters(), LR)
        losses.append(total)
    return losses, model


def repaired(group: Group, steps: int = 12) -> tuple[list[float], nn.Module]:
    """Train on batches cut into eight micro-batches."""
    model, losses = net(), []
    x, y = (own_rows(row, group) for row in rows(32 * group.size))
    for _ in range(steps):
        forget(model)
        total = 0.0
        for a, b in zip(x.chunk(MICROS), y.chunk(MICROS), strict=True):
            loss = (model(a) - b).square().sum() / len(x)
            loss.backward()
            total += loss.item()
        average(model, group)
        step_down(model.parameters(), LR)
        losses.append(total)
    return losses, model


def reference(n_ranks: int, steps: int = 12) -> tuple[list[float], nn.Module]:
    """One process with all rows at once."""
    return plain(steps, 32 * n_ranks, LR)


def shows_cause(chart: Chart) -> bool:
    """True if the first gradient is too long by a factor of as many micro-batches as there are."""
    if not (chart.alone and chart.alone[2] and chart.seen[0].gradients):
        return False
    return abs(chart.seen[0].gradients.norm / chart.alone[2].norm - MICROS) < 0.01 * MICROS


TRIAL = Trial(steps=12, tolerance=1e-6, look_steps=1)
