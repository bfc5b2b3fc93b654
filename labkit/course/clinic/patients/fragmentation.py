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
from labkit.course.clinic.case_file import Patient, Suspect
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import average, forget, net, rows, step_down

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
    model, losses = net(), []
    whole = [torch.cat([rows(RAW, 1000 * r + k)[0][:KEPT] for k in range(SAMPLES)]) for r in range(n_ranks)]
    for step in range(steps):
        forget(model)
        batches = [part[: LONGER * (step + 1)] for part in whole]
        loss = torch.stack([(model(x) - target(x)).square().mean() for x in batches]).mean()
        loss.backward()
        step_down(model.parameters())
        losses.append(loss.item())
    return losses, model


def shows_cause(chart: Chart) -> bool:
    """True if most of what the device had given was idle when it was asked for more."""
    return any(rank.reserved > 2 * rank.allocated for rank in chart.stored)


CASE = Patient(
    name="Emil",
    complaint="Out of memory after hours, when batches have grown a little. A third was allocated, says the message.",
    symptom="out of memory",
    cause="fragmentation",
    test="allocator",
    shows="much is reserved, little is allocated, the largest free piece is too small",
    repair="release before you reserve (or expandable segments)",
    lab="01",
    differential=(
        Suspect("a growing graph", "memory", "the floor of live bytes rises"),
        Suspect("a rare long sequence", "memory", "one step's peak stands out"),
        Suspect("everything gathered", "memory", "parameters at the peak are as many as the model's"),
    ),
    broken=broken,
    repaired=repaired,
    reference=reference,
    shows_cause=shows_cause,
    steps=10,
    pool_bytes=9 * 64 * 1024,
)
