"""One rank has one batch more than the others.

    rank 0   b0 b1 b2 b3 b4 -- all_reduce, for ever
    rank 1   b0 b1 b2 b3     returned

The rows are dealt out in turn, and their number is not a multiple of the ranks. Repaired, every rank takes part in
every step, weighted by the number of its rows, even if it has none.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import average, descend, forget, net, rows, step_down

BATCH = 8


def loader(rank: int, n_ranks: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of one rank."""
    x, y = rows(4 * BATCH * n_ranks + 1)
    return list(zip(x[rank::n_ranks].split(BATCH), y[rank::n_ranks].split(BATCH), strict=True))


def broken(group: Group, steps: int = 9) -> tuple[list[float], nn.Module]:
    """Train for an epoch."""
    model, losses = net(), []
    for x, y in loader(group.rank, group.size)[:steps]:
        forget(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        average(model, group)
        step_down(model.parameters())
        losses.append(loss.item())
    return losses, model


def repaired(group: Group, steps: int = 9) -> tuple[list[float], nn.Module]:
    """Train for an epoch, until no rank has rows."""
    model, losses = net(), []
    batches = iter(loader(group.rank, group.size))
    for _ in range(steps):
        x, y = next(batches, (torch.zeros(0, 16).double(), torch.zeros(0, 1).double()))
        n_rows = int(group.all_reduce(torch.tensor([len(x)])))
        if n_rows == 0:
            break
        forget(model)
        loss = (model(x) - y).square().sum() * group.size / n_rows
        loss.backward()
        average(model, group)
        step_down(model.parameters())
        losses.append(loss.item())
    return losses, model


def reference(n_ranks: int, steps: int = 9) -> tuple[list[float], nn.Module]:
    """One process that joins the batches of all ranks."""
    model, loaders = net(), [loader(rank, n_ranks) for rank in range(n_ranks)]

    def loss_of(step: int) -> Tensor:
        x, y = (torch.cat([batches[step][k] for batches in loaders if step < len(batches)]) for k in (0, 1))
        return (model(x) - y).square().mean()

    return descend(model, min(steps, max(map(len, loaders))), loss_of)


def shows_cause(chart: Chart) -> bool:
    """True if a rank waits in a collective for a rank that has finished."""
    return chart.error is not None and "finished without it" in chart.error.autopsy.headline


TRIAL = Trial(steps=9)
