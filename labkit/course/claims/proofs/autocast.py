"""Claims on mixed precision at work: what autocast changes, what it leaves, and how a loss scale behaves."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from labkit.course.claims.finding import Finding, Setting
from labkit.train.autocast import autocast_ops
from labkit.train.loss_scale import LossScale


def gradient_dtype(weights: torch.dtype, inside: bool) -> str:
    """The dtype of a weight's gradient, with backward called inside autocast or after it."""
    layer, x = nn.Linear(8, 8).to(weights), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = layer(x).float().square().mean()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert layer.weight.grad is not None
    return str(layer.weight.grad.dtype).removeprefix("torch.")


def c41() -> Finding:
    """Call backward inside autocast and outside, for weights in fp32 and in bf16, and read the gradients' dtypes."""
    fp32, bf16 = torch.float32, torch.bfloat16
    return Finding.of(
        [
            Setting("fp32 weights, backward inside", "bfloat16", gradient_dtype(fp32, inside=True), measured=True),
            Setting("bf16 weights, backward outside", "float32", gradient_dtype(bf16, inside=False), measured=True),
        ]
    )


def c45() -> Finding:
    """Take torch.amp.GradScaler and labkit's LossScale through the same 60 steps, some of which overflow."""
    grown = torch.amp.GradScaler("cpu")
    torch.manual_seed(0)
    sequence = [bool(value) for value in torch.rand(60) > 0.15]
    w = nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([w], lr=0.0), torch.amp.GradScaler("cpu", growth_interval=4)
    rule, by_torch, by_rule = LossScale(interval=4), [], []
    for finite in sequence:
        w.grad = None
        (scaler.scale(w.sum()) * (1.0 if finite else math.inf)).backward()
        scaler.step(optimizer)
        scaler.update()
        rule = rule.after(finite)
        by_torch.append(scaler.get_scale())
        by_rule.append(rule.scale)
    apart = sum(a != b for a, b in zip(by_torch, by_rule, strict=True))
    bad = sequence.index(False)
    before = by_torch[bad - 1] if bad else 2.0**16
    good = next(k for k, (a, b) in enumerate(zip(by_torch, by_torch[1:], strict=False)) if b > a)
    return Finding.of(
        [
            Setting("first scale", 2.0**16, grown.get_scale(), within=0, measured=True),
            Setting("scale after infinity, over the one before", 0.5, by_torch[bad] / before, within=0, measured=True),
            Setting("scale after N good steps", 2.0, by_torch[good + 1] / by_torch[good], within=0, measured=True),
            Setting("steps of 60 in which rule and torch differ", 0, apart, measured=True),
        ],
        interval=grown.get_growth_interval(),
    )


def several(x: Tensor, w: Tensor, wanted: Tensor) -> Tensor:
    """Ops from both of autocast's lists, one after the other."""
    y = nn.functional.linear(x, w)
    y.softmax(-1).exp().add(1).log()
    return nn.functional.cross_entropy(y, wanted)


def c99() -> Finding:
    """Record autocast to bf16 on a CPU, and read for each op in which format its kernels computed."""
    ops = autocast_ops(several, torch.randn(4, 8), torch.randn(8, 8), torch.arange(4))

    def at(op: str) -> str:
        return ops[op][0].computed[0]

    return Finding.of(
        [
            Setting("a linear, on a CPU", "bfloat16", at("linear"), measured=True),
            Setting("the loss, on a CPU", "float32", at("cross_entropy"), measured=True),
            Setting("softmax, on a CPU", "float32", at("softmax"), measured=True),
            Setting("exp, on a CPU", "float32", at("exp"), measured=True),
            Setting("log, on a CPU", "float32", at("log"), measured=True),
        ],
        premise="products and losses; softmax, exp and log are on the list of CUDA, and not on that of CPUs",
    )


def rescued(gradient: float, scale: float = 2.0**16) -> float:
    """A gradient that passed backward in fp16 with the loss multiplied by 2^16, and was divided again in fp32."""
    w = torch.ones((), dtype=torch.float16, requires_grad=True)
    (w.float() * gradient * scale).backward()
    assert w.grad is not None
    return float(w.grad.float()) / scale


def c98() -> Finding:
    """Send gradients of five sizes through fp16 with the factor, and compare what comes out."""
    sizes = {"1e-8, which fp16 alone would lose": 1e-8, "1e-4": 1e-4, "0.5": 0.5, "2": 2.0, "1e-13": 1e-13}
    return Finding.of(
        [Setting(f"a gradient of {name}", size, rescued(size), measured=True) for name, size in sizes.items()],
        premise="no gradient is beyond 1, where the scaled one is infinite, or below 4.5e-13, where it is zero",
        largest=65504 / 2**16,
        zero_up_to=2.0**-25 / 2**16,
    )
