"""06.1: data parallelism in its plainest form: one broadcast of the weights, one mean of the gradients."""

# mypy: disable-error-code="arg-type"
# (the learner's text carries no comments for the type checker; p.grad may be None by its type, but not after backward)
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends

STEPS, LR, FROZEN = 3, 0.1, 1


class PlainDDP:
    """Keeps the copies of a model alike, one on each rank, while each rank computes with its own samples."""

    def __init__(self, module: nn.Module, group: Group):
        """Give every parameter of `module`, in place, the value that it has on rank 0: once, by broadcast."""
        self.params, self.group = list(module.parameters()), group
        for p in self.params:
            p.data.copy_(group.broadcast(p.data, source=0))

    def average(self) -> None:
        """After backward: every p.grad becomes the mean of that gradient over the ranks, by all_reduce. A frozen
        parameter has none: its p.grad is None, and stays so."""
        for p in self.params:
            if p.grad is not None:
                p.grad = self.group.all_reduce(p.grad, "mean")


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks."""
    return [
        Case.of(3, torch.float64, rows=5, widths=(7, 11, 2)),
        Case.of(4, torch.float32, rows=3, widths=(4, 9, 1)),
        Case.of(1, torch.float64, rows=6, widths=(3, 5, 2)),
    ]


def shapes(case: Case) -> list[tuple[int, ...]]:
    """Shapes of the parameters of a model with two linear layers."""
    a, b, c = case["widths"]
    return [(b, a), (b,), (c, b), (c,)]


def inputs(case: Case) -> Inputs:
    """Weights of its own for each rank, and its samples of each step."""
    (a, _, c), n = case["widths"], case["rows"]
    return [
        (
            [case.random(*shape, key=100 * rank + i) / 2 for i, shape in enumerate(shapes(case))],
            [
                (case.random(n, a, key=900 + 9 * s + rank), case.random(n, c, key=1900 + 9 * s + rank))
                for s in range(STEPS)
            ],
        )
        for rank in range(case.n_ranks)
    ]


def model_of(weights: Sequence[Tensor]) -> nn.Module:
    """The model with these weights. The first bias is frozen."""
    (b, a), c = weights[0].shape, len(weights[3])
    model = nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c)).to(weights[0].dtype)
    for p, w in zip(model.parameters(), weights, strict=True):
        p.data = w.clone()
    list(model.parameters())[FROZEN].requires_grad_(False)
    return model


def train(model: nn.Module, rows: Sequence[tuple[Tensor, Tensor]], average: Any) -> list[Tensor]:
    """A few steps of SGD."""
    for x, y in rows:
        model.zero_grad()
        (model(x) - y).square().mean().backward()
        average()
        for p in model.parameters():
            if p.grad is not None:
                p.data -= LR * p.grad
    return [p.detach() for p in model.parameters()]


def play(attempt: Any, group: Group, weights: list[Tensor], rows: list[tuple[Tensor, Tensor]]) -> Any:
    """Train, each rank with its samples: the weights at the end."""
    model = model_of(weights)
    before = [p.data_ptr() for p in model.parameters()]
    average = attempt(model, group).average
    moved = [p.data_ptr() for p in model.parameters()] != before
    if moved:
        return "a parameter lies elsewhere in memory: its value was to change in place"
    return train(model, rows, average)


def answer(case: Case, inputs: Inputs) -> Answers:
    """One process with all samples, from the weights of rank 0."""
    steps = [rows for _, rows in inputs]
    whole = [tuple(torch.cat([rows[s][k] for rows in steps]) for k in (0, 1)) for s in range(STEPS)]
    return [train(model_of(inputs[0][0]), whole, lambda: None)] * case.n_ranks  # type: ignore[arg-type]


def law(case: Case, rank: int) -> tuple[float, float]:
    """(least, most) bytes that a rank sends: rank 0 all weights once, each rank 2(n-1)/n of the gradients a step. Each
    all_reduce may round down by a byte."""
    sizes = [case.item_bytes * torch.Size(shape).numel() for shape in shapes(case)]
    n, whole = case.n_ranks, sum(sizes)
    if n == 1:
        return 0, 0
    most = whole * (rank == 0) + STEPS * 2 * (n - 1) * (whole - sizes[FROZEN]) / n
    return most - STEPS * len(shapes(case)), most


PROBLEM = exercise(
    __name__,
    PlainDDP,
    laws=(
        sends(
            law,
            "rank 0 sends the weights once; each rank sends 2(n-1)/n of the gradients' bytes a step",
            only=("broadcast", "all_reduce"),
        ),
    ),
)
