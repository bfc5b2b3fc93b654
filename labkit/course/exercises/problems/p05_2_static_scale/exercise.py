"""05.2: the largest power of two that a loss may be multiplied by."""

import math
import random
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise

LARGEST = 65504.0


def static_scale(grads: list[Tensor]) -> float:
    """The largest power of two s for which s times every number of every gradient is within -65504 and 65504.

    65504 is `torch.finfo(torch.float16).max`, the largest finite number of fp16; a product of exactly 65504 is allowed.
    s is below 1 where gradients are larger than that, and 1.0 if there is no number but zero. Gradients are float32 or
    bfloat16, finite, and may be empty; they stay as they are."""
    largest = max((g.abs().max().item() for g in grads if g.numel()), default=0.0)
    if largest == 0:
        return 1.0
    return 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / largest))


def cases() -> list[Case]:
    """Gradients around some power of two; the last ones need a scale that float32 does not hold."""
    return [Case.of(1, log2=-19), Case.of(1, log2=-6), Case.of(1, log2=-30), Case.of(1, log2=-120)]


def inputs(case: Case) -> Inputs:
    """The gradients of ten models. The largest number stands in the first, a middle or the last tensor, is negative,
    exactly at the limit, above it by little or by least, huge, or a power of two in bfloat16, which has no 65504. The
    last two models have gradients of zeros, and no gradients."""
    draw = random.Random(case.seed)

    def model(outlier: float, where: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        shapes = [(7, 5), (23,), (3, 4, 2)]
        grads = [abs(outlier) * 0.2 * case.random(*shape, key=draw.randrange(10**9)).sigmoid() for shape in shapes]
        grads[where].view(-1)[draw.randrange(grads[where].numel())] = outlier
        return [g.to(dtype) for g in grads]

    size = 2.0 ** case["log2"]
    low = draw.uniform(1.1, 1.35)  # for these the nearest power of two is above the ceiling
    edge = LARGEST * 2.0 ** draw.randrange(-30, -10)
    return [
        (
            [
                model(size * low, 0),
                model(-size * draw.uniform(1.5, 1.9), 1),
                [torch.empty(0), *model(size * draw.uniform(1.3, 1.9), 2, torch.bfloat16)],
                model(edge, 1),
                model(edge * (1 + 2.0**-14), 2),
                model(next_above(edge), 2),
                model(LARGEST * draw.uniform(3, 50), 0),
                model(draw.choice((-1.0, 1.0)) * 2.0 ** draw.randrange(-30, -10), 1, torch.bfloat16),
                [torch.zeros(4, 2), torch.zeros(3)],
                [],
            ],
        )
    ]


def next_above(number: float) -> float:
    """The next larger number of float32."""
    return float(torch.nextafter(torch.tensor(number), torch.tensor(math.inf)))


def play(attempt: Any, _: Group, models: list[list[Tensor]]) -> Any:
    """The scale of each model."""
    return [attempt(grads) for grads in models]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The scales by trial of every power of two, from the top down, until all products are within the limits."""

    def fits(grads: list[Tensor], s: float) -> bool:
        return all(bool(((s * g.double()).abs() <= LARGEST).all()) for g in grads)

    (models,) = inputs[0]
    anything = [any(bool((g != 0).any()) for g in grads) for grads in models]
    scales = [2.0**k for k in range(150, -120, -1)]
    return [
        [
            next(s for s in scales if fits(grads, s)) if nonzero else 1.0
            for grads, nonzero in zip(models, anything, strict=True)
        ]
    ]


PROBLEM = exercise(__name__, static_scale)
