"""11.2: find the linear layers that are to have an adapter, and put an adapter in the place of each."""

import random
from typing import Any

import torch
from torch import Tensor, nn

from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise
from labkit.train.lora import LoRALinear

SIZES = (6, 8, 10)
KINDS = ("query", "key", "value", "value_head", "up", "down", "norm")


def inject_adapters(model: nn.Module, targets: list[str], rank: int, alpha: float) -> int:
    """Freeze `model`, and put LoRALinear(linear, rank, alpha) in the place of each nn.Linear whose own name is one of
    `targets`. Returns how many there are.

    A linear's own name is the last part of its path: "value" for blocks.3.attention.value. It may lie at any depth, in
    any kind of module. What is no nn.Linear stays, whatever its name. In the end only the A and B of the new layers
    train. `parent.register_module(name, layer)` puts a layer where another one was, in lists as well."""
    model.requires_grad_(False)
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name in targets and isinstance(child, nn.Linear)
    ]
    for parent, name, linear in places:
        parent.register_module(name, LoRALinear(linear, rank, alpha))
    return len(places)


def cases() -> list[Case]:
    """Trees of some depth; the first has a linear of a target's name directly in the model."""
    return [
        Case.of(1, targets=["query", "value"], depth=3, rank=2, alpha=6.0),
        Case.of(1, targets=["0", "2", "linear"], depth=2, rank=1, alpha=1.0),
        Case.of(1, targets=["up", "down", "norm"], depth=4, rank=3, alpha=2.0),
    ]


def tree(draw: random.Random, depth: int) -> nn.Module:
    """Linears of various names, one of which ends as a target does, a norm that is no linear, a list, and smaller
    trees."""
    size = draw.choice(SIZES)
    parts: dict[str, nn.Module] = {
        name: nn.LayerNorm(size) if name == "norm" and draw.random() < 0.5 else nn.Linear(size, draw.choice(SIZES))
        for name in draw.sample(KINDS, draw.randint(4, 6))
    }
    parts["mlp"] = nn.Sequential(nn.Linear(size, 8), nn.GELU(), nn.Linear(8, size, bias=False))
    parts["linear"] = nn.Linear(size, size)
    parts["key_value"] = nn.Linear(size, 8)
    if depth:
        parts["blocks"] = nn.ModuleList(tree(draw, depth - 1) for _ in range(draw.randint(1, 2)))
        parts["value"] = nn.ModuleDict({"value": nn.Linear(size, size), "query": nn.Linear(size, 8)})
    return nn.ModuleDict(parts)


def inputs(case: Case) -> Inputs:
    """A model and the arguments of the injection."""
    draw = random.Random(case.seed)
    with torch.random.fork_rng(devices=()):  # weights, too, are drawn from the seed of the case
        torch.manual_seed(case.seed)
        ends = {"query": nn.Linear(6, 8), "value_head": nn.Linear(8, 6), "up": nn.Linear(8, 6)}
        model = nn.ModuleDict({**ends, "body": tree(draw, case["depth"])})
    return [(model, list(case["targets"]), case["rank"], case["alpha"])]


def play(attempt: Any, group: Any, model: nn.Module, targets: list[str], rank: int, alpha: float) -> Any:
    """The number that the attempt returns, and the model's adapters and parameters afterwards."""
    weights: dict[str, Tensor] = {name: p.detach().clone() for name, p in model.named_parameters()}
    count = attempt(model, targets, rank, alpha)
    adapters = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    now = {
        name.replace(".linear.", "."): p
        for name, p in model.named_parameters()
        if name.rpartition(".")[0] not in adapters
    }
    same = all(any(torch.equal(w, p) for p in now.values() if p.shape == w.shape) for w in weights.values())
    return {
        "count": count,
        "adapters": {name: [adapter.rank, adapter.alpha] for name, adapter in sorted(adapters.items())},
        "trains": sorted(name for name, p in model.named_parameters() if p.requires_grad),
        "weights are all there": same,
    }


def answer(case: Case, inputs: Inputs) -> Answers:
    """The adapters from names alone: those of the weights of linear layers, by their last part."""
    model, targets, rank, alpha = inputs[0]
    weights = [
        name.rpartition(".")[0] for name, p in model.named_parameters() if name.endswith("weight") and p.dim() == 2
    ]
    chosen = sorted(name for name in weights if name.split(".")[-1] in targets)
    trains = sorted(f"{name}.{factor}" for name in chosen for factor in "AB")
    return [{"count": len(chosen), "adapters": {name: [rank, alpha] for name in chosen}, "trains": trains,
             "weights are all there": True}]  # fmt: skip


PROBLEM = exercise(__name__, inject_adapters, imports=("LoRALinear",), changes=(0,))
