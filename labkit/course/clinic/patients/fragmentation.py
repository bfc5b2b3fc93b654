"""The allocator's free bytes lie in holes, none of which is large enough.

    filling the cache   |raw....|k|raw....|k|raw....|k|      k: what is kept of a sample; all raw samples are alive
    raw samples go      |.......|k|.......|k|.......|k|      free: 80%, and no hole is larger than one sample
    a longer batch                                     |....................|     must come from the device

No segment can be given back, since each has a piece in use. Repaired, a raw sample is released before the next is read,
and what is kept lies side by side. Addresses are simulated (clinic/pool.py); the tensors are real.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import average, descend, forget, net, rows, step_down

SAMPLES, RAW, KEPT = 48, 64, 16
LONGER = 24


def target(x: Tensor) -> Tensor:
    """The values to be learned."""
    return torch.sin(x.sum(1, keepdim=True))


def train(group: Group, steps: int, kept: list[Tensor]) -> tuple[list[float], nn.Module]:
    """Train on batches that grow from step to step, as in a curriculum."""
    model, losses = net(), []
    for step in range(steps):
        n = LONGER * (step + 1)
        x = torch.cat(kept[: -(-n // KEPT)])[:n]
        forget(model)
        loss = (model(x) - target(x)).square().mean()
        loss.backward()
        average(model, group)
        step_down(model.parameters())
        losses.append(loss.item())
    return losses, model


def broken(group: Group, steps: int = 10) -> tuple[list[float], nn.Module]:
    """Keep some rows of every sample, then train on them."""
    raw, kept = [], []
    for k in range(SAMPLES):
        raw.append(rows(RAW, seed=1000 * group.rank + k)[0])
        kept.append(raw[-1][:KEPT].clone())
    del raw
    return train(group, steps, kept)


def repaired(group: Group, steps: int = 10) -> tuple[list[float], nn.Module]:
    """Keep some rows of every sample, then train on them."""
    raw, kept = torch.empty(0), []
    for k in range(SAMPLES):
        raw = rows(RAW, seed=1000 * group.rank + k)[0]
        kept.append(raw[:KEPT].clone())
    del raw
    return train(group, steps, kept)


def reference(n_ranks: int, steps: int = 10) -> tuple[list[float], nn.Module]:
    """One process, with the mean of the ranks' mean losses."""
    model = net()
    whole = [torch.cat([rows(RAW, 1000 * r + k)[0][:KEPT] for k in range(SAMPLES)]) for r in range(n_ranks)]

    def loss_of(step: int) -> Tensor:
        batches = [part[: LONGER * (step + 1)] for part in whole]
        return torch.stack([(model(x) - target(x)).square().mean() for x in batches]).mean()

    return descend(model, steps, loss_of)


def shows_cause(chart: Chart) -> bool:
    """True if most of what the device had given was idle when it was asked for more."""
    return any(rank.reserved > 2 * rank.allocated for rank in chart.stored)


TRIAL = Trial(steps=10, pool_bytes=9 * 64 * 1024)
