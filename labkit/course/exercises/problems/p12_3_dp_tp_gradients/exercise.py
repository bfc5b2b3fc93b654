"""12.3: one step under data and tensor parallelism: which group reduces what."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.course.exercises.exercise import Answers, Case, Inputs, Star, by_axis, exercise, most_calls, sends
from labkit.plan.partition.layout import Layout


def dp_tp_gradients(x: Tensor, target: Tensor, weights: dict[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """The gradient of every weight, after one batch on dp x tp ranks: of the mean loss over the whole batch.

    The model is y = tanh((x * gain) up^T) down^T + bias, its loss mse_loss(y, target). The weights ask for
    gradients: "gain" [D] and "bias" [D], the same on all ranks; "up" [H/tp, D] and "down" [D, H/tp], this rank's part,
    the same in every copy. x and target [B, D] have places for the whole batch; copy mesh.dp.rank takes its B/dp rows,
    in order, and the rows of other copies hold other numbers.
    Talk along mesh.tp and mesh.dp only, and send no weights, no hidden numbers and no rows of x."""
    tp, dp = mesh.tp, mesh.dp
    rows, wanted = (tensor.chunk(dp.size)[dp.rank] for tensor in (x, target))
    term = torch.tanh((rows * weights["gain"]) @ weights["up"].T) @ weights["down"].T
    total = tp.all_reduce(term.detach()).requires_grad_()
    mse_loss(total + weights["bias"], wanted).backward()
    term.backward(total.grad)
    grads: dict[str, Any] = {name: weight.grad for name, weight in weights.items()}
    grads["gain"] = tp.all_reduce(grads["gain"])
    return {name: dp.all_reduce(grad, op="mean") for name, grad in grads.items()}


def cases() -> list[Case]:
    """Two by two; either axis alone; one rank."""
    return [
        Case.of(4, torch.float64, dp=2, tp=2, rows=6, width=5, hidden=8),
        Case.of(3, torch.float64, dp=1, tp=3, rows=4, width=4, hidden=9),
        Case.of(2, dp=2, tp=1, rows=8, width=3, hidden=4),
        Case.of(1, dp=1, tp=1, rows=4, width=3, hidden=5),
    ]


def whole(case: Case) -> dict[str, Tensor]:
    """The weights of the model."""
    d, h = case["width"], case["hidden"]
    shapes = {"gain": (d,), "up": (h, d), "down": (d, h), "bias": (d,)}
    return {name: case.random(*shape, key=key) for key, (name, shape) in enumerate(shapes.items())}


def mine(case: Case, weights: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A rank's part of each weight, or of each gradient."""
    place, tp = rank % case["tp"], case["tp"]
    cut = {"up": weights["up"].chunk(tp)[place], "down": weights["down"].chunk(tp, 1)[place]}
    return {name: cut.get(name, weight).clone() for name, weight in weights.items()}


def inputs(case: Case) -> Inputs:
    """The batch, a rank's weights, and the sizes of the axes. A rank finds other numbers in the rows of other copies:
    what it makes of rows that are not its own tells."""
    sizes = case["dp"], case["tp"]
    return [
        (*(seen(case, key, rank // case["tp"]) for key in (8, 9)), mine(case, whole(case), rank), *sizes)
        for rank in range(case.n_ranks)
    ]


def seen(case: Case, key: int, copy: int) -> Tensor:
    """x (key 8) or target (key 9) as the ranks of a copy find it: its own rows, and others in place of the rest."""
    rows = list(case.random(case["rows"], case["width"], key=100 * copy + 10 + key).chunk(case["dp"]))
    rows[copy] = case.random(case["rows"], case["width"], key=key).chunk(case["dp"])[copy]
    return torch.cat(rows)


def play(attempt: Any, group: Group, x: Tensor, target: Tensor, weights: dict[str, Tensor], dp: int, tp: int) -> Any:
    """Take one step on a mesh and return the gradients."""
    mesh = Mesh.connect(Layout(dp=dp, tp=tp), group)
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    return attempt(x, target, leaves, mesh)


def answer(case: Case, inputs: Inputs) -> Answers:
    """The gradients of the whole batch through the whole model in one process, in float64."""
    x, target = (case.random(case["rows"], case["width"], key=key).double() for key in (8, 9))
    w = {name: weight.double().requires_grad_() for name, weight in whole(case).items()}
    y = torch.nn.functional.linear(torch.nn.functional.linear(x * w["gain"], w["up"]).tanh(), w["down"], w["bias"])
    whole_grads = torch.autograd.grad(mse_loss(y, target), list(w.values()))
    grads = {name: grad.to(case.dtype) for name, grad in zip(w, whole_grads, strict=True)}
    return [mine(case, grads, rank) for rank in range(case.n_ranks)]


def along(case: Case, axis: str) -> tuple[float, float]:
    """(least, most) bytes that a rank sends along an axis: 2(n-1)/n of y's rows and a gradient [D] on tp, and of all
    gradients on dp."""
    d, dp, tp = case["width"], case["dp"], case["tp"]
    numbers = {"tp": case["rows"] // dp * d + d, "dp": 2 * d + 2 * case["hidden"] // tp * d}.get(axis, 0)
    n = {"dp": dp, "tp": tp}.get(axis, 1)
    law = 2 * (n - 1) / n * numbers * case.item_bytes
    return law - 8, law  # a collective counts as whole bytes


PROBLEM = exercise(
    __name__,
    dp_tp_gradients,
    imports=("Mesh",),
    laws=(
        by_axis(
            tp=sends(lambda case, rank: along(case, "tp"), "2(n-1)/n of y's rows and a gradient [D]"),
            dp=sends(lambda case, rank: along(case, "dp"), "2(n-1)/n of this rank's gradients"),
        ),
    ),
    star=Star("what goes along dp can go at once", most_calls, lambda case: 3, unit="collectives"),
)
