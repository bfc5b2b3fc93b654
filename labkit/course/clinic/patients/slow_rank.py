"""One rank has more to do than the others, and everybody waits for it in every step.

    rank 0   compute |..... waits .....| all_reduce
    rank 3   compute | writes its log  | all_reduce

The last rank writes histograms of all weights after each step (here: real work of 40 ms). Repaired, it does so once.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import average, forget, net, own_rows, plain, rows, step_down


def write_log(model: nn.Module) -> None:
    """Compute histograms of all weights for 40 ms of processor time."""
    deadline = time.thread_time() + 40e-3
    while time.thread_time() < deadline:
        for p in model.parameters():
            torch.histc(p.detach(), 64)


def broken(group: Group, steps: int = 5) -> tuple[list[float], nn.Module]:
    """Train; the last rank writes the log."""
    model, losses = net(), []
    x, y = (own_rows(row, group) for row in rows(8 * group.size))
    for _ in range(steps):
        forget(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        if group.rank == group.size - 1:
            write_log(model)
        average(model, group)
        step_down(model.parameters())
        losses.append(loss.item())
    return losses, model


def repaired(group: Group, steps: int = 5) -> tuple[list[float], nn.Module]:
    """Train; the last rank writes the log."""
    model, losses = net(), []
    x, y = (own_rows(row, group) for row in rows(8 * group.size))
    for _ in range(steps):
        forget(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        average(model, group)
        step_down(model.parameters())
        losses.append(loss.item())
    return losses, model


def reference(n_ranks: int, steps: int = 5) -> tuple[list[float], nn.Module]:
    """One process with all rows."""
    return plain(steps, 8 * n_ranks)


def shows_cause(chart: Chart) -> bool:
    """True if all ranks but one spend most of the time waiting for a rank, and that one hardly any, because it works.

    A rank that had to wait for a core is late, too, but it has used the processor no longer than the others."""
    shares = [chart.recording.shares(rank) for rank in chart.recording.ranks]
    late = max(range(len(shares)), key=lambda rank: shares[rank].compute)
    others = [1 - share.compute for rank, share in enumerate(shares) if rank != late]
    works = chart.seen[late].busy > 2 * max(rank.busy for rank in chart.seen if rank.rank != late)
    late_alone = min(others) > 0.4 and 1 - shares[late].compute < min(others) / 2
    return late_alone and works and not chart.ledgers[0].calls("send")


TRIAL = Trial(steps=5)
