"""05.6: unscale, agree, clip, step: in that order, over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.problem import Mutant, Problem, Star
from labkit.course.exercises.problems.p05_4_agree_on_overflow import spoil, spoilt
from labkit.course.judge.case import Case
from labkit.course.judge.laws import most_calls, sends

SCALE, LR, MOST = 4096.0, 0.5, 1.0
SIZES = 2 * (5.0, 1.0, 0.02, 3.0, 1.0, 0.3)
"""About how large the norms of the steps' gradients are: of the good ones, then of the bad ones."""


def clipped_step(
    weights: list[Tensor], grads: list[Tensor], scale: float, max_norm: float, lr: float, group: Group
) -> float:
    """A step of SGD on this rank's shard, by the gradients of a scaled loss, clipped to a norm of at most `max_norm`.

    weights, grads: float32 tensors of the same shapes, this rank's own; `grads` are `scale` times the true gradients.
    The norm is the Euclidean one of the true gradients of all ranks together (never 0); if it is above `max_norm`, all
    of them are multiplied by max_norm / norm. Each weight then moves in place by -lr times its gradient.
    If a number of a gradient on any rank is inf, -inf or NaN, no rank moves anything.
    Returns the norm before clipping, or `math.inf` for a step that is skipped: the same on all ranks.
    Ranks exchange at most two numbers a step, one a collective; gradients stay where they are."""
    found = any(not g.isfinite().all() for g in grads)
    if group.all_reduce(torch.tensor([found]).float(), op="max"):
        return math.inf
    square = sum(((g / scale).double().square().sum() for g in grads), torch.zeros(1, dtype=torch.float64))
    norm = group.all_reduce(square).sqrt().item()
    for w, g in zip(weights, grads, strict=True):
        w -= lr * min(1.0, max_norm / norm) * (g / scale)
    return norm


def cases() -> Sequence[Case]:
    """Worlds of 1 to 3 ranks."""
    return [
        Case.of(3, shapes=((40, 5), (7,), (300,))),
        Case.of(2, shapes=((70,), (6, 6), (1,))),
        Case.of(1, shapes=((8, 8), (250,))),
    ]


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """Shards and gradients: rank r's are r + 1 times as large. Half of the steps are bad."""
    bad = spoilt(case, len(SIZES))
    bad_steps = {step for step, _ in bad}
    good_first = sorted(range(len(SIZES)), key=lambda step: step in bad_steps)
    size = dict(zip(good_first, SIZES, strict=True))

    def numbers(rank: int, step: int) -> list[Tensor]:
        grads = [case.random(*shape, key=1000 * rank + 10 * step + i) for i, shape in enumerate(case["shapes"])]
        grads = [SCALE * size[step] * (rank + 1) * g / 40 for g in grads]
        return spoil(grads, bad, step, rank)

    return [
        (
            [case.random(*shape, key=5000 + 10 * rank + i) for i, shape in enumerate(case["shapes"])],
            [numbers(rank, step) for step in range(len(SIZES))],
        )
        for rank in range(case.n_ranks)
    ]


def play(attempt: Any, group: Group, weights: list[Tensor], grads: list[list[Tensor]]) -> Any:
    """Twelve steps: the norms, and the weights."""
    weights = [w.clone() for w in weights]
    norms = [float(attempt(weights, step, SCALE, MOST, LR, group)) for step in grads]
    return {"norms": torch.tensor(norms, dtype=torch.float64), "weights": weights}


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """One process that has all shards: torch's clip_grad_norm_ and SGD in float64."""
    params = [[torch.nn.Parameter(w.double()) for w in weights] for weights, _ in given]
    everything, norms = [p for mine in params for p in mine], []
    optimizer = torch.optim.SGD(everything, lr=LR, foreach=False)
    for step in range(len(SIZES)):
        for p, g in zip(everything, [g for _, grads in given for g in grads[step]], strict=True):
            p.grad = g.double() / SCALE
        norm = torch.nn.utils.clip_grad_norm_(everything, MOST, foreach=False).item()
        norms.append(norm if math.isfinite(norm) else math.inf)
        if math.isfinite(norm):
            optimizer.step()
    return [
        {"norms": torch.tensor(norms, dtype=torch.float64), "weights": [p.detach().float() for p in mine]}
        for mine in params
    ]


def law(case: Case, rank: int) -> tuple[float, float]:
    """One or two all_reduces a step of a number of up to 8 bytes, of which 2(n-1)/n is sent."""
    n = case.n_ranks
    return len(SIZES) * (2 * (n - 1) * 4 // n), 2 * len(SIZES) * (2 * (n - 1) * 8 // n)


PROBLEM = Problem(
    key="05.6",
    title="Unscale, agree, clip, step",
    story="""
Clipping keeps one wild batch from throwing a model off its course: gradients longer than 1 are shortened to 1. With a
loss scale of 4096 in them they are nearly always longer. Clip first and divide afterwards, and every step is 4096 times
too short, at any loss, without an error. And the norm is that of the whole model, of which a rank has one shard.
""",
    objectives=("the order of a scaled step", "one norm for all ranks", "what must be agreed on before anybody steps"),
    difficulty=3,
    importance=5,
    minutes=15,
    reference=clipped_step,
    cases=cases,
    inputs=inputs,
    play=play,
    answer=answer,
    tolerance=(1e-5, 1e-6),
    laws=(
        sends(
            law,
            "each rank sends at most two numbers a step: 2(n-1)/n of up to 8 bytes each",
            messages=lambda case, rank: 2 * len(SIZES),
        ),
    ),
    star=Star(
        "one collective a step",
        most_calls,
        lambda case: len(SIZES) * (case.n_ranks > 1),
        best="""\
import math


def clipped_step(weights, grads, scale, max_norm, lr, group):
    square = sum((g / scale).double().square().sum() for g in grads).reshape(1)
    norm = group.all_reduce(square).sqrt().item()
    if not math.isfinite(norm):
        return math.inf
    for w, g in zip(weights, grads):
        w -= lr * min(1.0, max_norm / norm) * (g / scale)
    return norm
""",
        unit="collectives",
    ),
    hints=(
        "A norm is the root of a sum of squares, and sums can be taken over ranks. Roots cannot be added.",
        'Two tensors [1] are reduced: what was found (op="max"), then the sum of squares of the divided gradients.',
        "agree on found, return inf if any; square = sum of (g / scale)^2; norm = all_reduce(square).sqrt(); "
        "w -= lr * min(1, max_norm / norm) * g / scale",
    ),
    mutants=(
        Mutant(
            "the norm is taken while the scale is still in the gradients: clip first, unscale later",
            "values",
            (("sum(((g / scale).double()", "sum((g.double()"),),
        ),
        Mutant(
            "each rank clips by the norm of its own shard, so that shards shrink by different factors",
            "values",
            (("group.all_reduce(square).sqrt()", "square.sqrt()"),),
        ),
        Mutant(
            "norms are added up over ranks: it is their squares that add up",
            "values",
            (("group.all_reduce(square).sqrt()", "group.all_reduce(square.sqrt())"),),
        ),
        Mutant(
            "the squares are averaged over ranks, not summed",
            "values",
            (("group.all_reduce(square)", 'group.all_reduce(square, "mean")'),),
        ),
        Mutant(
            "gradients that are short enough are stretched to the limit",
            "values",
            (("min(1.0, max_norm / norm)", "max_norm / norm"),),
        ),
        Mutant(
            "infinities above zero and NaN are looked for, -inf is not",
            "values",
            (("not g.isfinite().all()", "(g.isnan() | (g == math.inf)).any()"),),
        ),
        Mutant(
            "only the last gradient is looked at before the step, and others are not all finite",
            "values",
            (("not g.isfinite().all() for g in grads)", "not g.isfinite().all() for g in grads[-1:])"),),
        ),
        Mutant(
            "a step with an infinity in it is clipped and taken",
            "values",
            (
                (
                    'if group.all_reduce(torch.tensor([found]).float(), op="max"):\n        return math.inf\n',
                    "found = not found\n",
                ),
            ),
        ),
        Mutant(
            "each rank skips by what it found itself, and is then missing in the others' norm",
            "liveness",
            (('group.all_reduce(torch.tensor([found]).float(), op="max")', "found"),),
        ),
        Mutant(
            "all gradients are gathered to take a norm that needs one number of each rank",
            "wire",
            (
                (
                    "(g / scale).double().square().sum() for g in grads)",
                    "(group.all_gather(g) / scale).double().square().sum() for g in grads)",
                ),
                ("group.all_reduce(square).sqrt()", "square.sqrt()"),
            ),
        ),
    ),
)
