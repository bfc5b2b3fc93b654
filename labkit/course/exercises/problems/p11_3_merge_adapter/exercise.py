"""11.3: the correction goes into the weight, and out again."""

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise

ROWS = 5
MOST_OTHERS = 0.02
"""Share of a W in bf16 that may be rounded to the other side, since a sum in float32 is itself rounded. Of a sum in
bf16 it is a fifth and more."""
MOST_OFF = MappingProxyType({torch.float32: 1e-5, torch.bfloat16: 0.03})
"""By the dtype of W: y before merging, compared with float64, must be nearer than this. The number is the largest error
of an element of y, over the largest absolute value in y."""


class MergingLoRA:
    """y = x (W + (alpha / r) B A)^T, with the correction beside the weight or merged into it.   [rows, I] -> [rows, O]

    W [O, I] is frozen and may be in bf16; A [r, I] and B [O, r] train, in float32, and count as they are when a method
    is called. y has x's dtype, which is W's. W is the model's own tensor: it is changed in place, never replaced, keeps
    its dtype, and autograd does not follow what is added to it."""

    def __init__(self, weight: Tensor, a: Tensor, b: Tensor, alpha: float):
        """weight: W; a: A; b: B."""
        self.weight, self.a, self.b, self.scale = weight, a, b, alpha / len(a)
        self.aside: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The same y, to rounding, merged or not: merged, W alone gives it."""
        y = x @ self.weight.T
        return y if self.aside is not None else y + (self.scale * (x.float() @ self.a.T @ self.b.T)).to(x.dtype)

    def merge_(self) -> None:
        """W <- W + (alpha / r) B A, summed in float32 and rounded once. Merged already: nothing happens."""
        if self.aside is None:
            self.aside = self.weight.clone()
            self.weight.copy_(self.weight.float() + self.scale * (self.b @ self.a).detach())

    def unmerge_(self) -> None:
        """W is again what it was, bit for bit. Not merged: nothing happens."""
        if self.aside is not None:
            self.weight.copy_(self.aside)
            self.aside = None


def cases() -> list[Case]:
    """Weights in float32 and bf16."""
    return [
        Case.of(1, torch.bfloat16, inputs=40, outputs=24, rank=4, alpha=6.0),
        Case.of(1, inputs=33, outputs=65, rank=3, alpha=1.0),
        Case.of(1, torch.bfloat16, inputs=16, outputs=16, rank=1, alpha=2.5),
    ]


def inputs(case: Case) -> Inputs:
    """W, A, B and rows."""
    i, o, r = case["inputs"], case["outputs"], case["rank"]
    w, x = case.random(o, i, key=1), case.random(ROWS, i, key=4)
    a, b = case.random(r, i, key=2, dtype=torch.float32), case.random(o, r, key=3, dtype=torch.float32)
    return [(w, a, b, case["alpha"], x)]


def play(attempt: Any, group: Any, weight: Tensor, a: Tensor, b: Tensor, alpha: float, x: Tensor) -> Any:
    """W and y with the correction beside W, merged, merged once more, taken out, taken out once more; then, when A and
    B have been trained on, with the correction beside W and merged again."""
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    before, layer, replies = weight.clone(), attempt(weight, a, b, alpha), dict[str, Any]()
    replies["y, not merged"] = layer.forward(x).clone()
    exact = x.double() @ (before.double() + alpha / len(a) * b.double() @ a.double()).T
    off = float(((replies["y, not merged"] - exact).abs().max() / exact.abs().max()).detach())
    replies["y has the digits of its dtype"] = off < MOST_OFF[weight.dtype]
    layer.merge_()
    replies["W, merged"], replies["y, merged"] = weight.clone(), layer.forward(x).clone()
    replies["autograd follows W"] = weight.requires_grad
    rounded_once = (before.double() + alpha / len(a) * b.double() @ a.double()).to(weight.dtype)
    others = float((weight != rounded_once).double().mean())
    replies["W is the sum, rounded once"] = weight.dtype == torch.float32 or others < MOST_OTHERS
    layer.merge_()
    replies["W, merge_ called again"], replies["y, merge_ called again"] = weight.clone(), layer.forward(x).clone()
    layer.unmerge_()
    replies["W has its old bits"] = bool(torch.equal(weight, before))
    layer.unmerge_()
    replies["y, taken out"], replies["W, taken out"] = layer.forward(x).clone(), weight.clone()
    with torch.no_grad():
        a += 1
        b -= 1
    replies["y, trained on"] = layer.forward(x).clone()
    layer.merge_()
    replies["W, merged again"], replies["y, merged again"] = weight.clone(), layer.forward(x).clone()
    return replies


def corrected(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W with its correction, a sum of outer products in float64."""
    exact = weight.double()
    for row, column in zip(a.double(), b.double().T, strict=True):
        exact = exact + scale * torch.outer(column, row)
    return exact


def answer(case: Case, inputs: Inputs) -> Answers:
    """W and y from sums of outer products, in float64, with A and B as they are at first and as they are later."""
    ((weight, a, b, alpha, x),) = inputs
    first, later = corrected(weight, a, b, alpha / len(a)), corrected(weight, a + 1, b - 1, alpha / len(a))
    times = dict.fromkeys(("not merged", "merged", "merge_ called again", "taken out"), first)
    times |= dict.fromkeys(("trained on", "merged again"), later)
    answers: dict[str, Any] = {f"y, {when}": (x.double() @ exact.T).to(case.dtype) for when, exact in times.items()}
    merged = ("merged", "merge_ called again", "merged again")
    answers |= {f"W, {when}": times[when].to(case.dtype) for when in merged}
    return [{**answers, "W, taken out": weight, "W has its old bits": True, "W is the sum, rounded once": True,
             "y has the digits of its dtype": True, "autograd follows W": False}]  # fmt: skip


PROBLEM = exercise(__name__, MergingLoRA, changes=(0,), tolerance=(0.012, 0.012))
