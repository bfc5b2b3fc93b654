"""The task of most broken programs: train a small net on a few rows, in float64, without torch's optimizers.

The first torch optimizer of a process imports a compiler and takes seconds; a step of gradient descent is two lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from labkit.comm.group import Group

WIDE = 16


def rows(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets, the same in every process.   -> [n, 16], [n, 1]"""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, WIDE, generator=draw, dtype=torch.float64)
    return x, torch.sin(x.sum(1, keepdim=True))


def net(seed: int = 0, hidden: int = 32) -> nn.Sequential:
    """A net of two linear layers, in float64."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDE, hidden), nn.Tanh(), nn.Linear(hidden, 1)).double()


def own_rows(x: Tensor, group: Group) -> Tensor:
    """This rank's part of the rows."""
    return x.chunk(group.size)[group.rank]


def average(model: nn.Module, group: Group) -> None:
    """Replace every gradient by the mean over all ranks, in one message: data parallelism by hand."""
    params = [p for p in model.parameters() if p.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    mean = group.all_reduce(torch.cat([g.flatten() for g in grads]), op="mean")
    for p, part in zip(params, mean.split([p.numel() for p in params]), strict=True):
        p.grad = part.view_as(p).clone()


@torch.no_grad()
def step_down(params: Iterable[Tensor], lr: float = 0.1) -> None:
    """One step of gradient descent."""
    for p in params:
        if p.grad is not None:
            p -= lr * p.grad


def forget(model: nn.Module) -> None:
    """Drop all gradients."""
    for p in model.parameters():
        p.grad = None


def descend(
    model: nn.Module, steps: int, loss_of: Callable[[int], Tensor], lr: float = 0.1
) -> tuple[list[float], nn.Module]:
    """Train in one process, as most references do: `loss_of(step)` is the loss of a step."""
    losses = []
    for step in range(steps):
        forget(model)
        loss = loss_of(step)
        loss.backward()
        step_down(model.parameters(), lr)
        losses.append(loss.item())
    return losses, model


def plain(
    steps: int, n_rows: int, lr: float = 0.1, dtype: torch.dtype = torch.float64
) -> tuple[list[float], nn.Module]:
    """The reference of many cases: one process that takes all rows at once."""
    model = net().to(dtype)
    x, y = (tensor.to(dtype) for tensor in rows(n_rows))
    return descend(model, steps, lambda _: (model(x) - y).square().mean(), lr)
