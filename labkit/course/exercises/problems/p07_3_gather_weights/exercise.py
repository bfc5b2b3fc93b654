"""07.3: the updated shards of all ranks become the parameters again."""

import math

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, peak, sends
from labkit.plan.machine.collectives import sent_bytes

ROOM_BYTES = 24 << 10
Shapes = list[tuple[int, ...]]


def gather_weights(shard: Tensor, shapes: list[tuple[int, ...]], group: Group) -> list[Tensor]:
    """The whole parameters of these shapes, from the shards of all ranks.   [k] on each rank -> one tensor a shape

    Laid end to end in rank order, the shards are all parameters, flat, one after the other, and then padding (n * k is
    a little more than they have elements; what is in the padding has no meaning). The parameters are views of the one
    gathered buffer: no second copy of the weights is made. Each rank sends its shard's bytes n - 1 times, no more."""
    sizes = [math.prod(shape) for shape in shapes]
    whole = group.all_gather(shard)
    windows = whole[: sum(sizes)].split(sizes)
    return [window.view(shape) for window, shape in zip(windows, shapes, strict=True)]


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks, none of which divides the number of elements."""
    return [
        Case.of(3, shapes=[(90, 110), (77,), (110, 61), (3, 5, 7), ()]),
        Case.of(4, torch.float64, shapes=[(51, 101), (101,), (101, 50)]),
        Case.of(2, torch.bfloat16, shapes=[(251,), (120, 180)]),
        Case.of(1, shapes=[(100, 160), (9,)]),
    ]


def shard_numel(case: Case) -> int:
    """Elements of one shard."""
    return -(-sum(math.prod(shape) for shape in case["shapes"]) // case.n_ranks)


def inputs(case: Case) -> Inputs:
    """Shards of random weights. The padding is NaN, so that it shows wherever an attempt uses it."""
    k, n_real = shard_numel(case), sum(math.prod(shape) for shape in case["shapes"])
    whole = case.random(case.n_ranks * k)
    whole[n_real:] = torch.nan
    return [(part.clone(), list(case["shapes"])) for part in whole.chunk(case.n_ranks)]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The parameters, element by element, from all shards in one row."""
    row, at, whole = torch.cat([shard for shard, _ in inputs]), 0, []
    for shape in inputs[0][1]:
        whole.append(torch.stack([row[at + i] for i in range(math.prod(shape))]).reshape(shape))
        at += math.prod(shape)
    return [whole] * case.n_ranks


def law(case: Case, rank: int) -> float:
    """Bytes that a rank sends: (n-1)/n of all shards'."""
    whole = case.n_ranks * shard_numel(case) * case.item_bytes
    return sent_bytes("ring", "all_gather", case.n_ranks, whole, rank, case.item_bytes)


PROBLEM = exercise(
    __name__,
    gather_weights,
    laws=(
        sends(law, "each rank sends (n-1)/n S bytes, its own shard n - 1 times", only=("all_gather", "send")),
        peak(
            lambda case, rank: 1.25 * case.n_ranks * shard_numel(case) * case.item_bytes + ROOM_BYTES,
            "the gathered buffer is held, and no second copy of the weights",
        ),
    ),
)
