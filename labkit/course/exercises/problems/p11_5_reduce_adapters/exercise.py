"""11.5: data parallelism with LoRA: only what trains is sent."""

from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends
from labkit.train.lora import LoRALinear

ROWS = 3


def reduce_adapter_grads(model: nn.Module, group: Group) -> None:
    """After backward: the gradients of all that trains become their mean over the ranks, in one flat all_reduce.

    Which parameters train is the same on all ranks. A parameter that trains, but that this rank's rows did not use, has
    no gradient (p.grad is None): it counts as zero, and has the mean like all others afterwards. Frozen parameters have
    no gradient before, and none after; nothing is sent for them."""
    params = [p for p in model.parameters() if p.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = group.all_reduce(torch.cat([g.flatten() for g in grads]), op="mean")
    for p, mean in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = mean.view_as(p)


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks; `skips` is how many ranks do not use the last adapter. With `whole`, the linear in front
    of it trains as it is, without an adapter."""
    return [
        Case.of(3, width=20, layers=4, rank=2, skips=1),
        Case.of(4, torch.float64, width=11, layers=3, rank=3, skips=0, whole=True),
        Case.of(2, width=15, layers=5, rank=1, skips=2),
        Case.of(1, width=9, layers=2, rank=2, skips=0),
    ]


def inputs(case: Case) -> Inputs:
    """Weights, A and B that all share, rows of each rank's own, True if the rank uses the last layer, and True if a
    linear trains as a whole."""
    d, r, n_layers = case["width"], case["rank"], case["layers"]
    weights = [case.random(d, d, key=i) / d**0.5 for i in range(n_layers)]
    factors = [(case.random(r, d, key=50 + i) / d**0.5, case.random(d, r, key=90 + i)) for i in range(n_layers)]
    return [
        (weights, factors, case.random(ROWS, d, key=200 + rank), rank >= case["skips"], "whole" in case.what)
        for rank in range(case.n_ranks)
    ]


def frozen(n_layers: int) -> str:
    """The name of the one factor that does not train: the A of the first adapter."""
    return f"{1 - n_layers % 2}.A"


def play(
    attempt: Any, group: Group, weights: list[Tensor], factors: list[tuple[Tensor, Tensor]], x: Tensor, all_used: bool,
    whole: bool,
) -> Any:  # fmt: skip
    """Run backward through linear layers, of which the last and every second before it have adapters, the first of
    them with a frozen A; then the attempt. Return the gradients by name."""
    model = nn.ModuleList()
    for i, (w, (a, b)) in enumerate(zip(weights, factors, strict=True)):
        linear = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype).requires_grad_(False)
        linear.weight.copy_(w)
        layer = LoRALinear(linear, len(a)) if (len(weights) - i) % 2 else linear
        if isinstance(layer, LoRALinear):
            layer.A.data.copy_(a)
            layer.B.data.copy_(b)
        model.append(layer)
    model.get_parameter(frozen(len(weights))).requires_grad_(False)
    if whole:
        model[-2].requires_grad_()
    y = x
    for module in model if all_used else list(model)[:-1]:
        y = torch.tanh(module(y))
    y = y.square().sum()
    if y.requires_grad:
        y.backward()
    attempt(model, group)
    return {name: p.grad for name, p in model.named_parameters()}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The gradients from autograd on merged weights, in one process, in float64."""
    weights, factors, _, _, whole = inputs[0]
    n_layers, leaves = len(weights), {}
    for i in range(n_layers):
        if (n_layers - i) % 2:
            leaves[f"{i}.A"], leaves[f"{i}.B"] = (factor.double().requires_grad_() for factor in factors[i])
    if whole:
        leaves[f"{n_layers - 2}.weight"] = weights[-2].double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for _, _, x, all_used, _ in inputs:
        y = x.double()
        for i in range(n_layers if all_used else n_layers - 1):
            w = leaves.get(f"{i}.weight", weights[i].double()) + (
                leaves[f"{i}.B"] @ leaves[f"{i}.A"] if f"{i}.A" in leaves else 0
            )
            y = torch.tanh(y @ w.T)
        total = total + y.square().sum() / case.n_ranks
    if total.requires_grad:
        total.backward()
    grads: dict[str, Any] = {}
    for i in range(n_layers):
        for factor in "AB" if f"{i}.A" in leaves else "":
            leaf = leaves[f"{i}.{factor}"]
            grads[f"{i}.{factor}"] = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).to(case.dtype)
        grads[f"{i}.linear.weight" if f"{i}.A" in leaves else f"{i}.weight"] = None
    grads[frozen(n_layers)] = None
    if whole:
        grads[f"{n_layers - 2}.weight"] = leaves[f"{n_layers - 2}.weight"].grad.to(case.dtype)
    return [grads] * case.n_ranks


def law(case: Case, rank: int) -> float:
    """Bytes that a rank sends: 2 (n-1)/n of what trains, adapters and perhaps a linear."""
    adapters = case["rank"] * case["width"] * (2 * ((case["layers"] + 1) // 2) - 1)
    n_bytes = (adapters + ("whole" in case.what) * case["width"] ** 2) * case.item_bytes
    return 0.0 if case.n_ranks == 1 else float(2 * (case.n_ranks - 1) * n_bytes // case.n_ranks)


PROBLEM = exercise(
    __name__,
    reduce_adapter_grads,
    laws=(
        sends(
            law,
            "each rank sends 2 (n-1)/n of the bytes that train, in one all_reduce",
            only=("all_reduce",),
            messages=lambda case, rank: 1,
        ),
    ),
)
