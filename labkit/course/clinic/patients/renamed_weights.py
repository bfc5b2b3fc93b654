"""A checkpoint whose names are not the model's, loaded by a call that forgives it.

    saved     module.0.weight  module.0.bias  ...      a wrapper was around the model
    asked     0.weight         0.bias         ...      nothing matches, and strict=False does not say so
    after     the fresh weights, as they were          the loss begins where it once began

The job ends in the middle and is started again. Repaired, the wrapper's name is taken off, and loading is strict.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import average, forget, net, own_rows, plain, rows, step_down


def life(model: nn.Module, group: Group, steps: int) -> list[float]:
    """The steps of one job."""
    losses = []
    x, y = (own_rows(row, group) for row in rows(16 * group.size))
    for _ in range(steps):
        forget(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        average(model, group)
        step_down(model.parameters())
        losses.append(loss.item())
    return losses


def first_job(group: Group, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train inside a wrapper, as DistributedDataParallel is one; the losses, and what its checkpoint has."""
    wrapped = nn.ModuleDict({"module": net()})
    losses = life(wrapped["module"], group, steps)
    return losses, {name: value.clone() for name, value in wrapped.state_dict().items()}


def broken(group: Group, steps: int = 16) -> tuple[list[float], nn.Module]:
    """Train half of the steps, stop, start again from the checkpoint, and train the rest."""
    losses, checkpoint = first_job(group, steps // 2)
    model: Any = net()
    model.load_state_dict(checkpoint, strict=False)
    return losses + life(model, group, steps - steps // 2), model


def repaired(group: Group, steps: int = 16) -> tuple[list[float], nn.Module]:
    """Train half of the steps, stop, start again from the checkpoint, and train the rest."""
    losses, checkpoint = first_job(group, steps // 2)
    model: Any = net()
    model.load_state_dict({name.removeprefix("module."): value for name, value in checkpoint.items()})
    return losses + life(model, group, steps - steps // 2), model


def reference(n_ranks: int, steps: int = 16) -> tuple[list[float], nn.Module]:
    """One process with all rows, which is never stopped."""
    return plain(steps, 16 * n_ranks)


def shows_cause(chart: Chart) -> bool:
    """True if the losses begin anew in the middle, and every rank has the same weights."""
    ours, half = chart.losses, len(chart.losses) // 2
    restarted = half > 1 and ours[0] != ours[1] and ours[half : 2 * half] == ours[:half]
    return restarted and chart.apart("weights") == 0.0


TRIAL = Trial(steps=16)
