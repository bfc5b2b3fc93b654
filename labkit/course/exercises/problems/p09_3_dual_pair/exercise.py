"""09.3: the two ends of a tensor-parallel region, each the other's backward."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends
from labkit.course.judge.run_record import alone
from labkit.plan.machine.collectives import sent_bytes


class DualPair:
    """f and g, the two ends of a tensor-parallel region. Between them each rank computes its own part.

    `DualPair.F.apply(x, group)` and `DualPair.G.apply(x, group)` are called inside a model; autograd calls the
    backward of each with the gradient of what forward gave."""

    class F(Function):
        """The end at which x enters. x is the same on all ranks, and each rank sees only its own use of it."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
            """x itself; nothing is sent.   same shape"""
            ctx.group = group
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            """The gradient of x from this rank's use -> from all uses, on every rank (None stands for `group`)."""
            return ctx.group.all_reduce(grad), None

    class G(Function):
        """The end at which y leaves. Each rank has one term of it."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
            """This rank's term -> the sum of all, on every rank.   same shape"""
            return group.all_reduce(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            """The gradient of the sum, the same on all ranks -> of this rank's term; nothing is sent."""
            return grad, None


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks; hidden numbers that n does not divide; rows, and sequences of them."""
    return [
        Case.of(3, torch.float64, rows=(6,), width=5, hidden=8, outputs=3),
        Case.of(2, rows=(2, 2), width=3, hidden=5, outputs=6),
        Case.of(4, torch.float64, rows=(2, 2), width=4, hidden=6, outputs=2),
        Case.of(1, rows=(2,), width=3, hidden=4, outputs=5),
    ]


def inputs(case: Case) -> Inputs:
    """x and the gradient of y, the same for all, and a part of the rows of up and the columns of down for each rank."""
    x, dy = (case.random(*case["rows"], case[width], key=key) for key, width in ((1, "width"), (2, "outputs")))
    up, down = case.random(case["hidden"], case["width"], key=3), case.random(case["outputs"], case["hidden"], key=4)
    ups, downs = up.tensor_split(case.n_ranks), down.tensor_split(case.n_ranks, dim=1)
    return [(x, dy, ups[rank].clone(), downs[rank].clone()) for rank in range(case.n_ranks)]


def play(attempt: Any, group: Group, x: Tensor, dy: Tensor, up: Tensor, down: Tensor) -> Any:
    """Run two regions forward and backward: a sine between f and g over this rank only, then a pair of matrices between
    f and g over all ranks."""
    x, up, down = (tensor.clone().requires_grad_() for tensor in (x, up, down))
    itself = alone(group)
    z = attempt.G.apply(torch.sin(attempt.F.apply(x, itself)), itself)
    y = attempt.G.apply(torch.tanh(attempt.F.apply(z, group) @ up.T) @ down.T, group)
    y.backward(dy)
    return {"y": y, "gradient of x": x.grad, "gradient of up": up.grad, "gradient of down": down.grad}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The result and gradients of the whole matrices, from autograd in float64."""
    x, dy = (tensor.double() for tensor in inputs[0][:2])
    up, down = torch.cat([row[2] for row in inputs]).double(), torch.cat([row[3] for row in inputs], 1).double()
    whole = [tensor.requires_grad_() for tensor in (x, up, down)]
    y = torch.tanh(torch.sin(whole[0]) @ whole[1].T) @ whole[2].T
    dx, dup, ddown = (gradient.to(case.dtype) for gradient in torch.autograd.grad(y, whole, dy))
    parts = zip(dup.tensor_split(case.n_ranks), ddown.tensor_split(case.n_ranks, dim=1), strict=True)
    return [
        {"y": y.detach().to(case.dtype), "gradient of x": dx, "gradient of up": a, "gradient of down": b}
        for a, b in parts
    ]


def law(case: Case, rank: int) -> float:
    """Bytes that a rank sends: 2(n-1)/n of y's forward, and of x's backward."""
    n_rows = math.prod(case["rows"])
    sizes = (n_rows * case[width] * case.item_bytes for width in ("outputs", "width"))
    return sum(sent_bytes("ring", "all_reduce", case.n_ranks, n, rank, case.item_bytes) for n in sizes)


PROBLEM = exercise(
    __name__,
    DualPair,
    laws=(
        sends(
            law,
            "one all_reduce of y forward (g) and one of the gradient of x backward (f): 2(n-1)/n of the bytes of each",
            only=("all_reduce",),
            messages=lambda case, rank: 2 * (case.n_ranks > 1),
        ),
    ),
)
