"""Running means are not parameters, and nothing synchronises them.

    weights         averaged gradients, the same steps: alike on all ranks
    running_mean    of this rank's rows alone: another on every rank, used in eval()

Repaired, all ranks take rank 0's buffers after every step, as in DDP. (SyncBatchNorm uses statistics of all rows.)
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from labkit.comm.group import Group
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import WIDE, average, forget, own_rows, rows, step_down


def normed() -> nn.Sequential:
    """A net with batch norm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1)).double()


def validation(model: nn.Module) -> float:
    """The loss in eval mode, with running means, on rows that all ranks share."""
    x, y = rows(64, seed=99)
    with torch.no_grad():
        loss = (model.eval()(x) - y).square().mean().item()
    model.train()
    return loss


def broken(group: Group, steps: int = 6) -> tuple[list[float], nn.Module]:
    """Train; returns the validation loss after each step."""
    model, losses = normed(), []
    x, y = (own_rows(row, group) for row in rows(8 * group.size))
    for _ in range(steps):
        forget(model)
        (model(x) - y).square().mean().backward()
        average(model, group)
        step_down(model.parameters())
        losses.append(validation(model))
    return losses, model


def repaired(group: Group, steps: int = 6) -> tuple[list[float], nn.Module]:
    """Train; returns the validation loss after each step."""
    model, losses = normed(), []
    x, y = (own_rows(row, group) for row in rows(8 * group.size))
    for _ in range(steps):
        forget(model)
        (model(x) - y).square().mean().backward()
        average(model, group)
        step_down(model.parameters())
        for buffer in model.buffers():
            buffer.copy_(group.broadcast(buffer))
        losses.append(validation(model))
    return losses, model


def reference(n_ranks: int, steps: int = 6) -> tuple[list[float], nn.Module]:
    """One process: a copy of the model for the rows of each rank; the first copy's buffers are kept."""
    model, losses = normed(), []
    x, y = rows(8 * n_ranks)
    for _ in range(steps):
        forget(model)
        copies = [copy.deepcopy(model) for _ in range(n_ranks)]
        for replica, a, b in zip(copies, x.chunk(n_ranks), y.chunk(n_ranks), strict=True):
            (replica(a) - b).square().mean().backward()
        for p, *others in zip(*(module.parameters() for module in (model, *copies)), strict=True):
            p.grad = torch.stack([q.grad for q in others if q.grad is not None]).mean(0)
        step_down(model.parameters())
        for own, first in zip(model.buffers(), copies[0].buffers(), strict=True):
            own.copy_(first)
        losses.append(validation(model))
    return losses, model


def shows_cause(chart: Chart) -> bool:
    """True if weights are alike and buffers are not."""
    return chart.apart("weights") < 1e-9 and chart.apart("buffers") > 1e-3
