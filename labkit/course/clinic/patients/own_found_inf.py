"""Each rank checks only its own shard for infinities, and decides alone whether to skip a step.

    last rank   its shard overflows: skips the step      head stays
    the others  all finite: step                         head moves: it is not the same everywhere any more

A tensor-parallel pair of linear layers, followed by a replicated head. One shard has large weights. Repaired: ranks
agree on `found_inf`, 4 bytes a step, and skip together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.patients.overflow import Target
from labkit.course.clinic.task import WIDE, forget, rows, step_down
from labkit.parallel.tensor import reduce_from
from labkit.train.loss_scale import LossScale, Scaler

SCALE, PART = 2.0**23, 8


def whole(n_ranks: int) -> tuple[Tensor, Tensor, nn.Linear]:
    """Weights of both layers, [8 n, 16] and [4, 8 n], and the head; the last 8 hidden units weigh 100 times as much."""
    torch.manual_seed(0)
    up, down = torch.randn(PART * n_ranks, WIDE) / 4, torch.randn(4, PART * n_ranks) / 8
    down[:, -PART:] *= 100
    return up, down, nn.Linear(4, 1)


class Cut(nn.Module):
    """This rank's part of the pair of layers, and the head."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        up, down, self.head = whole(group.size)
        self.group, part = group, slice(PART * group.rank, PART * (group.rank + 1))
        self.up, self.down = nn.Parameter(up[part].clone()), nn.Parameter(down[:, part].clone())

    def forward(self, x: Tensor) -> Tensor:
        """[B, 16] -> [B, 1]"""
        with torch.autocast("cpu", torch.float16):
            term = torch.tanh(x @ self.up.T) @ self.down.T
        return self.head(torch.tanh(reduce_from(term.float(), self.group) / 100))


def train(group: Group, steps: int, scaler: Scaler) -> tuple[list[float], nn.Module]:
    """Train until rank 0 has taken `steps` steps. Returns its losses, and the head, which all ranks have."""
    model, losses = Cut(group), list[float]()
    x, y = (row.float() for row in rows(32))
    while len(losses) < steps:
        forget(model)
        loss = (model(x) - y).square().mean()
        scaler.scale(loss).backward()
        taken = scaler.step(Target(model))
        scaler.update()
        taken = bool(group.broadcast(torch.tensor([float(taken)])))  # rank 0 decides for all when to stop
        losses += [loss.item()] if taken else []
    return losses, model.head


def broken(group: Group, steps: int = 4) -> tuple[list[float], nn.Module]:
    """Train in fp16 with a scaler."""
    return train(group, steps, Scaler(LossScale(SCALE)))


def repaired(group: Group, steps: int = 4) -> tuple[list[float], nn.Module]:
    """Train in fp16 with a scaler."""
    return train(group, steps, Scaler(LossScale(SCALE), agree=[group]))


def reference(n_ranks: int, steps: int = 4) -> tuple[list[float], nn.Module]:
    """One process with the whole layers, in fp32."""
    up, down, head = whole(n_ranks)
    up.requires_grad_(), down.requires_grad_()
    x, y = (row.float() for row in rows(32))
    losses = []
    for _ in range(steps):
        up.grad = down.grad = None
        forget(head)
        loss = (head(torch.tanh(torch.tanh(x @ up.T) @ down.T / 100)) - y).square().mean()
        loss.backward()
        step_down([up, down, *head.parameters()])
        losses.append(loss.item())
    return losses, head


def shows_cause(chart: Chart) -> bool:
    """True if the last rank's head differs and all others are alike."""
    if len({rank.losses[:1] for rank in chart.seen}) > 1:
        return False  # they differed before the first step
    heads = [rank.weights for rank in chart.seen if rank.weights is not None]
    return chart.apart("weights") > 1e-6 and all(torch.equal(heads[0], head) for head in heads[:-1])


TRIAL = Trial(steps=4, tolerance=1e-2)
