"""06.2: one all_reduce for all gradients."""

from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, Star, exercise, highest_peak, sends


def flat_average(params: list[Tensor], group: Group) -> None:
    """Every p.grad becomes its mean over the ranks, with one collective for all of them.

    params: the same shapes on all ranks, one dtype, all with a gradient; some gradients are not contiguous, some have
    no dimensions. Each p.grad keeps its shape. n ranks send 2(n-1)/n of all gradients' bytes each."""
    flat = torch.cat([p.grad.flatten() for p in params if p.grad is not None])
    mean = group.all_reduce(flat, "mean")
    for p, part in zip(params, mean.split([p.numel() for p in params]), strict=True):
        p.grad = part.view(p.shape)


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks; a few large gradients and many small."""
    return [
        Case.of(3, shapes=((60, 300), (300,), (), (41, 7), (5,), (2, 3, 4), (150, 90))),
        Case.of(4, torch.float64, shapes=((7,), (90, 80), (), (1,), (33, 3), (100, 40))),
        Case.of(1, shapes=((30, 500), (4,), (80, 90))),
    ]


def inputs(case: Case) -> Inputs:
    """Gradients of each rank; every other matrix lies transposed."""

    def grad(rank: int, i: int, shape: tuple[int, ...]) -> Tensor:
        x = case.random(*shape, key=100 * rank + i)
        return x.t().contiguous().t() if x.dim() == 2 and i % 2 else x

    return [([grad(rank, i, shape) for i, shape in enumerate(case["shapes"])],) for rank in range(case.n_ranks)]


def play(attempt: Any, group: Group, grads: list[Tensor]) -> Any:
    """Let the attempt average parameters that have these gradients; return the gradients."""
    params = [torch.nn.Parameter(g.new_zeros(()).expand(g.shape)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    attempt(params, group)
    return [p.grad for p in params]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The mean of each gradient in float64."""
    by_parameter = zip(*(grads for (grads,) in inputs), strict=True)
    return [[torch.stack(same).double().mean(0).to(case.dtype) for same in by_parameter]] * case.n_ranks


def whole(case: Case) -> int:
    """Bytes of all gradients."""
    return case.item_bytes * sum(torch.Size(shape).numel() for shape in case["shapes"])


def law(case: Case, _: int) -> tuple[float, float]:
    """(least, most) bytes that a rank sends: 2(n-1)/n of the gradients'. Each collective may round down by a byte; an
    attempt with one for each gradient must fail by their number, and not by a byte."""
    most = 2 * (case.n_ranks - 1) * whole(case) / case.n_ranks
    return most - len(case["shapes"]), most


PROBLEM = exercise(
    __name__,
    flat_average,
    changes=(0,),
    laws=(
        sends(
            law,
            "each rank sends 2(n-1)/n of the gradients' bytes, in one all_reduce",
            only=("all_reduce",),
            messages=lambda case, rank: 1,
        ),
    ),
    star=Star(
        "hold little more than one flat copy of the gradients",
        highest_peak,
        lambda case: 1.25 * whole(case),
        unit="bytes held",
    ),
)
