"""11.4: what a step with LoRA holds, by arithmetic."""

import random
from typing import Any

import torch
from torch import nn

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_alone, exercise
from labkit.train.lora import LoRALinear


def lora_bytes(
    linears: list[tuple[str, int, int]], other: int, targets: list[str], rank: int, frozen_bytes: int
) -> dict[str, float]:
    """Bytes of a model with LoRA under AdamW, by kind, and the share of its numbers that train.

    linears   (name, inputs I, outputs O) of each linear: I O weights and O biases. Those whose whole name is in
              `targets` get an adapter, A [rank, I] and B [O, rank]
    other     numbers in embeddings and norms
    Frozen numbers are kept in `frozen_bytes` each (2 for bf16). What trains is float32: weight, gradient, two moments.
    "weights"         frozen numbers and adapters
    "gradients", "optimizer"
    "share"           adapter numbers, over the numbers of the model without adapters"""
    model = other + sum(i * o + o for _, i, o in linears)
    adapters = sum(rank * (i + o) for name, i, o in linears if name in targets)
    return {
        "weights": frozen_bytes * model + 4 * adapters,
        "gradients": 4 * adapters,
        "optimizer": 8 * adapters,
        "share": adapters / model,
    }


def cases() -> list[Case]:
    """Sizes of real and of odd models."""
    return [
        Case.of(1, blocks=3, width=24, targets=["query", "value"], rank=3, frozen_bytes=2),
        Case.of(1, blocks=2, width=17, targets=["up", "down"], rank=1, frozen_bytes=4),
        Case.of(
            1, blocks=12, width=768, targets=["query", "key", "value", "out", "up", "down"], rank=16, frozen_bytes=2
        ),
        Case.of(1, blocks=2, width=40, targets=["head"], rank=4, frozen_bytes=1),
    ]


def inputs(case: Case) -> Inputs:
    """The layers of a model like a transformer, with sizes that are not all multiples of each other. Some names contain
    others, or end in them behind a dot, so that a target must be compared whole."""
    draw, d = random.Random(case.seed), case["width"]
    linears = []
    for _ in range(case["blocks"]):
        k, hidden = d - draw.randrange(d // 2), 4 * d - draw.randrange(d)
        linears += [
            ("query", d, d),
            ("key", d, k),
            ("value", d, k),
            ("out", d, d),
            ("up", d, hidden),
            ("gate_up", d, hidden),
            ("encoder.value", d, k),
            ("encoder.down", hidden, d),
            ("down", hidden, d),
        ]
    heads = [("head", d, draw.randrange(90, 300)), ("value_head", d, draw.randrange(1, 9))]
    return [([*linears, *heads], draw.randrange(100, 10_000),
             list(case["targets"]), case["rank"], case["frozen_bytes"])]  # fmt: skip


def play(attempt: Any, group: Any, *args: Any) -> Any:
    """The attempt's bytes and share as floats."""
    reply = call_alone(attempt, group, *args)
    return {name: float(value) for name, value in reply.items()}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The bytes from counting the parameters of the layers, built on the meta device."""
    ((linears, other, targets, rank, frozen_bytes),) = inputs
    with torch.device("meta"):
        plain = [nn.Linear(i, o) for _, i, o in linears]
        whole = other + sum(p.numel() for linear in plain for p in linear.parameters())
        layers = [LoRALinear(linear, rank) if name in targets else linear.requires_grad_(False)
                  for linear, (name, _, _) in zip(plain, linears, strict=True)]  # fmt: skip
        trains = sum(p.numel() for layer in layers for p in layer.parameters() if p.requires_grad)
        stays = other + sum(p.numel() for layer in layers for p in layer.parameters() if not p.requires_grad)
    return [{"weights": float(frozen_bytes * stays + 4 * trains), "gradients": 4.0 * trains, "optimizer": 8.0 * trains,
             "share": trains / whole}]  # fmt: skip


PROBLEM = exercise(__name__, lora_bytes, tolerance=(1e-9, 1e-12))
