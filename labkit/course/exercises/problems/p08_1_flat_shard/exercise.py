"""08.1: a unit's parameters become one flat shard, and whole again."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, holds
from labkit.course.judge.run_record import weigh

ROOM_BYTES = 8 << 10


class FlatUnit:
    """The parameters of one unit of ZeRO-3, of which this rank keeps 1/n; `unit.shard` is that part.   [k]

    The parameters are laid end to end, padded with zeros until n divides them (by fewer than n), and cut into n runs in
    rank order. When __init__ is over, the unit holds its shard and nothing else: nothing keeps the parameters, or a
    whole flat copy of them, alive. Nothing is sent."""

    def __init__(self, params: list[Tensor], group: Group):
        """params: all parameters of the unit, whole, in one dtype. They train: autograd notes what is made of them, and
        its notes keep them alive."""
        self.shapes = [p.shape for p in params]
        flat = torch.cat([p.detach().flatten() for p in params])
        padded = F.pad(flat, (0, -len(flat) % group.size))
        self.shard = padded.chunk(group.size)[group.rank].clone()

    def windows(self, whole: Tensor) -> list[Tensor]:
        """Each parameter, in its shape, as a view of a gathered buffer, all shards joined.   [n*k] -> one each"""
        sizes = [math.prod(shape) for shape in self.shapes]
        parts = whole[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks."""
    return [
        Case.of(3, shapes=[(640, 640), (64,), (641, 640), ()]),
        Case.of(4, torch.float64, shapes=[(3, 5, 7), (599, 701)]),
        Case.of(2, torch.bfloat16, shapes=[(1201, 800), (1,), (600, 1, 1000), (4,)]),
        Case.of(1, shapes=[(820, 1110), (7,)]),
    ]


def numel(case: Case) -> int:
    """Elements of a shard."""
    return -(-sum(math.prod(shape) for shape in case["shapes"]) // case.n_ranks)


def inputs(case: Case) -> Inputs:
    """The parameters, the same on all ranks, and a gathered buffer with other numbers in it."""
    params = [case.random(*shape, key=i) for i, shape in enumerate(case["shapes"])]
    whole = case.random(case.n_ranks * numel(case), key=100)
    return [([p.clone() for p in params], whole.clone()) for _ in range(case.n_ranks)]


def play(attempt: Any, group: Group, params: list[Tensor], whole: Tensor) -> Any:
    """Take a unit apart, weigh what is left, and lay a gathered buffer over it."""
    unit = attempt([p.clone().requires_grad_() for p in params], group)
    weigh(group)
    windows = unit.windows(whole)
    views = [w.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for w in windows]
    return {"shard": unit.shard, "windows": windows, "windows are views": all(views)}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The shards of a row of zeros that is filled parameter by parameter, and the windows."""
    params, whole = inputs[0]
    row, at, windows = torch.zeros(case.n_ranks * numel(case), dtype=case.dtype), 0, []
    for p in params:
        row[at : at + p.numel()] = p.reshape(-1)
        windows.append(torch.as_strided(whole, p.shape, p.stride(), at).clone())
        at += p.numel()
    return [{"shard": part, "windows": windows, "windows are views": True} for part in row.chunk(case.n_ranks)]


def held(case: Case, rank: int) -> dict[str, tuple[float, float]]:
    """(least, most) bytes held by kind: a shard, and some room. A shard that was allocated like a parameter that trains
    counts as an activation."""
    return {
        "other + activations": (0, numel(case) * case.item_bytes + ROOM_BYTES),
        "parameters": (0, ROOM_BYTES),
        **dict.fromkeys(("gradients", "optimizer"), (0, 0)),
    }


PROBLEM = exercise(
    __name__,
    FlatUnit,
    laws=(holds(held, "after __init__ a rank holds its shard, 1/n of the unit, and no whole"),),
)
