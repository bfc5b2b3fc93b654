"""04.1: the gradient of a batch that does not fit, in micro-batches."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, peak

WIDTH, LAYERS, ITEM = 64, 6, 8
Gradients = list[Tensor | None]
SLACK_BYTES = 32 << 10


def backward_in_parts(model: nn.Module, x: Tensor, y: Tensor, n_micro: int) -> Tensor:
    """Add the gradient of the batch's loss to each parameter's `.grad`, and return that loss.   [b, d], [b, d] -> []

    The loss is `F.mse_loss(model(x), y)`, the mean over the whole batch. Cut the batch in n_micro parts of equal length
    (n_micro divides b); never hold the activations of more than one, nor all gradients twice. What is in `.grad`
    already stays in the sum; where nothing is yet, it is None."""
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    for part, wanted in zip(x.chunk(n_micro), y.chunk(n_micro), strict=True):
        loss = F.mse_loss(model(part), wanted) / n_micro
        loss.backward()
        total += loss.detach()
    return total


def cases() -> list[Case]:
    """Many parts, where holding all of them costs most; and one."""
    return [
        Case.of(1, torch.float64, rows=320, n_micro=8),
        Case.of(1, torch.float64, rows=225, n_micro=5),
        Case.of(1, torch.float64, rows=40, n_micro=1),
    ]


def inputs(case: Case) -> Inputs:
    """A batch, weights, gradients of an earlier batch (the first layer has none yet), and the number of parts."""
    x, y = (case.random(case["rows"], WIDTH, key=key) for key in (1, 2))
    weights = [case.random(WIDTH, WIDTH, key=10 + layer) / WIDTH**0.5 for layer in range(LAYERS)]
    before = [case.random(WIDTH, WIDTH, key=30 + layer) / WIDTH if layer else None for layer in range(LAYERS)]
    return [(x, y, weights, before, case["n_micro"])]


def built(weights: list[Tensor], before: Gradients) -> nn.Sequential:
    """A model with these weights and with the gradients `before` of an earlier batch."""
    layers: list[nn.Module] = []
    for weight, grad in zip(weights, before, strict=True):
        linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=weight.dtype)
        linear.weight.data.copy_(weight)
        linear.weight.grad = None if grad is None else grad.clone()
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers)


def play(attempt: Any, group: Group, x: Tensor, y: Tensor, weights: list[Tensor], before: Gradients, m: int) -> Any:
    """The loss, and the gradients."""
    model = built(weights, before)
    loss = attempt(model, x, y, m)
    return {"loss": loss, "gradients": [p.grad for p in model.parameters()]}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The loss and gradients of the whole batch at once, by plain formulas."""
    x, y, weights, before, _ = inputs[0]
    leaves = [weight.clone().requires_grad_() for weight in weights]
    out = x
    for weight in leaves:
        out = torch.tanh(out @ weight.T)
    loss = (out - y).square().mean()
    grads = torch.autograd.grad(loss, leaves)
    return [
        {"loss": loss.detach(), "gradients": [a if b is None else a + b for a, b in zip(grads, before, strict=True)]}
    ]


def limit(case: Case, rank: int) -> float:
    """The most bytes held: weights, gradients and one more gradient, and of one part the output of each layer's Tanh
    and four tensors that live for a moment."""
    state = (2 * LAYERS + 1) * WIDTH * WIDTH * ITEM
    part = case["rows"] // case["n_micro"] * WIDTH * ITEM
    return state + (LAYERS + 4) * part + SLACK_BYTES


PROBLEM = exercise(
    __name__,
    backward_in_parts,
    laws=(peak(limit, "besides weights and gradients, a device holds the activations of one part"),),
)
