"""Masters in fp32 are stepped on, and the bf16 weights that the model computes with never hear of it.

    w (bf16) -> gradient -> master (fp32) moves          w stays: the loss of every step is that of the first

Repaired, each step ends with rounding every master into its weight.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import average, forget, net, own_rows, plain, rows

LR = 0.1


@torch.no_grad()
def step_masters(model: nn.Module, masters: list[Tensor]) -> None:
    """One step of gradient descent on the masters, with the gradients of the model's weights."""
    for master, p in zip(masters, model.parameters(), strict=True):
        if p.grad is not None:
            master -= LR * p.grad.float()


def broken(group: Group, steps: int = 12) -> tuple[list[float], nn.Module]:
    """Train in bf16, with weights in fp32 beside."""
    masters = [p.detach().float() for p in net().parameters()]
    model, losses = net().bfloat16(), []
    x, y = (own_rows(row, group).bfloat16() for row in rows(16 * group.size))
    for _ in range(steps):
        forget(model)
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        average(model, group)
        step_masters(model, masters)
        losses.append(loss.item())
    return losses, model


def repaired(group: Group, steps: int = 12) -> tuple[list[float], nn.Module]:
    """Train in bf16, with weights in fp32 beside."""
    masters = [p.detach().float() for p in net().parameters()]
    model, losses = net().bfloat16(), []
    x, y = (own_rows(row, group).bfloat16() for row in rows(16 * group.size))
    for _ in range(steps):
        forget(model)
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        average(model, group)
        step_masters(model, masters)
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        losses.append(loss.item())
    return losses, model


def reference(n_ranks: int, steps: int = 12) -> tuple[list[float], nn.Module]:
    """One process with all rows, in fp64."""
    return plain(steps, 16 * n_ranks, LR)


def shows_cause(chart: Chart) -> bool:
    """True if there are gradients, and yet all losses are the first one."""
    table, losses = chart.seen[0].gradients, chart.losses
    return bool(table and table.norm > 0) and len(losses) > 2 and len({*losses}) == 1


TRIAL = Trial(steps=12, tolerance=3e-2)
