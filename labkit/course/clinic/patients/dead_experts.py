"""A mixture of experts that nothing keeps balanced: some experts get no rows, and without rows they never learn.

    rows by expert    first step    14  1  12  101      the router is fresh, and likes some more than others
    (two ranks)       last step     70  0  15   43      expert 1 met too few rows to become good at any: it gets none

No error and no hang: the model trains with the experts that are left, and holds the memory of all. Repaired, a bias for
the choice rises where there are few rows and sinks where there are many (`labkit.train.moe`). A real run has hundreds
of thousands of steps for that, and this one has a hundred: so each step moves the bias twenty times.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import WIDE, average, forget, own_rows, step_down
from labkit.train.config import GPTConfig
from labkit.train.gpt import MLP
from labkit.train.moe import MoE

KINDS, ROWS, LR, MOVES = 4, 64, 1.5, 20


def task(n_rows: int) -> tuple[Tensor, Tensor]:
    """Rows of four kinds, each around a place of its own, and a linear map for each kind.   -> [n, 16], [n, 16]"""
    draw = torch.Generator().manual_seed(3)
    maps = torch.randn(KINDS, WIDE, WIDE, generator=draw, dtype=torch.float64) / WIDE**0.5
    places = torch.randn(KINDS, WIDE, generator=draw, dtype=torch.float64)
    places += torch.randn(WIDE, generator=draw, dtype=torch.float64)
    kind, x = torch.arange(n_rows) % KINDS, torch.randn(n_rows, WIDE, generator=draw, dtype=torch.float64)
    return x + places[kind], (maps[kind] @ x[:, :, None]).squeeze(-1)


def mixture(balance: str) -> MoE:
    """As many experts as kinds, of which a row meets one; in float64."""
    torch.manual_seed(0)
    sizes = GPTConfig(d_model=WIDE, n_head=1, n_expert=KINDS, top_k=1, expert_ff=16, balance=balance)
    return MoE(sizes, MLP).double()


def load_of(layer: MoE) -> Tensor:
    """The rows of each expert since the last step of the bias."""
    assert layer.load is not None, "backward counts them"
    return layer.load.clone()


def broken(group: Group, steps: int = 100) -> tuple[list[float], nn.Module]:
    """Train a layer of experts."""
    layer, losses = mixture("none"), []
    x, y = (own_rows(tensor, group) for tensor in task(ROWS * group.size))
    for _ in range(steps):
        forget(layer)
        loss = (layer(x) - y).square().mean()
        loss.backward()
        average(layer, group)
        step_down(layer.parameters(), LR)
        losses.append(loss.item())
    return losses, layer


def repaired(group: Group, steps: int = 100) -> tuple[list[float], nn.Module]:
    """Train a layer of experts."""
    layer, losses = mixture("bias"), []
    x, y = (own_rows(tensor, group) for tensor in task(ROWS * group.size))
    for _ in range(steps):
        forget(layer)
        loss = (layer(x) - y).square().mean()
        loss.backward()
        average(layer, group)
        step_down(layer.parameters(), LR)
        load = group.all_reduce(load_of(layer))
        for _ in range(MOVES):
            layer.balance_(load)
        losses.append(loss.item())
    return losses, layer


def reference(n_ranks: int, steps: int = 100) -> tuple[list[float], nn.Module]:
    """One process with all rows, and experts that are kept balanced."""
    layer, losses = mixture("bias"), []
    x, y = task(ROWS * n_ranks)
    for _ in range(steps):
        forget(layer)
        loss = (layer(x) - y).square().mean()
        loss.backward()
        step_down(layer.parameters(), LR)
        load = load_of(layer)
        for _ in range(MOVES):
            layer.balance_(load)
        losses.append(loss.item())
    return losses, layer


def shows_cause(chart: Chart) -> bool:
    """True if an expert had not one row of all ranks in the last step."""
    return any(count == 0 for layer in chart.rows_by_expert for count in layer)


TRIAL = Trial(steps=100, tolerance=1e-6)
