"""A collective stands in a branch that not every rank takes.

    rank 0   rare rows: all_gather, for ever
    rank 1   none:      all_reduce of the gradients, for ever

A few rows are marked as rare; a term of the loss grows with their share in the whole batch. A rank without such rows
does not ask for the share. Repaired, every rank asks in every step. (The question has a group of its own, like the
routers of experts. Within one group labkit would refuse the two collectives by name; NCCL would hang there, too.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import average, descend, forget, net, own_rows, rows, step_down
from labkit.plan.partition.layout import Layout


def batch(step: int, n_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets, and which rows are rare: all ranks have one in most steps, rank 0 alone in step 2."""
    x, y = rows(8 * n_ranks, seed=step)
    rare = torch.zeros(8 * n_ranks)
    rare[::8] = 1
    if step == 2:
        rare[1:] = 0
    return x, y, rare


def _loss(model: nn.Module, x: Tensor, y: Tensor, share: float) -> Tensor:
    """The mean square error, and a penalty on the last layer in proportion to the share of rare rows."""
    return (model(x) - y).square().mean() + share * model[2].weight.square().sum()  # type: ignore[index]


def broken(group: Group, steps: int = 6) -> tuple[list[float], nn.Module]:
    """Train for some steps."""
    model, losses = net(), []
    experts = Mesh.connect(Layout(tp=group.size), group).tp
    for step in range(steps):
        x, y, rare = (own_rows(part, group) for part in batch(step, group.size))
        share = 0.0
        if rare.any():
            share = float(experts.all_gather(rare).mean())
        forget(model)
        loss = _loss(model, x, y, share)
        loss.backward()
        average(model, group)
        step_down(model.parameters())
        losses.append(loss.item())
    return losses, model


def repaired(group: Group, steps: int = 6) -> tuple[list[float], nn.Module]:
    """Train for some steps."""
    model, losses = net(), []
    experts = Mesh.connect(Layout(tp=group.size), group).tp
    for step in range(steps):
        x, y, rare = (own_rows(part, group) for part in batch(step, group.size))
        share = float(experts.all_gather(rare).mean())
        forget(model)
        loss = _loss(model, x, y, share)
        loss.backward()
        average(model, group)
        step_down(model.parameters())
        losses.append(loss.item())
    return losses, model


def reference(n_ranks: int, steps: int = 6) -> tuple[list[float], nn.Module]:
    """The whole batch in one process."""
    model = net()

    def loss_of(step: int) -> Tensor:
        x, y, rare = batch(step, n_ranks)
        return _loss(model, x, y, float(rare.mean()))

    return descend(model, steps, loss_of)


def shows_cause(chart: Chart) -> bool:
    """True if some ranks wait in the all_gather of rare rows and others in the all_reduce."""
    ranks = chart.error.autopsy.ranks if chart.error else ()
    return any(rank.verb == "all_gather" for rank in ranks) and any(rank.verb == "all_reduce" for rank in ranks)
