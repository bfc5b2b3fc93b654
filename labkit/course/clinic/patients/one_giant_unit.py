"""ZeRO-3, with the whole model as one unit.

    units=[model]     gather everything | forward | backward | all gradients at once: as if nothing were sharded
    units=layers      gather one, free one

A unit is gathered as a whole. Repaired, every layer is a unit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import own_rows
from labkit.parallel.zero3 import ZeRO3

LAYERS, WIDTH = 4, 512
N_BYTES = LAYERS * WIDTH * WIDTH * 4


class Descent:
    """Gradient descent, without optimizer state."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        self.param_groups: list[dict[str, Any]]
        self.param_groups, self.state = [{"params": list(params), "lr": lr}], dict[Tensor, Any]()

    @torch.no_grad()
    def step(self) -> None:
        """Take one step."""
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])


def deep() -> nn.Sequential:
    """Four linear layers of 1 MiB each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def batch(n_ranks: int) -> Tensor:
    """The rows of all ranks."""
    return torch.randn(4 * n_ranks, WIDTH, generator=torch.Generator().manual_seed(1))


def train(group: Group, steps: int, units: Sequence[nn.Module], model: nn.Module) -> tuple[list[float], None]:
    """Train the model to return its input."""
    sync, x, losses = ZeRO3(model, group, Descent, units=units, prefetch=0), own_rows(batch(group.size), group), []  # type: ignore[arg-type]
    for _ in range(steps):
        sync.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        sync.finish()
        sync.step()
        losses.append(loss.item())
    return losses, None


def broken(group: Group, steps: int = 2) -> tuple[list[float], None]:
    """Train with the model sharded."""
    model = deep()
    return train(group, steps, [model], model)


def repaired(group: Group, steps: int = 2) -> tuple[list[float], None]:
    """Train with the model sharded."""
    model = deep()
    return train(group, steps, list(model), model)


def reference(n_ranks: int, steps: int = 2) -> tuple[list[float], None]:
    """One process that holds the whole model."""
    model, x, losses = copy.deepcopy(deep()), batch(n_ranks), []
    for _ in range(steps):
        model.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        Descent(model.parameters()).step()
        losses.append(loss.item())
    return losses, None


def shows_cause(chart: Chart) -> bool:
    """True if the peak exceeds two models, though a rank's own part is a fraction of one, with few activations."""
    return any(rank.peak.total > 2 * N_BYTES > 50 * rank.peak["activations"] for rank in chart.stored)


TRIAL = Trial(steps=2, tolerance=1e-5, cap_bytes=2 * N_BYTES)
