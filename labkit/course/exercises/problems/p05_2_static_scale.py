"""05.2: the largest power of two that a loss may be multiplied by."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.problem import Mutant, Problem
from labkit.course.judge.case import Case

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


def cases() -> Sequence[Case]:
    """Gradients around some power of two."""
    return [Case.of(1, log2=-19), Case.of(1, log2=-6), Case.of(1, log2=-30)]


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """Models' gradients: an outlier early, late, negative; exactly at the limit and just above; huge;
    a power of two in bfloat16, which has no 65504; zero; none."""
    draw = random.Random(case.seed)

    def model(outlier: float, where: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        shapes = [(7, 5), (23,), (3, 4, 2)]
        found = [abs(outlier) * 0.2 * case.random(*shape, key=draw.randrange(10**9)).sigmoid() for shape in shapes]
        found[where].view(-1)[draw.randrange(found[where].numel())] = outlier
        return [g.to(dtype) for g in found]

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
                model(edge * (1 + 2.0**-20), 2),
                model(LARGEST * draw.uniform(3, 50), 0),
                model(draw.choice((-1.0, 1.0)) * 2.0 ** draw.randrange(-30, -10), 1, torch.bfloat16),
                [torch.zeros(4, 2), torch.zeros(3)],
                [],
            ],
        )
    ]


def play(attempt: Any, _: Group, models: list[list[Tensor]]) -> Any:
    """The scale of each model."""
    return [attempt(grads) for grads in models]


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """By trial: every power of two, from the top down, until all products are within the limits."""

    def fits(grads: list[Tensor], s: float) -> bool:
        return all(bool(((s * g.double()).abs() <= LARGEST).all()) for g in grads)

    (models,) = given[0]
    anything = [any(bool((g != 0).any()) for g in grads) for grads in models]
    scales = [2.0**k for k in range(120, -120, -1)]
    return [
        [
            next(s for s in scales if fits(grads, s)) if some else 1.0
            for grads, some in zip(models, anything, strict=True)
        ]
    ]


PROBLEM = Problem(
    key="05.2",
    title="As large as the largest allows",
    story="""
Small gradients drown in fp16, so the loss is multiplied: all gradients move up together. How far? The largest one hits
the ceiling first: 65504, above which fp16 holds only infinity. A power of two costs no bit of precision, since it moves
the exponent and leaves the mantissa alone. Find the largest one that is safe for the gradients at hand.
""",
    objectives=("the ceiling is set by the largest gradient of all", "why scales are powers of two"),
    difficulty=1,
    importance=3,
    minutes=8,
    reference=static_scale,
    cases=cases,
    inputs=inputs,
    play=play,
    answer=answer,
    hints=(
        "One number decides: the largest size of any gradient of any tensor. Its ceiling is 65504 / that number.",
        "`max(g.abs().max().item() for g in grads if g.numel())`; then the power of two at or below the ceiling.",
        "largest = max(..., default=0.0); if it is 0 return 1.0; return 2.0 ** math.floor(math.log2(65504 / largest))",
    ),
    mutants=(
        Mutant(
            "the power of two is the nearest one, which may be above the ceiling",
            "values",
            (
                (
                    "math.floor(math.log2(torch.finfo(torch.float16).max / largest))",
                    "round(math.log2(torch.finfo(torch.float16).max / largest))",
                ),
            ),
        ),
        Mutant(
            "the power of two is rounded up: the largest gradient becomes infinite",
            "values",
            (("math.floor", "math.ceil"),),
        ),
        Mutant(
            "the largest value is looked for and not the largest size: a large negative gradient goes unseen",
            "values",
            (("g.abs().max()", "g.max().clamp(min=0)"),),
        ),
        Mutant(
            "fp16 goes up to nearly 2^16, not to 2^15: the scale is half of what it could be",
            "values",
            (("torch.finfo(torch.float16).max / largest", "2.0**15 / largest"),),
        ),
        Mutant(
            "the ceiling is divided in the gradients' own dtype: bfloat16 rounds 65504 up to 65536",
            "values",
            (("g.abs().max().item()", "g.abs().max()"),),
        ),
        Mutant(
            "the scale never goes below 1, so gradients above 65504 stay infinite",
            "values",
            (
                (
                    "return 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / largest))",
                    "return max(1.0, 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / largest)))",
                ),
            ),
        ),
        Mutant(
            "only the last gradient is looked at",
            "values",
            (("for g in grads if g.numel()", "for g in grads[-1:] if g.numel()"),),
        ),
        Mutant(
            "where all gradients are zero, the ceiling is divided by zero",
            "values",
            (("    if largest == 0:\n        return 1.0\n", ""),),
        ),
        Mutant(
            "the cast to fp16 is asked what is finite, and it rounds down to 65504 what lies a little above",
            "values",
            instead="""
            import torch


            def static_scale(grads):
                s = 2.0**64 if any(g.any() for g in grads) else 1.0
                while any((g.float() * s).half().isinf().any() for g in grads):
                    s /= 2
                return s
        """,
        ),
    ),
)
