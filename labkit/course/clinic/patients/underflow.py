"""fp16 without a loss scale: gradients below 2^-25 silently become zero.

    loss = sum / tokens of the whole job   ->   gradients near 1e-8   ->   0 in fp16: layers stand still

The gradients that remain are one or two units in the last place; as the error shrinks they vanish, too. Repaired: the
loss is scaled up, and the gradients down again.
"""

from __future__ import annotations

import torch
from torch import nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.patients.overflow import Target
from labkit.course.clinic.task import average, forget, net, own_rows, plain, rows, step_down
from labkit.train.loss_scale import LossScale, Scaler

TOKENS = 2.0**21
LR = 0.1 * TOKENS


def broken(group: Group, steps: int = 12) -> tuple[list[float], nn.Module]:
    """Train in fp16; the loss is divided by the tokens of the whole job, and the learning rate is larger instead."""
    model, losses = net().float(), []
    x, y = (own_rows(row.float(), group) for row in rows(16 * group.size))
    for _ in range(steps):
        forget(model)
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = (out.float() - y).square().mean()
        (loss / TOKENS).backward()
        average(model, group)
        step_down(model.parameters(), LR)
        losses.append(loss.item())
    return losses, model


def repaired(group: Group, steps: int = 12) -> tuple[list[float], nn.Module]:
    """Train in fp16; the loss is divided by the tokens of the whole job, and the learning rate is larger instead."""
    model, losses = net().float(), []
    x, y = (own_rows(row.float(), group) for row in rows(16 * group.size))
    scaler = Scaler(LossScale(2.0**24), agree=[group])
    for _ in range(steps):
        forget(model)
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = (out.float() - y).square().mean()
        scaler.scale(loss / TOKENS).backward()
        average(model, group)
        if scaler.unscale_(Target(model)):
            step_down(model.parameters(), LR)
        losses.append(loss.item())
        scaler.finite_by_id.clear()
    return losses, model


def reference(n_ranks: int, steps: int = 12) -> tuple[list[float], nn.Module]:
    """One process in fp32."""
    return plain(steps, 16 * n_ranks, dtype=torch.float32)


def shows_cause(chart: Chart) -> bool:
    """True if nearly all gradients of a layer are zero, none is infinite, and no expert went without rows."""
    tables = [rank.gradients for rank in chart.seen if rank.gradients]
    rows_ = [row for table in tables for row in table]
    idle = any(0 in layer for layer in chart.rows_by_expert)
    return any(row.zeros > 0.9 for row in rows_) and all(row.not_finite == 0 for row in rows_) and not idle


TRIAL = Trial(steps=12, tolerance=5e-3)
