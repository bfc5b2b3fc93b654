"""One batch in many holds a long text, and every sequence of it is padded to that length.

    8 sequences of 16 positions, 8 of 16, ... 8 of 256: 16 times the activations

Repaired: sequences are taken in micro-batches of at most so many positions. The long one gets a micro-batch of its own,
the others are cut to their own length, and the sum is divided by the positions that count, so the gradient is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import WIDE, average, descend, forget, net, rows, step_down

ROWS, SHORT, LONG, RARE = 8, 16, 256, 5


def texts(step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Eight texts, each [positions, 16] and [positions, 1]; in step 5 rank 0 has a long one."""
    lengths = [LONG if (step, rank, k) == (RARE, 0, 3) else SHORT - k for k in range(ROWS)]
    return [rows(n, seed=100 * step + 10 * rank + k) for k, n in enumerate(lengths)]


def padded(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """All texts at the length of the longest.   -> [B, T, 16], [B, T, 1], which positions count [B, T, 1]"""
    longest = max(len(x) for x, _ in batch)
    x, y = torch.zeros(len(batch), longest, WIDE).double(), torch.zeros(len(batch), longest, 1).double()
    counts = torch.zeros_like(y)
    for k, (a, b) in enumerate(batch):
        x[k, : len(a)], y[k, : len(b)], counts[k, : len(a)] = a, b, 1
    return x, y, counts


def broken(group: Group, steps: int = 8) -> tuple[list[float], nn.Module]:
    """Train on one batch at a time."""
    model, losses = net(), []
    for step in range(steps):
        forget(model)
        x, y, counts = padded(texts(step, group.rank))
        loss = ((model(x) - y).square() * counts).sum() / counts.sum()
        loss.backward()
        average(model, group)
        step_down(model.parameters())
        losses.append(loss.item())
    return losses, model


def repaired(group: Group, steps: int = 8, most: int = ROWS * SHORT * 2) -> tuple[list[float], nn.Module]:
    """Train on at most `most` positions at a time."""
    model, losses = net(), []
    for step in range(steps):
        forget(model)
        batch, total = texts(step, group.rank), 0.0
        whole, longest = sum(len(x) for x, _ in batch), max(len(x) for x, _ in batch)
        micros = [batch] if longest * len(batch) <= most else [[text] for text in batch]
        for micro in micros:
            x, y, counts = padded(micro)
            loss = ((model(x) - y).square() * counts).sum() / whole
            loss.backward()
            total += loss.item()
        average(model, group)
        step_down(model.parameters())
        losses.append(total)
    return losses, model


def reference(n_ranks: int, steps: int = 8) -> tuple[list[float], nn.Module]:
    """One process without padding: all positions of a rank are rows of one batch."""
    model = net()

    def loss_of(step: int) -> Tensor:
        batches = [map(torch.cat, zip(*texts(step, rank), strict=True)) for rank in range(n_ranks)]
        return torch.stack([(model(x) - y).square().mean() for x, y in batches]).mean()

    return descend(model, steps, loss_of)


def shows_cause(chart: Chart) -> bool:
    """True if the floor is level and one peak is many times the usual one."""
    usual = [sorted(rank.tops)[len(rank.tops) // 2] for rank in chart.stored]
    return any(max(rank.tops) > 4 * low for rank, low in zip(chart.stored, usual, strict=True))


TRIAL = Trial(steps=8, cap_bytes=700_000)
