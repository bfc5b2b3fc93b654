"""07.8: the Newton-Schulz iteration of Muon."""

from typing import Any

import torch
from torch import Tensor

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_alone, exercise, peak

ROOM_BYTES = 2**16


def newton_schulz(u: Tensor, steps: int) -> Tensor:
    """A matrix with the singular vectors of u, and singular values near 1.   [rows, cols] -> [rows, cols]

    x begins as u over its Frobenius norm (or over 1e-7 if the norm is smaller: a matrix of zeros stays zeros). Each of
    `steps` steps makes of every singular value s the number a s + b s^3 + c s^5: a, b, c = 3.4445, -4.7750, 2.0315.
    Only products of matrices are allowed, no SVD. Either side may be the smaller one, and by much: hold nothing of the
    size of the square of the larger side. u is left as it was, and the result is in its dtype."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = u.shape[0] > u.shape[1]
    x = u.T if tall else u
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def cases() -> list[Case]:
    """Wide, tall, square and long thin matrices; one of zeros, one whose norm is below 1e-7; one step and none."""
    return [
        Case.of(1, torch.float64, rows=7, cols=12, steps=5, size=3.0),
        Case.of(1, torch.float64, rows=12, cols=7, steps=5, size=0.01),
        Case.of(1, torch.float64, rows=9, cols=9, steps=1, size=1.0),
        Case.of(1, rows=3, cols=4, steps=3, size=0.0),
        Case.of(1, torch.float64, rows=4, cols=5, steps=2, size=1e-9),
        Case.of(1, torch.float64, rows=5, cols=3, steps=0, size=2.0),
        Case.of(1, torch.float64, rows=6, cols=900, steps=5, size=1.0),
        Case.of(1, torch.float64, rows=900, cols=6, steps=2, size=1.0),
    ]


def inputs(case: Case) -> Inputs:
    """A random matrix of some size."""
    return [(case["size"] * case.random(case["rows"], case["cols"]), case["steps"])]


def play(attempt: Any, group: Any, u: Tensor, steps: int) -> Any:
    """The attempt's matrix."""
    return call_alone(attempt, group, u, steps)


def answer(case: Case, inputs: Inputs) -> Answers:
    """By an SVD, whose singular values go through the polynomial one by one."""
    ((u, steps),) = inputs
    left, values, right = torch.linalg.svd(u, full_matrices=False)
    values = values / max(float(values.norm()), 1e-7)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return [left @ values.diag() @ right]


PROBLEM = exercise(
    __name__,
    newton_schulz,
    tolerance=(1e-9, 1e-9),
    laws=(
        peak(
            lambda case, rank: 10 * case["rows"] * case["cols"] * case.item_bytes + ROOM_BYTES,
            "copies of the matrix are held, and squares of its smaller side",
        ),
    ),
)
