"""fp16 with a fixed loss scale, and no check for infinities.

    gradient x 2^24   beyond 65,504: inf   ->   weight - lr x inf   ->   NaN from the next forward on

Repaired: gradients are checked before they are used; if one is infinite, the step is skipped and the scale halved.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import average, forget, net, own_rows, plain, rows, step_down
from labkit.train.loss_scale import LossScale, Scaler

SCALE = 2.0**24


class Target:
    """The interface that a Scaler needs: a model under gradient descent."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def grads(self) -> list[Tensor]:
        """The gradients of the model."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def step(self) -> None:
        """Take one step of gradient descent."""
        step_down(self.model.parameters())


def broken(group: Group, steps: int = 6) -> tuple[list[float], nn.Module]:
    """Train in fp16: weights in fp32, products in fp16, loss times a scale."""
    model, losses = net().float(), []
    x, y = (own_rows(row.float(), group) for row in rows(16 * group.size))
    for _ in range(steps):
        forget(model)
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = (out.float() - y).square().mean()
        (loss * SCALE).backward()
        average(model, group)
        for p in model.parameters():
            p.grad = p.grad / SCALE if p.grad is not None else None
        step_down(model.parameters())
        losses.append(loss.item())
    return losses, model


def repaired(group: Group, steps: int = 6) -> tuple[list[float], nn.Module]:
    """Train in fp16 until `steps` steps were taken: weights in fp32, products in fp16, loss times a scale."""
    model, losses = net().float(), list[float]()
    x, y = (own_rows(row.float(), group) for row in rows(16 * group.size))
    scaler = Scaler(LossScale(SCALE), agree=[group])
    while len(losses) < steps:
        forget(model)
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = (out.float() - y).square().mean()
        scaler.scale(loss).backward()
        average(model, group)
        if scaler.step(Target(model)):
            losses.append(loss.item())
        scaler.update()
    return losses, model


def reference(n_ranks: int, steps: int = 6) -> tuple[list[float], nn.Module]:
    """One process in fp32."""
    return plain(steps, 16 * n_ranks, dtype=torch.float32)


def shows_cause(chart: Chart) -> bool:
    """True if gradients are not finite, though the first loss is."""
    tables = [rank.gradients for rank in chart.seen if rank.gradients]
    return any(row.not_finite > 0 for table in tables for row in table) and chart.losses[0] < 10


TRIAL = Trial(tolerance=5e-3, look_steps=1)
