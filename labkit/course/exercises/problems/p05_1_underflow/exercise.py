"""05.1: which gradients fp16 loses, before a loss scale and after."""

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise

EDGES = (2.0**-25, 1.001 * 2.0**-25, 2.0**-24, 1.499 * 2.0**-24, 2.0**-14, 2.0**-14 * (1 - 2.0**-13), -(2.0**-20), 1.0)
"""Where the fate of a number changes: the largest that becomes zero, the smallest normal."""
VANISHING = 2.0**-145
"""A scale with which most products are zero in float32 already."""


def underflow_shares(grads: Mapping[str, Tensor], scale: float) -> dict[str, list[float]]:
    """The shares of float32 gradients, multiplied by `scale`, that become zero and subnormal in fp16:
    {name: [share of zeros, share of subnormals]}.

    Both are shares (0 to 1) of the numbers of that gradient that are not zero in float32; [0.0, 0.0] if all are.
    A number becomes zero if fp16 holds 0 for it, and subnormal if fp16 holds something else whose size is below
    `torch.finfo(torch.float16).smallest_normal`. The product is taken in float32. The gradients stay as they are."""
    shares = {}
    for name, grad in grads.items():
        true = grad[grad != 0]
        held = (true * scale).half().abs()
        zero = held == 0
        subnormal = (held < torch.finfo(torch.float16).smallest_normal) & ~zero
        n = max(1, true.numel())
        shares[name] = [zero.sum().item() / n, subnormal.sum().item() / n]
    return shares


def cases() -> list[Case]:
    """Gradients of several sizes, each with a scale."""
    return [
        Case.of(1, sizes=((30, 7), (211,), (5, 4), (40,)), log2_scale=10),
        Case.of(1, sizes=((3, 3), (97,), (1,), (64,)), log2_scale=16),
        Case.of(1, sizes=((12, 31), (8,), (2, 2, 9)), log2_scale=4),
    ]


def inputs(case: Case) -> Inputs:
    """Gradients spread over 24 powers of two, with some numbers of EDGES and some zeros; one gradient is all zeros."""
    draw = random.Random(case.seed)
    grads = {}
    for i, shape in enumerate(case["sizes"]):
        grad = case.random(*shape, key=i) * 2.0 ** (24 * case.random(*shape, key=50 + i).sigmoid() - 36 + 2 * i)
        flat = grad.view(-1)
        for edge in draw.sample(EDGES, min(len(EDGES), flat.numel() // 5)):
            flat[draw.randrange(flat.numel())] = edge / draw.choice((1.0, 2.0 ** case["log2_scale"]))
        flat[:: draw.randrange(3, 7)] = 0.0
        grads[f"block.{i}.weight"] = grad
    grads["unused.bias"] = torch.zeros(6)
    return [(grads, 2.0 ** case["log2_scale"])]


def play(attempt: Any, _: Group, grads: Mapping[str, Tensor], scale: float) -> Any:
    """The shares of the gradients as they are, of the scaled ones, and of some so small that float32 has none."""
    return {"before": attempt(grads, 1.0), "after": attempt(grads, scale), "vanishing": attempt(grads, VANISHING)}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The shares from the thresholds, in float64: zero up to half of 2^-24, normal from half a step below 2^-14."""
    grads, scale = inputs[0]

    def fates(grad: Tensor, by: float) -> list[float]:
        sizes = [abs(x) * by for x in grad.double().flatten().tolist() if x]
        zero = sum(x <= 2.0**-25 for x in sizes)
        low = sum(2.0**-25 < x < 2.0**-14 - 2.0**-25 for x in sizes)
        return [zero / max(1, len(sizes)), low / max(1, len(sizes))]

    scales = {"before": 1.0, "after": scale, "vanishing": VANISHING}
    return [{when: {name: fates(g, by) for name, g in grads.items()} for when, by in scales.items()}]


PROBLEM = exercise(__name__, underflow_shares)
