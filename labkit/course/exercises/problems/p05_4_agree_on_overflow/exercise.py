"""05.4: ranks that hold different shards skip a step together, or not at all."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise_files import beside
from labkit.course.exercises.problem import Problem
from labkit.course.judge.case import Case
from labkit.course.judge.laws import sends

SCALE, LR, STEPS = 1024.0, 0.1, 12
KINDS = (math.inf, -math.inf, math.nan)


def agreed_step(weights: list[Tensor], grads: list[Tensor], scale: float, lr: float, group: Group) -> bool:
    """A step of SGD on this rank's shard of a model, unless the gradients of any rank are not all finite.

    weights, grads: float32 tensors of the same shapes, this rank's own; `grads` are `scale` times the true gradients.
    Each weight moves in place by -lr times its true gradient. If a number of a gradient on any rank is inf, -inf or
    NaN, no rank moves anything. Returns whether the step was taken, the same on all ranks.
    The ranks exchange one number, in one collective; gradients stay where they are."""
    found = any(not g.isfinite().all() for g in grads)
    if group.all_reduce(torch.tensor([float(found)]), op="max") > 0:
        return False
    for w, g in zip(weights, grads, strict=True):
        w -= lr * g / scale
    return True


def cases() -> Sequence[Case]:
    """Worlds of 1 to 4 ranks."""
    return [
        Case.of(3, shapes=((40, 5), (7,), (300,))),
        Case.of(4, shapes=((9, 30), (11,))),
        Case.of(1, shapes=((8, 8), (250,))),
    ]


Spoilt = Mapping[tuple[int, int], tuple[int, float, float]]
"""(step, rank) -> gradient, how far into it, and what stands there."""


def spoilt(case: Case, n_steps: int) -> Spoilt:
    """Where gradients are not finite.

    At five steps one rank alone finds something: each rank, gradient and kind is there, and the first number of a
    gradient, the last one, and some between. At a sixth step all ranks do."""
    dice, n_grads = random.Random(case.seed), len(case["shapes"])
    *alone, together = dice.sample(range(n_steps), 6)
    ranks, grads = dice.sample(range(case.n_ranks), case.n_ranks), dice.sample(range(n_grads), n_grads)
    kinds = dice.sample([*KINDS, *dice.choices(KINDS, k=2)], 5)
    places = dice.sample([0.0, 1.0, *(dice.uniform(0.2, 0.8) for _ in range(3))], 5)
    found = {(step, ranks[i % len(ranks)]): (grads[i % n_grads], places[i], kinds[i]) for i, step in enumerate(alone)}
    return found | {(together, r): (dice.randrange(n_grads), dice.random(), dice.choice(KINDS)) for r in ranks}


def spoil(grads: list[Tensor], bad: Spoilt, step: int, rank: int) -> list[Tensor]:
    """The gradients of a rank at a step, with what is bad in them."""
    if (step, rank) in bad:
        which, far, what = bad[step, rank]
        grads[which].view(-1)[round(far * (grads[which].numel() - 1))] = what
    return grads


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """Shards, and the gradients of twelve steps, six of which are bad."""
    bad = spoilt(case, STEPS)

    def numbers(rank: int, step: int) -> list[Tensor]:
        grads = [SCALE * case.random(*shape, key=1000 * rank + 10 * step + i) for i, shape in enumerate(case["shapes"])]
        return spoil(grads, bad, step, rank)

    return [
        (
            [case.random(*shape, key=5000 + 10 * rank + i) for i, shape in enumerate(case["shapes"])],
            [numbers(rank, step) for step in range(STEPS)],
        )
        for rank in range(case.n_ranks)
    ]


def play(attempt: Any, group: Group, weights: list[Tensor], grads: list[list[Tensor]]) -> Any:
    """Twelve steps: whether each was taken, and the weights."""
    weights = [w.clone() for w in weights]
    taken = [attempt(weights, step, SCALE, LR, group) for step in grads]
    return {"taken": [bool(each) for each in taken], "weights": weights}


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """One process that sees all shards: the steps at which everything is finite, and torch's SGD on the sum of them."""
    steps = range(STEPS)
    taken = [math.isfinite(sum(g.double().sum().item() for _, grads in given for g in grads[s])) for s in steps]
    found = []
    for weights, grads in given:
        params = [torch.nn.Parameter(w.double()) for w in weights]
        for i, p in enumerate(params):
            p.grad = torch.stack([grads[s][i].double() / SCALE for s in steps if taken[s]]).sum(0)
        torch.optim.SGD(params, lr=LR, foreach=False).step()
        found.append({"taken": taken, "weights": [p.detach().float() for p in params]})
    return found


def law(case: Case, rank: int) -> tuple[float, float]:
    """An all_reduce of one number of 1 to 8 bytes a step: 2(n-1)/n of it."""
    n = case.n_ranks
    return STEPS * (2 * (n - 1) // n), STEPS * (2 * (n - 1) * 8 // n)


PROBLEM = Problem(
    **beside(__file__),
    reference=agreed_step,
    cases=cases,
    inputs=inputs,
    play=play,
    answer=answer,
    laws=(
        sends(
            law,
            "each rank sends one number a step: 2(n-1)/n of at most 8 bytes, in one collective",
            messages=lambda case, rank: STEPS,
        ),
    ),
)
