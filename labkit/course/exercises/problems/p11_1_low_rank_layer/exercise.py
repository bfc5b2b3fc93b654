"""11.1: a frozen linear layer and a correction of low rank beside it."""

from typing import Any

import torch
from torch import Tensor, nn

from labkit.course.exercises.exercise import Answers, Case, Complaint, Inputs, Law, exercise, hidden
from labkit.course.judge.run_record import RunRecord

ROWS = 4


class LowRankLinear(nn.Module):
    """y = W x + b + (alpha / r) B A x, of which only A and B train.   [rows, I] -> [rows, O]

    A [r, I] starts random, in each layer anew, B [O, r] starts at zero, so that the layer begins as the linear that it
    is given. A and B are parameters in the linear's dtype; W and b are frozen. B A, a matrix as large as W, is never
    made."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float):
        """linear: W [O, I] and b [O] or no b; rank: r; alpha: any number."""
        super().__init__()
        self.linear, self.scale = linear.requires_grad_(False), alpha / rank
        like = linear.weight
        a = torch.randn(rank, linear.in_features, dtype=like.dtype, device=like.device)
        self.A = nn.Parameter(a / linear.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(linear.out_features, rank, dtype=like.dtype, device=like.device))

    def forward(self, x: Tensor) -> Tensor:
        """The frozen linear and the correction."""
        return self.linear(x) + self.scale * (x @ self.A.T @ self.B.T)


def cases() -> list[Case]:
    """With and without a bias, wide and narrow."""
    return [
        Case.of(1, inputs=300, outputs=200, rank=4, alpha=10.0, bias=True),
        Case.of(1, torch.float64, inputs=130, outputs=210, rank=7, alpha=7.0, bias=False),
        Case.of(1, inputs=256, outputs=256, rank=1, alpha=0.5, bias=True),
    ]


def inputs(case: Case) -> Inputs:
    """A linear layer, a batch, values for A and B, and a gradient of the output."""
    i, o, r = case["inputs"], case["outputs"], case["rank"]
    linear = nn.Linear(i, o, bias=case["bias"], dtype=case.dtype)
    for place, p in enumerate(linear.parameters()):
        p.data.copy_(case.random(*p.shape, key=place) / i**0.5)
    drawn = [case.random(*shape, key=10 + k) for k, shape in enumerate(((ROWS, i), (r, i), (o, r), (ROWS, o)))]
    return [(linear, r, case["alpha"], *drawn)]


def play(
    attempt: Any, group: Any, linear: nn.Linear, rank: int, alpha: float, x: Tensor, a: Tensor, b: Tensor, grad: Tensor
) -> Any:
    """Run the layer as it begins, then forward and backward with the given A and B, of a batch that comes from layers
    before it."""
    layer = attempt(linear, rank, alpha)
    first, varied = layer(x), bool((layer.A != 0).all()) and bool(layer.A.flatten().std() > 0)
    alike = torch.equal(layer.A, attempt(linear, rank, alpha).A)
    with torch.no_grad():
        layer.A.copy_(a)
        layer.B.copy_(b)
    before = x.clone().requires_grad_()
    y = layer(before)
    (y * grad).sum().backward()
    return {
        "y at the start": first,
        "A is random": varied,
        "A of two layers is alike": alike,
        "trains": sorted(name for name, p in layer.named_parameters() if p.requires_grad),
        "y": y,
        "gradient of x": before.grad,
        "gradient of A": layer.A.grad,
        "gradient of B": layer.B.grad,
    }


def answer(case: Case, inputs: Inputs) -> Answers:
    """The results from the corrected weight as one matrix and autograd, in float64."""
    ((linear, rank, alpha, x, a, b, grad),) = inputs
    w, b64, a64 = linear.weight.detach().double(), b.double().requires_grad_(), a.double().requires_grad_()
    bias = linear.bias.detach().double() if linear.bias is not None else torch.zeros(len(w), dtype=torch.float64)
    x64 = x.double().requires_grad_()
    y = x64 @ (w + alpha * (b64 @ a64) / rank).T + bias
    (y * grad.double()).sum().backward()
    first = x.double() @ w.T + bias
    results = {"y at the start": first, "y": y, "gradient of A": a64.grad, "gradient of B": b64.grad}
    results["gradient of x"] = x64.grad
    return [{**{name: tensor.detach().to(case.dtype) for name, tensor in results.items() if tensor is not None},
             "A is random": True, "A of two layers is alike": False, "trains": ["A", "B"]}]  # fmt: skip


def thin(record: RunRecord) -> Complaint | None:
    """A Complaint if more than three quarters of a matrix of O x I is held beside the parameters."""
    memory, case = record.memory[0], record.case
    limit = 0.75 * case["inputs"] * case["outputs"] * case.item_bytes
    if memory is not None:
        held = memory.peak_bytes - memory.peak.get("parameters", 0)
        if held > limit:
            return Complaint(f"at most {limit:,.0f} bytes beside the parameters", f"{held:,} at the peak", 0)
    return hidden(record, lambda case, rank: limit)


PROBLEM = exercise(
    __name__,
    LowRankLinear,
    changes=(0,),
    laws=(Law("memory", "beside the parameters there is never a matrix of O x I", thin),),
)
