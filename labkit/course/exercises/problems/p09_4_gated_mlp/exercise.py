"""09.4: a gated MLP, cut over ranks, with one all-reduce forward and one backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise_files import beside
from labkit.course.exercises.problem import Complaint, Law, Problem
from labkit.course.judge.case import Case
from labkit.course.judge.run_record import Event, RunRecord, mark
from labkit.parallel.tensor import copy_to, reduce_from
from labkit.plan.collectives import sent_bytes

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


def cases() -> Sequence[Case]:
    """Worlds of 1 to 4 ranks; hidden widths that n does not divide."""
    return [
        Case.of(3, torch.float64, rows=6, width=5, hidden=8),
        Case.of(2, rows=4, width=3, hidden=7),
        Case.of(4, torch.float64, rows=3, width=4, hidden=4),
        Case.of(1, rows=2, width=3, hidden=5),
    ]


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """x, the gradient of y and the bias, the same for all; this rank's part of three matrices."""
    x, dy = (case.random(case["rows"], case["width"], key=key) for key in (1, 2))
    bias, (gate, up, down) = case.random(case["width"], key=6), whole(case)
    parts = zip(*(each.tensor_split(case.n_ranks) for each in (gate, up, down.T)), strict=True)
    return [(x, dy, a.clone(), b.clone(), c.T.clone(), bias) for a, b, c in parts]


def whole(case: Case) -> list[Tensor]:
    """gate [H, D], up [H, D], down [D, H]"""
    h, d = case["hidden"], case["width"]
    return [case.random(h, d, key=3), case.random(h, d, key=4), case.random(d, h, key=5)]


def play(attempt: Any, group: Group, x: Tensor, dy: Tensor, *weights: Tensor) -> Any:
    """A forward and a backward."""
    leaves = [each.clone().requires_grad_() for each in (x, *weights)]
    y = attempt(*leaves, partial(copy_to, group=group), partial(reduce_from, group=group))
    mark(group, "the forward is done")
    y.backward(dy)
    names = ("x", "gate", "up", "down", "bias")
    return {"y": y, **{f"gradient of {name}": leaf.grad for name, leaf in zip(names, leaves, strict=True)}}


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """One process, torch's own layers, float64."""
    x, dy, *_, bias = (each.double() for each in given[0])
    leaves = [each.double().requires_grad_() for each in (x, *whole(case), bias)]
    linear = torch.nn.functional.linear
    hidden = torch.nn.functional.silu(linear(leaves[0], leaves[1])) * linear(leaves[0], leaves[2])
    y = linear(hidden, leaves[3], leaves[4])
    dx, dgate, dup, ddown, dbias = (each.to(case.dtype) for each in torch.autograd.grad(y, leaves, dy))
    parts = zip(*(each.tensor_split(case.n_ranks) for each in (dgate, dup, ddown.T)), strict=True)
    ends = {"y": y.detach().to(case.dtype), "gradient of x": dx, "gradient of bias": dbias}
    return [ends | {"gradient of gate": a, "gradient of up": b, "gradient of down": c.T} for a, b, c in parts]


def two_sums(record: RunRecord) -> Complaint | None:
    """More than one sum of a [B, D] in forward, or in backward. f and g are the exercise's, so no line is asked for."""
    case = record.case
    n_bytes = case["rows"] * case["width"] * case.item_bytes
    for rank in range(case.n_ranks):
        law = sent_bytes("ring", "all_reduce", case.n_ranks, n_bytes, rank, case.item_bytes)
        middle = next((each.number for each in record.marks(rank)), 0)
        ways: dict[str, list[Event]] = {"forward": [], "backward": []}
        for each in record.sent(rank):
            ways["forward" if each.number < middle else "backward"].append(each)
        for way, found in ways.items():
            if sum(each.n_bytes for each in found) != law:
                seen = f"{len(found)} of {sum(each.n_bytes for each in found):,} bytes in {way}"
                wanted = f"one all_reduce that sends {law:,} bytes in {way}" if law else f"nothing sent in {way}"
                return Complaint(wanted, seen, rank, tuple(each.number for each in found))
    return None


PROBLEM = Problem(
    **beside(__file__),
    reference=tp_gated_mlp,
    cases=cases,
    inputs=inputs,
    play=play,
    answer=answer,
    laws=(Law("wire", "2(n-1)/n of a [B, D]'s bytes forward, and the same backward", two_sums),),
)
