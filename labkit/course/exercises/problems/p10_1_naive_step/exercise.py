"""10.1: a model cut by layers, and one batch that goes through it and back."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends


def naive_step(stage: nn.Module, x: Tensor | None, target: Tensor | None, group: Group) -> Tensor | None:
    """Forward and backward of one batch through n stages, one on each rank.   activations [B, D_r] -> [B, D_r+1]

    Rank r holds stage r. Only rank 0 has x, only the last rank has the target (None elsewhere; in a world of 1 the one
    rank has both). The loss is `mse_loss` of the last stage's output; the last rank returns it, the others None.
    Afterwards every stage's parameters have their gradients. A rank sends its activation to the next rank and the
    gradient of what it received to the one before: two messages at most, and nothing else. Wait for both before you
    return."""
    before, after, going = group.rank - 1, group.rank + 1, []
    taken: Any = group.recv(before).requires_grad_() if x is None else x
    y = stage(taken)
    if target is None:
        going.append(group.send(y.detach(), after))
        y.backward(group.recv(after))
        loss = None
    else:
        loss = mse_loss(y, target)
        loss.backward()
    if before >= 0:
        going.append(group.send(taken.grad, before))
    for work in going:
        work.wait()
    return loss


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks; `widths` of x, of what flows between ranks, and of the output."""
    return [
        Case.of(3, torch.float64, rows=4, widths=(5, 7, 3, 2)),
        Case.of(2, rows=3, widths=(4, 6, 2)),
        Case.of(4, torch.float64, rows=2, widths=(3, 8, 4, 6, 1)),
        Case.of(1, rows=5, widths=(3, 2)),
    ]


def inputs(case: Case) -> Inputs:
    """The weights of each rank, x for the first, and the target for the last."""
    widths, n = case["widths"], case.n_ranks
    x, target = case.random(case["rows"], widths[0], key=1), case.random(case["rows"], widths[-1], key=2)
    weights = [case.random(b, a, key=10 + r) for r, (a, b) in enumerate(zip(widths, widths[1:], strict=False))]
    return [(weights[r], x if r == 0 else None, target if r == n - 1 else None) for r in range(n)]


def stage_of(weight: Tensor) -> nn.Module:
    """A linear layer and a tanh."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    linear.load_state_dict({"weight": weight.clone(), "bias": weight[:, 0].clone()})
    return nn.Sequential(linear, nn.Tanh())


def play(attempt: Any, group: Group, weight: Tensor, x: Tensor | None, target: Tensor | None) -> Any:
    """Take one step; return the loss, and this stage's gradients."""
    stage = stage_of(weight)
    loss = attempt(stage, x, target, group)
    return {"loss": loss, "gradients": [p.grad for p in stage.parameters()]}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The loss and gradients of all stages in one process, in float64."""
    stages = [stage_of(weight.double()) for weight, *_ in inputs]
    x, target = inputs[0][1], inputs[-1][2]
    loss = mse_loss(nn.Sequential(*stages)(x.double()), target.double())
    loss.backward()
    results: list[Any] = [
        {"loss": None, "gradients": [p.grad.to(case.dtype) for p in stage.parameters() if p.grad is not None]}
        for stage in stages
    ]
    results[-1]["loss"] = loss.detach().to(case.dtype)
    return results


def law(case: Case, rank: int) -> float:
    """Bytes that a rank sends: its activation forward unless it is the last rank, and the gradient of its input back
    unless it is the first."""
    on = case["widths"][rank + 1] * (rank < case.n_ranks - 1)
    return float(case["rows"] * (on + case["widths"][rank] * (rank > 0)) * case.item_bytes)


PROBLEM = exercise(
    __name__,
    naive_step,
    laws=(
        sends(
            law,
            "each rank sends its activation on and a gradient as large as its input back, to its neighbours, once",
            only=("send",),
            to=lambda case, rank: {rank - 1, rank + 1} & set(range(case.n_ranks)),
            messages=lambda case, rank: (rank > 0) + (rank < case.n_ranks - 1),
        ),
    ),
)
