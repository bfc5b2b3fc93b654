"""09.4: a gated MLP, cut over ranks, with one all-reduce forward and one backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Complaint, Inputs, Law, exercise
from labkit.course.judge.run_record import Event, RunRecord, mark
from labkit.parallel.tensor import copy_to, reduce_from
from labkit.plan.machine.collectives import sent_bytes

Door = Callable[[Tensor], Tensor]


def tp_gated_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, bias: Tensor, f: Callable[[Tensor], Tensor],
    g: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """y = (silu(x gate^T) * x up^T) down^T + bias, a Llama MLP.   x [B, D], whole -> y [B, D], whole on every rank

    This rank has gate[H/n, D], up[H/n, D] and down[D, H/n]; bias [D] is whole and the same on every rank. f and g are
    the dual pair: f(t) is t, and sums t's gradient over the ranks; g(t) sums t, and leaves its gradient alone. The
    gradients of x and of all four weights must come out right, with one sum forward and one backward."""
    x = f(x)
    hidden = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    return g(hidden @ down.T) + bias


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks; hidden widths that n does not divide."""
    return [
        Case.of(3, torch.float64, rows=6, width=5, hidden=8),
        Case.of(2, rows=4, width=3, hidden=7),
        Case.of(4, torch.float64, rows=3, width=4, hidden=4),
        Case.of(1, rows=2, width=3, hidden=5),
    ]


def inputs(case: Case) -> Inputs:
    """x, the gradient of y and the bias, the same for all; this rank's part of three matrices."""
    x, dy = (case.random(case["rows"], case["width"], key=key) for key in (1, 2))
    bias, (gate, up, down) = case.random(case["width"], key=6), whole(case)
    parts = zip(*(matrix.tensor_split(case.n_ranks) for matrix in (gate, up, down.T)), strict=True)
    return [(x, dy, a.clone(), b.clone(), c.T.clone(), bias) for a, b, c in parts]


def whole(case: Case) -> list[Tensor]:
    """gate [H, D], up [H, D], down [D, H]"""
    h, d = case["hidden"], case["width"]
    return [case.random(h, d, key=3), case.random(h, d, key=4), case.random(d, h, key=5)]


def play(attempt: Any, group: Group, x: Tensor, dy: Tensor, *weights: Tensor) -> Any:
    """Run forward and backward, with a mark in the record between them."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
    y = attempt(*leaves, partial(copy_to, group=group), partial(reduce_from, group=group))
    mark(group, "the forward is done")
    y.backward(dy)
    names = ("x", "gate", "up", "down", "bias")
    return {"y": y, **{f"gradient of {name}": leaf.grad for name, leaf in zip(names, leaves, strict=True)}}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The result and gradients of torch's own layers in one process, in float64."""
    x, dy, *_, bias = (tensor.double() for tensor in inputs[0])
    leaves = [tensor.double().requires_grad_() for tensor in (x, *whole(case), bias)]
    linear = torch.nn.functional.linear
    hidden = torch.nn.functional.silu(linear(leaves[0], leaves[1])) * linear(leaves[0], leaves[2])
    y = linear(hidden, leaves[3], leaves[4])
    dx, dgate, dup, ddown, dbias = (gradient.to(case.dtype) for gradient in torch.autograd.grad(y, leaves, dy))
    parts = zip(*(gradient.tensor_split(case.n_ranks) for gradient in (dgate, dup, ddown.T)), strict=True)
    ends = {"y": y.detach().to(case.dtype), "gradient of x": dx, "gradient of bias": dbias}
    return [ends | {"gradient of gate": a, "gradient of up": b, "gradient of down": c.T} for a, b, c in parts]


def two_sums(record: RunRecord) -> Complaint | None:
    """A Complaint unless each rank sends one sum of a [B, D] in forward and one in backward.

    f and g, which send them, are the exercise's own, so no line of the attempt can be named."""
    case = record.case
    n_bytes = case["rows"] * case["width"] * case.item_bytes
    for rank in range(case.n_ranks):
        law = sent_bytes("ring", "all_reduce", case.n_ranks, n_bytes, rank, case.item_bytes)
        middle = next((event.number for event in record.marks(rank)), 0)
        ways: dict[str, list[Event]] = {"forward": [], "backward": []}
        for event in record.sent(rank):
            ways["forward" if event.number < middle else "backward"].append(event)
        for way, events in ways.items():
            if sum(event.n_bytes for event in events) != law:
                seen = f"{len(events)} of {sum(event.n_bytes for event in events):,} bytes in {way}"
                wanted = f"one all_reduce that sends {law:,} bytes in {way}" if law else f"nothing sent in {way}"
                return Complaint(wanted, seen, rank, tuple(event.number for event in events))
    return None


PROBLEM = exercise(
    __name__,
    tp_gated_mlp,
    laws=(Law("wire", "2(n-1)/n of a [B, D]'s bytes forward, and the same backward", two_sums),),
)
