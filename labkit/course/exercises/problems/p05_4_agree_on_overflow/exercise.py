"""05.4: ranks that hold different shards skip a step together, or not at all."""

import math
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends

SCALE, LR, STEPS = 1024.0, 0.1, 12
KINDS = (math.inf, -math.inf, math.nan)


def agreed_step(weights: list[Tensor], grads: list[Tensor], scale: float, lr: float, group: Group) -> bool:
    """A step of SGD on this rank's shard of a model, unless the gradients of any rank are not all finite.

    weights, grads: float32 tensors of the same shapes, this rank's own; `grads` are `scale` times the true gradients.
    Each weight moves in place by -lr times its true gradient. If a number of a gradient on any rank is inf, -inf or
    NaN, no rank moves anything. Returns whether the step was taken, the same on all ranks.
    The ranks exchange one number, in one collective; gradients stay where they are."""
    overflow = any(not g.isfinite().all() for g in grads)
    if group.all_reduce(torch.tensor([float(overflow)], device=group.device), op="max") > 0:
        return False
    for w, g in zip(weights, grads, strict=True):
        w -= lr * g / scale
    return True


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks."""
    return [
        Case.of(3, shapes=((40, 5), (7,), (300,))),
        Case.of(4, shapes=((9, 30), (11,))),
        Case.of(1, shapes=((8, 8), (250,))),
    ]


Spoilt = Mapping[tuple[int, int], tuple[int, float, float]]
"""(step, rank) -> (number of the gradient, place in it from 0.0 to 1.0, the number to put there)."""


def spoilt(case: Case, n_steps: int) -> Spoilt:
    """The places at which gradients are not finite, and the numbers that stand there.

    At five steps those of one rank alone are not finite. Every rank, gradient and kind occurs among them, and the first
    number of a gradient, the last, and some between. At a sixth step those of all ranks are not finite."""
    dice, n_grads = random.Random(case.seed), len(case["shapes"])
    *alone, together = dice.sample(range(n_steps), 6)
    ranks, grads = dice.sample(range(case.n_ranks), case.n_ranks), dice.sample(range(n_grads), n_grads)
    kinds = dice.sample([*KINDS, *dice.choices(KINDS, k=2)], 5)
    places = dice.sample([0.0, 1.0, *(dice.uniform(0.2, 0.8) for _ in range(3))], 5)
    bad = {(step, ranks[i % len(ranks)]): (grads[i % n_grads], places[i], kinds[i]) for i, step in enumerate(alone)}
    return bad | {(together, r): (dice.randrange(n_grads), dice.random(), dice.choice(KINDS)) for r in ranks}


def spoil(grads: list[Tensor], bad: Spoilt, step: int, rank: int) -> list[Tensor]:
    """The gradients of a rank at a step, in which `bad` has put a number that is not finite."""
    if (step, rank) in bad:
        which, far, value = bad[step, rank]
        grads[which].view(-1)[round(far * (grads[which].numel() - 1))] = value
    return grads


def inputs(case: Case) -> Inputs:
    """Shards, and the gradients of twelve steps, six of which are bad. At a good step those of rank 0 have two numbers
    that are finite, but so large that neither their sum nor a square is."""
    bad = spoilt(case, STEPS)
    large = min({*range(STEPS)} - {step for step, _ in bad})

    def numbers(rank: int, step: int) -> list[Tensor]:
        grads = [SCALE * case.random(*shape, key=1000 * rank + 10 * step + i) for i, shape in enumerate(case["shapes"])]
        if (step, rank) == (large, 0):
            grads[-1][:2] = 3e38
        return spoil(grads, bad, step, rank)

    return [
        (
            [case.random(*shape, key=5000 + 10 * rank + i) for i, shape in enumerate(case["shapes"])],
            [numbers(rank, step) for step in range(STEPS)],
        )
        for rank in range(case.n_ranks)
    ]


def play(attempt: Any, group: Group, weights: list[Tensor], grads: list[list[Tensor]]) -> Any:
    """Take twelve steps: True for each that was taken, and the weights."""
    weights = [w.clone() for w in weights]
    taken = [attempt([*weights], step, SCALE, LR, group) for step in grads]  # in place: the tensors, not the list
    return {"taken": [bool(step) for step in taken], "weights": weights}


def answer(case: Case, inputs: Inputs) -> Answers:
    """One process that sees all shards: torch's SGD on the sum of the gradients of the steps at which all is finite."""
    steps = range(STEPS)
    taken = [math.isfinite(sum(g.double().sum().item() for _, grads in inputs for g in grads[s])) for s in steps]
    results = []
    for weights, grads in inputs:
        params = [torch.nn.Parameter(w.double()) for w in weights]
        for i, p in enumerate(params):
            p.grad = torch.stack([grads[s][i].double() / SCALE for s in steps if taken[s]]).sum(0)
        torch.optim.SGD(params, lr=LR, foreach=False).step()
        results.append({"taken": taken, "weights": [p.detach().float() for p in params]})
    return results


def law(case: Case, rank: int) -> tuple[float, float]:
    """(least, most) bytes that a rank sends: a step's all_reduce of a number of 1 to 8 bytes, 2(n-1)/n of it."""
    n = case.n_ranks
    return STEPS * (2 * (n - 1) // n), STEPS * (2 * (n - 1) * 8 // n)


PROBLEM = exercise(
    __name__,
    agreed_step,
    laws=(
        sends(
            law,
            "each rank sends one number a step: 2(n-1)/n of at most 8 bytes, in one collective",
            messages=lambda case, rank: STEPS,
        ),
    ),
)
