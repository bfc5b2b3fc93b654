"""11.3: the correction goes into the weight, and out again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.course.exercises.problem import Mutant, Problem
from labkit.course.judge.case import Case

ROWS = 5


class MergingLoRA:
    """y = x (W + (alpha / r) B A)^T, with the correction beside the weight or merged into it.   [rows, I] -> [rows, O]

    W [O, I] is frozen and may be in bf16; A [r, I] and B [O, r] are in float32. y has x's dtype, which is W's. W is the
    model's own tensor: it is changed in place, never replaced, and keeps its dtype."""

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
            self.weight.copy_(self.weight.float() + self.scale * (self.b @ self.a))

    def unmerge_(self) -> None:
        """W is again what it was, bit for bit. Not merged: nothing happens."""
        if self.aside is not None:
            self.weight.copy_(self.aside)
            self.aside = None


def cases() -> Sequence[Case]:
    """Weights in float32 and bf16."""
    return [
        Case.of(1, torch.bfloat16, inputs=40, outputs=24, rank=4, alpha=6.0),
        Case.of(1, inputs=33, outputs=65, rank=3, alpha=1.0),
        Case.of(1, torch.bfloat16, inputs=16, outputs=16, rank=1, alpha=2.5),
    ]


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """W, A, B and rows."""
    i, o, r = case["inputs"], case["outputs"], case["rank"]
    w, x = case.random(o, i, key=1), case.random(ROWS, i, key=4)
    a, b = case.random(r, i, key=2, dtype=torch.float32), case.random(o, r, key=3, dtype=torch.float32)
    return [(w, a, b, case["alpha"], x)]


def play(attempt: Any, group: Any, weight: Tensor, a: Tensor, b: Tensor, alpha: float, x: Tensor) -> Any:
    """Beside, merged, merged once more, taken out, taken out once more, merged again."""
    before, layer, told = weight.clone(), attempt(weight, a, b, alpha), {}
    told["y, not merged"] = layer.forward(x).clone()
    layer.merge_()
    told["W, merged"], told["y, merged"] = weight.clone(), layer.forward(x).clone()
    layer.merge_()
    told["W, merge_ called again"], told["y, merge_ called again"] = weight.clone(), layer.forward(x).clone()
    layer.unmerge_()
    told["W has its old bits"] = bool(torch.equal(weight, before))
    layer.unmerge_()
    told["y, taken out"], told["W, taken out"] = layer.forward(x).clone(), weight.clone()
    layer.merge_()
    told["W, merged again"] = weight.clone()
    return told


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """Outer products, one after the other, in float64."""
    ((weight, a, b, alpha, x),) = given
    exact = weight.double()
    for row, column in zip(a.double(), b.double().T, strict=True):
        exact = exact + alpha / len(a) * torch.outer(column, row)
    merged, y = exact.to(case.dtype), (x.double() @ exact.T).to(case.dtype)
    told: dict[str, Any] = {f"W, {when}": merged for when in ("merged", "merge_ called again", "merged again")}
    told |= {f"y, {when}": y for when in ("not merged", "merged", "merge_ called again", "taken out")}
    return [{**told, "W, taken out": weight, "W has its old bits": True}]


PROBLEM = Problem(
    key="11.3",
    title="Merge, and take it out again",
    story="""
While you train, the correction stands beside the weight and costs two small products more. To serve the model, add it
to the weight: no cost at all is left. But which weight? The bf16 one that ten requests share; and after a rounded
sum no subtraction brings the old bits back. Merge twice by mistake, and nothing fails: the model is only a bit strange.
""",
    objectives=("the same y, merged or not", "a rounded sum cannot be undone by subtraction"),
    difficulty=2,
    importance=4,
    minutes=15,
    reference=MergingLoRA,
    cases=cases,
    inputs=inputs,
    play=play,
    answer=answer,
    changes=(0,),
    tolerance=(0.012, 0.012),
    hints=(
        "What must the layer remember so that it knows whether it is merged, and what W was before? One thing does "
        "both.",
        "B @ A is [O, I], in float32. `weight.copy_(wide)` rounds to the weight's dtype and keeps the tensor. Beside "
        "the weight: x.float() @ A.T @ B.T, then to x's dtype.",
        "merge_: if aside is None: aside = weight.clone(); weight.copy_(weight.float() + scale * ...).  unmerge_: if "
        "aside is not None: weight.copy_(aside); aside = None.  forward: merged? x @ W.T alone",
    ),
    mutants=(
        Mutant("merge_ called twice adds the correction twice", "values",
               (("        if self.aside is None:\n            self.aside = self.weight.clone()\n            "
                 "self.weight.copy_",
                 "        if self.aside is None:\n            self.aside = self.weight.clone()\n        "
                 "self.weight.copy_"),)),
        Mutant("merged, the correction counts twice: it is in the weight, and beside it", "values",
               (("y if self.aside is not None else y + ", "y + "),)),
        Mutant("it is taken out by subtraction, which does not bring the rounded bits back", "values",
               (("self.weight.copy_(self.aside)", "self.weight.copy_(self.weight.float() - self.scale * (self.b @ "
                                                  "self.a))"),)),
        Mutant("merging forgets the scale alpha / r", "values", (("self.weight.float() + self.scale * ",
               "self.weight.float() + "),)),
        Mutant("the scale alpha / r is forgotten everywhere", "values", (("alpha / len(a)", "1.0"),)),
        Mutant("the merged weight is a new tensor: the model still has the old one", "values",
               (("self.weight.copy_(self.weight.float() + self.scale * (self.b @ self.a))",
                 "self.weight = (self.weight.float() + self.scale * (self.b @ self.a)).to(self.weight.dtype)"),)),
        Mutant("unmerge_ forgets that it is unmerged: the correction is gone for good", "values",
               (("\n            self.aside = None", ""),)),
    ),
)  # fmt: skip
