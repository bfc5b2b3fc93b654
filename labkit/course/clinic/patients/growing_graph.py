"""A running loss keeps the graph of every batch that went into it.

    seen = seen + loss     loss -> its graph -> activations of the batch, for as long as `seen` lives

Training alone does not show it, since backward frees the graph. Here a batch of the validation set is looked at after
every step, nobody calls backward on its loss, and the sum keeps all these graphs. Repaired: no graph, and a number.
"""

from __future__ import annotations

import torch
from torch import nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import average, forget, net, own_rows, plain, rows, step_down


def broken(group: Group, steps: int = 20) -> tuple[list[float], nn.Module]:
    """Train, and sum up the validation loss."""
    model, losses, seen = net(), [], torch.zeros(())
    x, y = (own_rows(row, group) for row in rows(64 * group.size))
    for step in range(steps):
        forget(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        average(model, group)
        step_down(model.parameters())
        losses.append(loss.item())
        inputs, targets = rows(64, seed=step)
        seen = seen + (model(inputs) - targets).square().mean()
    return losses, model


def repaired(group: Group, steps: int = 20) -> tuple[list[float], nn.Module]:
    """Train, and sum up the validation loss."""
    model, losses, seen = net(), [], 0.0
    x, y = (own_rows(row, group) for row in rows(64 * group.size))
    for step in range(steps):
        forget(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        average(model, group)
        step_down(model.parameters())
        losses.append(loss.item())
        inputs, targets = rows(64, seed=step)
        with torch.no_grad():
            seen += (model(inputs) - targets).square().mean().item()
    return losses, model


def reference(n_ranks: int, steps: int = 20) -> tuple[list[float], nn.Module]:
    """One process with all rows."""
    return plain(steps, 64 * n_ranks)


def shows_cause(chart: Chart) -> bool:
    """True if the bytes held between two steps grow during the run (without its first and last eighth)."""
    return any(rank.floors[-2] > 2 * rank.floors[2] for rank in chart.stored)


TRIAL = Trial(steps=20, cap_bytes=500_000)
