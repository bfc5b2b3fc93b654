"""Every step waits for its rows to be read.

    broken     read | compute | read | compute          repaired   read | read | read | read
                                                                        | compute | compute

Reading means 60 ms of waiting for a disk. Repaired, threads read ahead, and six reads are under way at once.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import average, forget, net, own_rows, plain, rows, step_down

READ_S = 60e-3


def read(group: Group) -> tuple[Tensor, Tensor]:
    """Read this rank's rows from the disk."""
    time.sleep(READ_S)
    x, y = rows(8 * group.size)
    return own_rows(x, group), own_rows(y, group)


def broken(group: Group, steps: int = 6) -> tuple[list[float], nn.Module]:
    """Train on what is read."""
    model, losses = net(), []
    for _ in range(steps):
        x, y = read(group)
        forget(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        average(model, group)
        step_down(model.parameters())
        losses.append(loss.item())
    return losses, model


def repaired(group: Group, steps: int = 6) -> tuple[list[float], nn.Module]:
    """Train on what is read."""
    model, losses = net(), []
    with ThreadPoolExecutor(6) as readers:
        ahead = [readers.submit(read, group) for _ in range(steps)]
        for reading in ahead:
            x, y = reading.result()
            forget(model)
            loss = (model(x) - y).square().mean()
            loss.backward()
            average(model, group)
            step_down(model.parameters())
            losses.append(loss.item())
    return losses, model


def reference(n_ranks: int, steps: int = 6) -> tuple[list[float], nn.Module]:
    """One process with all rows, in memory."""
    return plain(steps, 8 * n_ranks)


def shows_cause(chart: Chart) -> bool:
    """True if ranks do not communicate and their processors idle, long enough for a read in every step."""
    least = min(chart.recording.shares(rank).compute for rank in chart.recording.ranks)
    busy = max(rank.busy for rank in chart.seen)
    alone = least > 0.4 and not chart.ledgers[0].calls("send")
    return alone and busy < 0.5 and chart.recording.seconds > READ_S * chart.steps


TRIAL = Trial(steps=6)
