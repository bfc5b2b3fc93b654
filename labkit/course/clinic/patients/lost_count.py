"""Adam goes on after a restart with its moments, and with a count of steps that begins at 0 again.

    mean / (1 - 0.9^t), square / (1 - 0.95^t)     t = 1 again: the mean is taken 10 times, the square 20 times

The first step after the restart is then 10 / sqrt(20) = 2.2 times as long as late in training, with the momentum of the
old job. (With 0.999 in place of 0.95 it is 10 / sqrt(1000), a third, and too short for hundreds of steps.)
Repaired, the count is saved and loaded with the moments.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import average, forget, net, own_rows, rows

LR = 0.05


class Adam:
    """Adam without torch's classes: moments, and the number of steps so far."""

    def __init__(self, model: nn.Module) -> None:
        """All moments are 0."""
        self.params = list(model.parameters())
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.params]
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        """One step with the gradients of the parameters."""
        self.count += 1
        for p, (mean, square) in zip(self.params, self.moments, strict=True):
            if p.grad is not None:
                mean.lerp_(p.grad, 0.1)
                square.lerp_(p.grad.square(), 0.05)
                sizes = (square / (1 - 0.95**self.count)).sqrt() + 1e-8
                p.sub_(LR * mean / (1 - 0.9**self.count) / sizes)


def life(model: nn.Module, adam: Adam, group: Group | None, x: Tensor, y: Tensor, steps: int) -> list[float]:
    """The steps of one job."""
    losses = []
    for _ in range(steps):
        forget(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        if group is not None:
            average(model, group)
        adam.step()
        losses.append(loss.item())
    return losses


def broken(group: Group, steps: int = 24) -> tuple[list[float], nn.Module]:
    """Train half of the steps, stop, start again from the checkpoint, and train the rest."""
    model = net()
    adam, (x, y) = Adam(model), (own_rows(row, group) for row in rows(16 * group.size))
    losses = life(model, adam, group, x, y, steps // 2)
    checkpoint = {"moments": adam.moments}
    adam = Adam(model)
    adam.moments = checkpoint["moments"]
    return losses + life(model, adam, group, x, y, steps - steps // 2), model


def repaired(group: Group, steps: int = 24) -> tuple[list[float], nn.Module]:
    """Train half of the steps, stop, start again from the checkpoint, and train the rest."""
    model = net()
    adam, (x, y) = Adam(model), (own_rows(row, group) for row in rows(16 * group.size))
    losses = life(model, adam, group, x, y, steps // 2)
    moments, count = adam.moments, adam.count
    adam = Adam(model)
    adam.moments, adam.count = moments, count
    return losses + life(model, adam, group, x, y, steps - steps // 2), model


def reference(n_ranks: int, steps: int = 24) -> tuple[list[float], nn.Module]:
    """One process with all rows, which is never stopped."""
    model = net()
    return life(model, Adam(model), None, *rows(16 * n_ranks), steps), model


def shows_cause(chart: Chart) -> bool:
    """True if the first loss after the restart is still right, and the next one is not."""
    if chart.alone is None or len(chart.losses) < 4:
        return False
    apart = [abs(a - b) for a, b in zip(chart.losses, chart.alone[0], strict=True)]
    half = len(apart) // 2
    return max(apart[: half + 1]) < 1e-9 < 1e-6 < apart[half + 1]


TRIAL = Trial(steps=24)
