"""torch's `fully_shard`, called for every block and never for the model that holds them.

    blocks        each is a unit: its weights are sharded, and its gradients are summed over all ranks
    first, head   in no unit: every rank keeps them as they are, and steps with the gradient of its own samples

torch raises no error, since a block that is called alone is a root itself. In the repaired program, fully_shard is also
called for the model, after all blocks: the model's unit has every parameter that is in no block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.comm.stock import device_mesh, fully_sharded
from labkit.course.clinic.case_file import Trial
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.task import WIDE, descend, forget, own_rows, rows, step_down

HIDDEN, BLOCKS = 30, 2


class Deep(nn.Module):
    """A linear layer, blocks, and a head, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDE, HIDDEN).double()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()).double() for _ in range(BLOCKS))
        self.head = nn.Linear(HIDDEN, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        """[n, 16] -> [n, 1]"""
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


def train(model: nn.Module, group: Group, steps: int) -> tuple[list[float], nn.Module]:
    """Train with the samples of this rank; returns the losses, and the model that this rank would save."""
    losses = []
    x, y = (own_rows(tensor, group) for tensor in rows(16 * group.size))
    for _ in range(steps):
        forget(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        step_down(model.parameters())
        losses.append(loss.item())
    return losses, saved(model, group)


@torch.no_grad()
def saved(model: nn.Module, group: Group) -> nn.Module:
    """The model with all of its weights and gradients, as this rank sees them: shards are gathered."""
    plain = Deep()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        p.data, p.grad = full(q, group), None if q.grad is None else full(q.grad, group)
    return plain


def full(tensor: Tensor, group: Group) -> Tensor:
    """A copy of the tensor, or of all of it if it is a DTensor that is cut along dim 0.

    Not by `full_tensor()`: torch takes meshes of equal ranks for one, so it may gather in the group of an earlier run.
    """
    if not hasattr(tensor, "to_local"):
        return tensor.detach().clone()
    shard = tensor.to_local().detach()
    longest = math.ceil(len(tensor) / group.size)
    padded = shard.new_zeros(longest, *shard.shape[1:])
    padded[: len(shard)] = shard
    return group.all_gather(padded)[: len(tensor)]


def broken(group: Group, steps: int = 8) -> tuple[list[float], nn.Module]:
    """Train with `fully_shard`."""
    model = Deep()
    fully_sharded(model.blocks, device_mesh(group), None)
    return train(model, group, steps)


def repaired(group: Group, steps: int = 8) -> tuple[list[float], nn.Module]:
    """Train with `fully_shard`."""
    model = Deep()
    fully_sharded([*model.blocks, model], device_mesh(group), None)
    return train(model, group, steps)


def reference(n_ranks: int, steps: int = 8) -> tuple[list[float], nn.Module]:
    """One process with all samples."""
    model = Deep()
    x, y = rows(16 * n_ranks)
    return descend(model, steps, lambda _: (model(x) - y).square().mean())


def shows_cause(chart: Chart) -> bool:
    """True if ranks agree on each weight of the blocks, and on none of the first layer and the head."""
    unequal = chart.unequal()
    alike = {name for name, differs in unequal.items() if not differs}
    return alike == {name for name in unequal if name.startswith("blocks")} != set()


def fetch() -> None:
    """Let torch import its compiler, which the first DTensor of a process would do within the first step."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)


TRIAL = Trial(steps=8, before=fetch)
