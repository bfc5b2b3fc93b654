"""23.2: the first layer at which some rank's run has left that of rank 0, by bisection over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends


def first_wrong(outputs: list[Tensor], bounds: list[float], group: Group) -> tuple[int, list[int]]:
    """(layer, ranks): the first layer at which the output of some rank is beyond its bound, and the ranks, sorted, for
    which that is so there. (-1, []) if there is none. The same on all ranks.

    `outputs[k]` is what layer k has returned on this rank, of the same shape and dtype on all ranks; rank 0 is right. A
    rank is beyond the bound at layer k if the Euclidean norm of outputs[k] minus rank 0's is not at most `bounds[k]`:
    NaN is beyond. Who is beyond at one layer is so at all later ones.
    At most ceil(log2(layers + 1)) layers are looked at, and each of these is sent once, by a broadcast of rank 0.
    Besides, ranks tell each other at most two numbers a layer that they look at, in collectives."""
    low, high, ranks = 0, len(outputs), list[int]()
    while low < high:
        middle = (low + high) // 2
        apart = torch.linalg.vector_norm(outputs[middle] - group.broadcast(outputs[middle]))
        beyond = torch.tensor([not apart <= bounds[middle]], device=group.device).float()
        flags = group.all_gather(beyond).tolist()
        if any(flags):
            high, ranks = middle, [rank for rank, flag in enumerate(flags) if flag]
        else:
            low = middle + 1
    return (high, ranks) if ranks else (-1, [])


def cases() -> Sequence[Case]:
    """Stacks of several depths on 1 to 4 ranks; all but rank 0 begin to be wrong at some layer of `first`, one of them
    before all others, or, `together`, two of them."""
    return [
        Case.of(3, layers=20, first=(5, 10), shape=(40, 5), together=False),
        Case.of(4, layers=13, first=(0, 4), shape=(6, 30), together=True),
        Case.of(4, layers=31, first=(30, 31), shape=(90,), together=True),
        Case.of(2, layers=16, first=(16, 17), shape=(200,), together=False),
        Case.of(2, layers=1, first=(0, 1), shape=(100,), together=False),
        Case.of(1, layers=5, first=(5, 6), shape=(7,), together=False),
    ]


def began(case: Case) -> list[int]:
    """For each rank the first layer at which it is wrong; `layers` if it never is."""
    dice, others = case.dice, case.n_ranks - 1
    low, high = case["first"]
    first = sorted(dice.sample(range(low, high), others) if high - low >= others else [low] * others)
    if case["together"] and others > 1:
        first[1] = first[0]
    dice.shuffle(first)
    return [case["layers"], *first]


def inputs(case: Case) -> Inputs:
    """Outputs of layers, each with a bound of its own; healthy ranks come near to it, and some wrong ones are NaN."""
    dice, first = case.dice, began(case)
    bounds = [10 ** dice.uniform(-3, 0) for _ in range(case["layers"])]
    arguments = []
    for rank in range(case.n_ranks):
        outputs = []
        for layer, bound in enumerate(bounds):
            right = case.random(*case["shape"], key=layer)
            off = case.random(*case["shape"], key=1000 * rank + layer + 500)
            far = dice.uniform(1.3, 3.0) if layer >= first[rank] else dice.uniform(0.3, 0.7)
            off *= far * bound / torch.linalg.vector_norm(off)
            if layer >= first[rank] and (case.seed + rank) % 3 == 0:
                off[..., 0] = torch.nan
            outputs.append(right + off * (rank > 0))
        arguments.append((outputs, bounds))
    return arguments


def answer(case: Case, inputs: Inputs) -> Answers:
    """Layer by layer, with all outputs in one place."""
    reference = inputs[0][0]
    for layer, bound in enumerate(inputs[0][1]):
        ranks = []
        for rank, (outputs, _) in enumerate(inputs):
            squares = [(a - b) ** 2 for a, b in zip(outputs[layer].flatten().tolist(),
                                                    reference[layer].flatten().tolist(), strict=True)]  # fmt: skip
            if not math.sqrt(sum(squares)) <= bound:
                ranks.append(rank)
        if ranks:
            return [[layer, ranks]] * case.n_ranks
    return [[-1, []]] * case.n_ranks


def play(attempt: Any, group: Group, outputs: list[Tensor], bounds: list[float]) -> Any:
    """The layer and the ranks."""
    layer, ranks = attempt(outputs, bounds, group)
    return [int(layer), [int(rank) for rank in ranks]]


def law(case: Case, rank: int) -> tuple[float, float]:
    """(least, most) bytes that a rank sends: rank 0 the layers, and all ranks two numbers a look to all others."""
    n, looks = case.n_ranks, math.ceil(math.log2(case["layers"] + 1))
    layer_bytes = math.prod(case["shape"]) * case.item_bytes
    return 0.0, looks * (layer_bytes * (rank == 0) + 16 * (n - 1))


PROBLEM = exercise(
    __name__,
    first_wrong,
    play=play,
    laws=(
        sends(
            law,
            "log2(layers + 1) layers are looked at, each broadcast once by rank 0, with two numbers a rank beside it",
            only=("broadcast", "all_gather", "all_reduce"),
        ),
    ),
)
