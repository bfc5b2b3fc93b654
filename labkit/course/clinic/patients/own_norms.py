"""A sharded optimizer clips the gradient by the norm of the shard that it has.

    rank 0: its half, 1 long at most     rank 1: its half, 1 long at most     both together: up to sqrt(2), and bent

With n ranks the gradient may be sqrt(n) times as long as the limit says, and large shards are shortened more than small
ones, so that its direction is another. Repaired, ranks add up the squares of their norms first: one number a step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import forget, net, own_rows, rows, step_down

LIMIT, LR = 0.02, 1.0


def flat(model: nn.Module, n: int) -> Tensor:
    """All gradients in one vector, with zeros behind them so that n ranks divide it."""
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return torch.cat([grads, grads.new_zeros(-len(grads) % n)])


def spread(model: nn.Module, vector: Tensor) -> None:
    """The opposite of `flat`: what lies behind the last gradient is dropped."""
    start = 0
    for p in model.parameters():
        p.grad = vector[start : start + p.numel()].view_as(p).clone()
        start += p.numel()


def broken(group: Group, steps: int = 10) -> tuple[list[float], nn.Module]:
    """Train with each rank's share of the gradient, clipped."""
    model, losses = net(), []
    x, y = (own_rows(row, group) for row in rows(16 * group.size))
    for _ in range(steps):
        forget(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        own = group.reduce_scatter(flat(model, group.size)) / group.size
        norm = own.norm()
        spread(model, group.all_gather(own * (LIMIT / norm).clamp(max=1)))
        step_down(model.parameters(), LR)
        losses.append(loss.item())
    return losses, model


def repaired(group: Group, steps: int = 10) -> tuple[list[float], nn.Module]:
    """Train with each rank's share of the gradient, clipped."""
    model, losses = net(), []
    x, y = (own_rows(row, group) for row in rows(16 * group.size))
    for _ in range(steps):
        forget(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        own = group.reduce_scatter(flat(model, group.size)) / group.size
        norm = group.all_reduce(own.square().sum()[None]).sqrt()
        spread(model, group.all_gather(own * (LIMIT / norm).clamp(max=1)))
        step_down(model.parameters(), LR)
        losses.append(loss.item())
    return losses, model


def reference(n_ranks: int, steps: int = 10) -> tuple[list[float], nn.Module]:
    """One process with all rows and all gradients."""
    model, losses = net(), []
    x, y = rows(16 * n_ranks)
    for _ in range(steps):
        forget(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        step_down(model.parameters(), LR)
        losses.append(loss.item())
    return losses, model


def shows_cause(chart: Chart) -> bool:
    """True if the first gradient is too long by the root of the number of ranks."""
    table = chart.seen[0].gradients if chart.seen else None
    if not (chart.alone and chart.alone[2] and table) or len(chart.seen) < 2:
        return False
    factor = len(chart.seen) ** 0.5
    return abs(table.norm / chart.alone[2].norm - factor) < 0.01 * factor


TRIAL = Trial(steps=10, tolerance=1e-6, look_steps=1)
