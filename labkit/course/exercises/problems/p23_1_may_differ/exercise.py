"""23.1: how far two correct matrix products may be apart, of which one was summed over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_each, exercise

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def may_differ(x: Tensor, w: Tensor, n_ranks: int, lam: float) -> Tensor:
    """How far two correct results of y = x @ w.T may be apart, number by number.   [B, I], [O, I] -> [B, O], float64

    x and w have the same format, with unit roundoff v = torch.finfo(dtype).eps / 2. Sums are made in float32, or in
    float64 if that is the format; their unit roundoff is u.
    One run has one device: it adds up all I terms, which errs by lam sqrt(I) u times the sum of |x_i w_i|, and rounds
    the result to the format: v |y|.
    The other run cuts the I columns into `n_ranks` equal parts, one a rank, and errs in the same two ways. If there
    are several ranks it errs in a third: each rank's term is rounded to the format before it travels, and these
    roundings know nothing of each other: lam v times the root of the sum of the squares of the terms.
    Compute with the exact values, in float64; the two runs are apart by both errors, added."""
    v = torch.finfo(x.dtype).eps / 2
    u = min(v, 2.0**-24)
    x, w = x.double(), w.double()
    added = u * math.sqrt(x.shape[1]) * (x.abs() @ w.abs().T)
    terms = [a @ b.T for a, b in zip(x.chunk(n_ranks, 1), w.chunk(n_ranks, 1), strict=True)]
    sent = v * torch.stack(terms).square().sum(0).sqrt() if n_ranks > 1 else 0.0
    return lam * (2 * added + sent) + 2 * v * (x @ w.T).abs()


def cases() -> Sequence[Case]:
    """Products of four formats, on 1 to 4 ranks, with terms that cancel."""
    return [Case.of(1, ranks=(1,)), Case.of(1, ranks=(2, 3, 4)), Case.of(1, ranks=(1, 2, 4))]


def inputs(case: Case) -> Inputs:
    """One product of each format and number of ranks. Of the last row of w the second half is minus the first: its sum
    is small beside its terms."""
    jobs = []
    for place, (n, dtype) in enumerate((n, dtype) for n in case["ranks"] for dtype in DTYPES):
        columns = 12 * case.dice.randint(2, 9)
        rows, outputs = 2 + place % 3, 2 + place % 2
        x = case.random(rows, columns, key=2 * place).abs() + 0.25
        w = case.random(outputs, columns, key=2 * place + 1)
        x[:, columns // 2 :] = x[:, : columns // 2]
        w[-1, columns // 2 :] = -w[-1, : columns // 2] * (1 + 2.0**-6)
        jobs.append((x.to(dtype), w.to(dtype), n, 2.0 + place % 5))
    return [(jobs,)]


def by_hand(x: Tensor, w: Tensor, n_ranks: int, lam: float) -> Tensor:
    """The same number by number, with Python's own floats."""
    stored = 2.0 ** -{torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[x.dtype]
    adding = 2.0**-53 if x.dtype == torch.float64 else 2.0**-24
    part = x.shape[1] // n_ranks
    rows = []
    for row in x.tolist():
        errors = []
        for column in w.tolist():
            products = [a * b for a, b in zip(row, column, strict=True)]
            sums = [math.fsum(products[rank * part : (rank + 1) * part]) for rank in range(n_ranks)]
            error = 2 * lam * len(products) ** 0.5 * adding * math.fsum(map(abs, products))
            error += 2 * stored * abs(math.fsum(products))
            if n_ranks > 1:
                error += lam * stored * math.hypot(*sums)
            errors.append(error)
        rows.append(errors)
    return torch.tensor(rows, dtype=torch.float64)


def answer(case: Case, inputs: Inputs) -> Answers:
    """The bound of each product."""
    return [[by_hand(*job) for job in inputs[0][0]]]


PROBLEM = exercise(__name__, may_differ, play=call_each, tolerance=(1e-9, 1e-12))
