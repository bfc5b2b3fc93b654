"""A pipeline with one micro-batch under way at a time, and one heavy stage.

    rank 0   F . . . . . B          repaired   F F F F B F B F B F B B
    rank 1   . F . . . B .                     . F F F B F B F B F B B

Computing is simulated by sleeping, so that ranks which share two cores behave like separate devices. Repaired: layers
are dealt out by what they cost, and the batch is cut into many micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import WIDE, rows
from labkit.parallel.pipeline import Pipeline
from labkit.plan.schedules.schedule import one_f_one_b
from labkit.probe.paced import pace

ROWS, ROW_S = 32, 2e-4


class PacedLayer(nn.Linear):
    """A linear layer that takes `cost` times 0.2 ms per row forward, and twice that backward."""

    def __init__(self, cost: int) -> None:
        super().__init__(WIDE, WIDE, dtype=torch.float64)
        self.cost = cost

    def forward(self, x: Tensor) -> Tensor:
        """[B, 16] -> [B, 16]"""
        seconds = self.cost * ROW_S * len(x)
        return pace(torch.tanh(super().forward(x)), seconds, 2 * seconds)


def layers(n_ranks: int) -> list[PacedLayer]:
    """Four layers per rank; the last layer is a head that costs as much as four."""
    torch.manual_seed(0)
    return [PacedLayer(1) for _ in range(4 * n_ranks - 1)] + [PacedLayer(4)]


def _error(y: Tensor, target: Tensor) -> Tensor:
    """The mean square error."""
    return (y.sum(1, keepdim=True) - target).square().mean()


def train(group: Group, steps: int, cuts: list[int], n_micro: int) -> tuple[list[float], None]:
    """Train; stage r has the layers from cuts[r] to cuts[r + 1]."""
    stage = nn.Sequential(*layers(group.size)[cuts[group.rank] : cuts[group.rank + 1]])
    pipeline = Pipeline({group.rank: stage}, one_f_one_b(group.size, n_micro), group, loss=_error)
    x, y = rows(ROWS)
    losses = [pipeline.step(x.chunk(n_micro), y.chunk(n_micro)) for _ in range(steps)]
    return [float(loss) for loss in losses if loss is not None], None


def warm_up() -> None:
    """Call the first backward from an edge of the graph, which imports a part of torch and takes a second."""
    y = torch.zeros(1, requires_grad=True).sum()
    torch.autograd.backward([get_gradient_edge(y)], [torch.ones_like(y)])


def broken(group: Group, steps: int = 1) -> tuple[list[float], None]:
    """Train with the same number of layers on each rank."""
    cuts = [4 * rank for rank in range(group.size + 1)]
    return train(group, steps, cuts, n_micro=1)


def repaired(group: Group, steps: int = 1) -> tuple[list[float], None]:
    """Train with the same computing time on each rank."""
    cost = (4 * group.size + 3) // group.size + 1
    cuts = [min(cost * rank, 4 * group.size - 1) for rank in range(group.size)] + [4 * group.size]
    return train(group, steps, cuts, n_micro=8)


def reference(n_ranks: int, steps: int = 1) -> tuple[list[float], None]:
    """One process that runs all layers without sleeping."""
    x, y = rows(ROWS)
    for layer in layers(n_ranks):
        x = torch.tanh(nn.functional.linear(x, layer.weight, layer.bias))
    return [_error(x, y).item()] * steps, None


def shows_cause(chart: Chart) -> bool:
    """True if ranks spend most of the time waiting for one another, and hardly any waiting for the wire."""
    shares = chart.recording.shares()
    most = 1 - 1 / len(chart.seen)  # one micro-batch, equal stages
    return shares.bubble > 0.7 * most and shares.exposed < 0.2 and chart.ledgers[0].calls("send") > 0


TRIAL = Trial(steps=1, before=warm_up)
