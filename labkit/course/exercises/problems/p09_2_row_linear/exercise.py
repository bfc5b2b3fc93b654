"""09.2: a linear layer cut by its inputs."""

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends
from labkit.plan.machine.collectives import sent_bytes


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """y = x W^T + b, cut by inputs.   x_r [B, I_r] -> y [B, O], whole on every rank   with W[O, I_r] and b[O]

    I_r, this rank's share of the inputs, may differ between ranks, and may be 0; x and weight hold that share. b is
    whole and the same on every rank, or None on every rank. Send one all_reduce of y's bytes."""
    y = group.all_reduce(x @ weight.T)
    return y if bias is None else y + bias


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks; inputs that n does not divide, in the last fewer of them than ranks."""
    return [
        Case.of(3, torch.float64, rows=4, inputs=11, outputs=6, bias=True),
        Case.of(2, rows=3, inputs=7, outputs=4, bias=True),
        Case.of(4, rows=2, inputs=9, outputs=8, bias=False),
        Case.of(1, torch.float64, rows=5, inputs=3, outputs=2, bias=True),
        Case.of(4, rows=2, inputs=3, outputs=6, bias=True),
    ]


def inputs(case: Case) -> Inputs:
    """A part of the columns of x and of W for each rank, and the bias."""
    x, weight = case.random(case["rows"], case["inputs"], key=1), case.random(case["outputs"], case["inputs"], key=2)
    bias, n = case.random(case["outputs"], key=3) if case["bias"] else None, case.n_ranks
    xs, weights = x.tensor_split(n, dim=1), weight.tensor_split(n, dim=1)
    return [(xs[rank].clone(), weights[rank].clone(), bias) for rank in range(n)]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The result of torch's linear layer on the whole."""
    x, weight = (torch.cat([arguments[place] for arguments in inputs], dim=1).double() for place in (0, 1))
    bias = inputs[0][2]
    y = torch.nn.functional.linear(x, weight, bias if bias is None else bias.double())
    return [y.to(case.dtype)] * case.n_ranks


def law(case: Case, rank: int) -> float:
    """Bytes that a rank sends: 2(n-1)/n of y's."""
    whole = case["rows"] * case["outputs"] * case.item_bytes
    return sent_bytes("ring", "all_reduce", case.n_ranks, whole, rank, case.item_bytes)


PROBLEM = exercise(
    __name__,
    row_linear,
    laws=(
        sends(
            law,
            "each rank sends 2(n-1)/n of y's bytes, in one all_reduce",
            only=("all_reduce",),
            messages=lambda case, rank: int(case.n_ranks > 1),
        ),
    ),
)
