"""05.9: rounding to 4 bits whose mean is the number itself."""

from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def rounded(x: Tensor, noise: Tensor) -> Tensor:
    """x rounded stochastically to the numbers of e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, with the sign of x.

    x: float32, any shape, from -6 to 6. noise: float32 of the same shape, uniform from 0 up to, without, 1.
    A number that lies a share f of the way from one size of the grid to the next goes up to the larger size if its
    noise is below f, and down to the smaller one otherwise. Both inputs stay as they are."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    whole = (size / step).floor()
    up = noise < size / step - whole
    return ((whole + up) * step).copysign(x)


def cases() -> list[Case]:
    """Small and large numbers, in tensors of one to three dimensions."""
    return [Case.of(1, reach=6.0, shape=(40, 7)), Case.of(1, reach=1.0, shape=(280,)),
            Case.of(1, reach=2.5, shape=(4, 10, 7))]  # fmt: skip


def inputs(case: Case) -> Inputs:
    """Random numbers of either sign up to `reach`; the grid itself with both signs, and noise of 0 among the others."""
    x = (case.random(40, 7, key=1).sigmoid() * 2 - 1) * case["reach"]
    x[0], x[1] = torch.tensor(GRID[1:]), -torch.tensor(GRID[1:])
    noise = (case.random(40, 7, key=2) * 37).frac().abs()
    noise[:3, ::2] = 0.0
    noise[3] = 1 - 2.0**-24
    return [(x.view(case["shape"]), noise.view(case["shape"]))]


def play(attempt: Any, _: Group, x: Tensor, noise: Tensor) -> Any:
    """The rounded numbers."""
    return attempt(x, noise)


def answer(case: Case, inputs: Inputs) -> Answers:
    """Number by number: the two of the grid around it, and in float64 how far it lies between them."""
    x, noise = inputs[0]
    results = []
    for number, draw in zip(x.flatten().tolist(), noise.flatten().tolist(), strict=True):
        low = max(value for value in GRID if value <= abs(number))
        high = min((value for value in GRID if value > abs(number)), default=low)
        share = (abs(number) - low) / (high - low) if high > low else 0.0
        size = high if draw < share else low
        results.append(-size if number < 0 else size)
    return [torch.tensor(results).view(x.shape)]


PROBLEM = exercise(__name__, rounded)
