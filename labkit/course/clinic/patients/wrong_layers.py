"""LoRA with a low rank, in layers that the task does not need to change.

    what the task changes     `down`, in four directions
    what the recipe adapts    `up`, in one

The task is built that way: targets come from the same net with a correction of rank 4 in `down`. Repaired, the layers
are those with the largest gradients, and the rank is the number of directions in which the weights have to change.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import WIDE, average, forget, own_rows, step_down
from labkit.train.lora import inject_lora

HIDDEN, LR = 32, 0.3


def pretrained() -> nn.Sequential:
    """The net before fine-tuning."""
    torch.manual_seed(0)
    parts = [("up", nn.Linear(WIDE, HIDDEN)), ("act", nn.Tanh()), ("down", nn.Linear(HIDDEN, WIDE))]
    return nn.Sequential(OrderedDict(parts)).double()


def task(n_rows: int) -> tuple[Tensor, Tensor]:
    """Inputs, and the outputs of a net in which `down` was changed.   -> [n, 16], [n, 16]"""
    draw = torch.Generator().manual_seed(5)
    teacher = pretrained()
    left, right = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((WIDE, 4), (4, HIDDEN)))
    x = torch.randn(n_rows, WIDE, generator=draw, dtype=torch.float64)
    with torch.no_grad():
        teacher.down.weight += left @ right / 8  # type: ignore[operator, union-attr]
        return x, teacher(x)


def train(group: Group, steps: int, model: nn.Module) -> tuple[list[float], nn.Module]:
    """Train the parameters that are not frozen."""
    x, y = (own_rows(part, group) for part in task(64 * group.size))
    losses = []
    for _ in range(steps):
        forget(model)
        loss = (model(x) - y).square().sum(1).mean()
        loss.backward()
        average(model, group)
        step_down(model.parameters(), LR / 4)
        losses.append(loss.item())
    return losses, model


def broken(group: Group, steps: int = 60) -> tuple[list[float], nn.Module]:
    """Fine-tune with LoRA."""
    model = pretrained()
    inject_lora(model, "up", rank=1)
    return train(group, steps, model)


def repaired(group: Group, steps: int = 60) -> tuple[list[float], nn.Module]:
    """Fine-tune with LoRA."""
    model = pretrained()
    inject_lora(model, "down", rank=4, alpha=8)
    return train(group, steps, model)


def reference(n_ranks: int, steps: int = 60) -> tuple[list[float], None]:
    """Full fine-tuning of one layer by least squares: the best that a change of `down` can do, here a loss of zero."""
    x, y = task(64 * n_ranks)
    model = pretrained()
    with torch.no_grad():
        first = (model(x) - y).square().sum(1).mean().item()
        hidden = torch.cat([torch.tanh(model.up(x)), torch.ones(len(x), 1).double()], 1)  # type: ignore[operator]
        left = (hidden @ torch.linalg.lstsq(hidden, y).solution - y).square().sum(1).mean().item()
    return [first, *[left] * (steps - 1)], None


def shows_cause(chart: Chart) -> bool:
    """True if the layer that the task pulls at, `down`, has no gradient and so is not trained."""
    table = chart.seen[0].gradients
    rows = [row for row in table or () if row.name.startswith("down")]
    return bool(rows) and all(row.n == 0 for row in rows)


TRIAL = Trial(steps=60, tolerance=0.05, last_only=True)
