"""Rank 0 alone calls a collective that all ranks must call.

    rank 0   save: barrier, for ever
    rank 1   next step: all_reduce, for ever

Saving ends with a barrier, so that nobody reads half a file. Under `if group.rank == 0` only one rank reaches it.

Repaired, all ranks call `save`, and the condition stands inside it, round the writing alone.
"""

from __future__ import annotations

from torch import nn

from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import average, forget, net, own_rows, plain, rows, step_down
from labkit.plan.partition.layout import Layout


def save(model: nn.Module, savers: Group) -> None:
    """Write the weights (here: keep a copy), and wait until they are written."""
    if savers.rank == 0:
        savers.state["saved"] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    savers.barrier()


def broken(group: Group, steps: int = 6) -> tuple[list[float], nn.Module]:
    """Train, with a checkpoint after every third step."""
    model, losses = net(), []
    savers = Mesh.connect(Layout(tp=group.size), group).tp
    x, y = (own_rows(row, group) for row in rows(8 * group.size))
    for step in range(steps):
        forget(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        average(model, group)
        step_down(model.parameters())
        losses.append(loss.item())
        if step % 3 == 2 and group.rank == 0:
            save(model, savers)
    return losses, model


def repaired(group: Group, steps: int = 6) -> tuple[list[float], nn.Module]:
    """Train, with a checkpoint after every third step."""
    model, losses = net(), []
    savers = Mesh.connect(Layout(tp=group.size), group).tp
    x, y = (own_rows(row, group) for row in rows(8 * group.size))
    for step in range(steps):
        forget(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        average(model, group)
        step_down(model.parameters())
        losses.append(loss.item())
        if step % 3 == 2:
            save(model, savers)
    return losses, model


def reference(n_ranks: int, steps: int = 6) -> tuple[list[float], nn.Module]:
    """One process with all rows."""
    return plain(steps, 8 * n_ranks)


def shows_cause(chart: Chart) -> bool:
    """True if rank 0, and no other, is in a barrier."""
    ranks = chart.error.autopsy.ranks if chart.error else ()
    return [rank.rank for rank in ranks if rank.verb == "barrier"] == [0]
