"""05.6: unscale, agree, clip, step: in that order, over ranks."""

import math
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, Star, exercise, most_calls, sends
from labkit.course.exercises.problems.p05_4_agree_on_overflow.exercise import spoil, spoilt

SCALE, LR, MOST = 4096.0, 0.5, 0.75
SIZES = 2 * (5.0, 1.0, 0.02, 3.0, 1e17, 0.3)
"""About how large the norms of the gradients are: at the good steps, then at the bad ones, which are not finite.
Times SCALE, the largest are numbers of float32 whose squares are none."""


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
    overflow = any(not g.isfinite().all() for g in grads)
    if group.all_reduce(torch.tensor([overflow], device=group.device).float(), op="max"):
        return math.inf
    nothing = torch.zeros(1, dtype=torch.float64, device=group.device)
    square = sum(((g / scale).double().square().sum() for g in grads), nothing)
    norm = group.all_reduce(square).sqrt().item()
    for w, g in zip(weights, grads, strict=True):
        w -= lr * min(1.0, max_norm / norm) * (g / scale)
    return norm


def cases() -> list[Case]:
    """Worlds of 1 to 3 ranks."""
    return [
        Case.of(3, shapes=((40, 5), (7,), (300,))),
        Case.of(2, shapes=((70,), (6, 6), (1,))),
        Case.of(1, shapes=((8, 8), (250,))),
    ]


def inputs(case: Case) -> Inputs:
    """Shards, and gradients that grow with the rank: r + 1 times as large on rank r. Half of the steps are bad."""
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
    """Take twelve steps; return the norms and the weights."""
    weights = [w.clone() for w in weights]
    norms = [float(attempt([*weights], step, SCALE, MOST, LR, group)) for step in grads]  # in place: not the list
    return {"norms": norms, "weights": weights}


def answer(case: Case, inputs: Inputs) -> Answers:
    """One process that has all shards: torch's clip_grad_norm_ and SGD in float64."""
    params = [[torch.nn.Parameter(w.double()) for w in weights] for weights, _ in inputs]
    everything, norms = [p for shards in params for p in shards], []
    optimizer = torch.optim.SGD(everything, lr=LR, foreach=False)
    for step in range(len(SIZES)):
        for p, g in zip(everything, [g for _, grads in inputs for g in grads[step]], strict=True):
            p.grad = g.double() / SCALE
        norm = torch.nn.utils.clip_grad_norm_(everything, MOST, foreach=False).item()
        norms.append(norm if math.isfinite(norm) else math.inf)
        if math.isfinite(norm):
            optimizer.step()
    return [{"norms": norms, "weights": [p.detach().float() for p in shards]} for shards in params]


def law(case: Case, rank: int) -> tuple[float, float]:
    """(least, most) bytes that a rank sends: a step has one or two all_reduces of a number of 4 to 8 bytes, of which
    2(n-1)/n is sent."""
    n = case.n_ranks
    return len(SIZES) * (2 * (n - 1) * 4 // n), 2 * len(SIZES) * (2 * (n - 1) * 8 // n)


PROBLEM = exercise(
    __name__,
    clipped_step,
    tolerance=(1e-5, 1e-6),
    laws=(
        sends(
            law,
            "each rank sends at most two numbers a step: 2(n-1)/n of up to 8 bytes each",
            messages=lambda case, rank: 2 * len(SIZES),
        ),
    ),
    star=Star("one collective a step", most_calls, lambda case: len(SIZES) * (case.n_ranks > 1), unit="collectives"),
)
