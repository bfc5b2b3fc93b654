"""Tensor parallelism over the slow link, because two axes of the mesh are swapped.

    node 0: ranks 0, 1     node 1: ranks 2, 3
    broken     tp pairs (0, 2) and (1, 3): every layer's sum travels between the nodes
    repaired   tp pairs (0, 1) and (2, 3): it stays inside a node; only gradients of dp cross, once a step

The links are throttled: NVLink inside a node, InfiniBand between nodes, both slowed down in proportion.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import average, own_rows
from labkit.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from labkit.plan.machine.topology import Links
from labkit.plan.partition.layout import Layout

WIDTH, ROWS, LAYERS = 32, 512, 3
LINKS = Links.placed([[0, 1], [2, 3]], "nvlink", "infiniband", scale=1e-4, latency_scale=1)


def linears() -> list[tuple[nn.Linear, nn.Linear]]:
    """Three pairs of whole linear layers."""
    torch.manual_seed(0)
    return [(nn.Linear(WIDTH, 2 * WIDTH).double(), nn.Linear(2 * WIDTH, WIDTH).double()) for _ in range(LAYERS)]


def batch() -> Tensor:
    """The rows of all replicas."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def train(group: Group, steps: int, dp: Group, tp: Group) -> tuple[list[float], None]:
    """Train: forward, backward, and the mean of gradients over dp; no step."""
    pairs = [(ColumnParallelLinear.of(up, tp), RowParallelLinear.of(down, tp)) for up, down in linears()]
    model = nn.ModuleList(layer for pair in pairs for layer in pair)
    x, losses = own_rows(batch(), dp), []
    for _ in range(steps):
        model.zero_grad()
        y = x
        for up, down in pairs:
            y = y + down(torch.tanh(up(y)))
        loss = y.square().mean()
        loss.backward()
        average(model, dp)
        losses.append(loss.item())
    return losses, None


def broken(group: Group, steps: int = 2) -> tuple[list[float], None]:
    """Train with dp 2, tp 2."""
    mesh = Mesh.connect(Layout(dp=2, tp=2), group)
    return train(group, steps, dp=mesh.tp, tp=mesh.dp)


def repaired(group: Group, steps: int = 2) -> tuple[list[float], None]:
    """Train with dp 2, tp 2."""
    mesh = Mesh.connect(Layout(dp=2, tp=2), group)
    return train(group, steps, dp=mesh.dp, tp=mesh.tp)


def reference(n_ranks: int, steps: int = 2) -> tuple[list[float], None]:
    """One process with whole layers and the whole batch."""
    y = batch()
    for up, down in linears():
        y = y + down(torch.tanh(up(y)))
    return [y.square().mean().item()] * steps, None


def shows_cause(chart: Chart) -> bool:
    """True if the ranks wait for the wire, and most bytes leave the node."""
    return chart.recording.shares().exposed > 0.3 and chart.across > 0.5


TRIAL = Trial(steps=2, links=LINKS, n_ranks=4)
