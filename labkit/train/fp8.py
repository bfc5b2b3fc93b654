"""FP8 training: a block's linears multiply 8-bit numbers; all that is kept is as in bf16.

What it replaces: the three products of a linear, forward y = x W^T, backward gx = g W and gW = g^T x. On an H100 8-bit
units multiply twice as fast as those of bf16.

    x  bf16 --> e4m3 \\                     g  bf16 --> e5m2 \\
                      (x)--> y  bf16                          (x)--> gx, gW  bf16
    W  bf16 --> e4m3 /                W, x  bf16 --> e4m3    /

How it works: 8 bits hold few numbers, e4m3 from 2^-9 to 448 with 3 bits of mantissa, e5m2 from 2^-16 to 57,344 with 2.
A tensor of gradients around 1e-6 would be all zeros. So each operand is divided by a unit of its own, such that its
largest magnitude becomes the format's largest (scale = 1 / unit):

    unit   = max |x| / largest of the format           fp32, anew for each product ("current" scaling, per tensor)
    codes  = x / unit, rounded to 8 bits               nothing overflows; what lies below half the smallest becomes 0
    y      = (codes_x codes_w^T) unit_x unit_w         products exact, added up in fp32, rounded to bf16 once

Weights and activations take e4m3: they want precision. Gradients take e5m2: they want range, for the largest may be a
million times the median. This is torchao's "tensorwise" recipe, and the "hybrid" one of NVIDIA's TransformerEngine.

What it trades:

    error      an element is off by up to 1/16 (e4m3) or 1/8 (e5m2) of itself, against 1/256 in bf16. Errors of both
               signs cancel in sums; one outlier makes the unit coarse for all others of its tensor (DeepSeek-V3 has a
               unit for each tile of 128 numbers, so that it spoils its tile only; labkit has not)
    time       each product reads its operands twice more (for max |x|, and to cast) and writes 1 byte an element
    memory     not less: backward holds x and W in bf16, as the bf16 linear does, and casts them again. Holding 8-bit
               copies instead would add to what is held anyway: query, key and value share one x, and the weights are
               there. While a product runs, its two casts are there, too: 1 byte an element, 5 for a moment
    wire       nothing less: gathers of ZeRO-3 and sums over tp travel in bf16

Embeddings, head, norms and attention stay in bf16, masters and the optimizer in fp32. Ranks agree on no unit: that of x
is of a rank's own rows, and under tensor parallelism each part of a tensor has its own, which is no coarser than that
of the whole. What ZeRO-3 has gathered is whole, and has the unit of the whole.

On a GPU the product is one kernel; on a CPU `torch._scaled_mm` multiplies the very same codes in fp32, more slowly than
fp32 itself. Both are one call, so that a rehearsal counts what a GPU holds. Sends nothing.

Sources: Micikevicius et al., arXiv:2209.05433, sections 3 and 4 (formats, scaling per tensor); torchao/float8 (recipe;
operands held in high precision); DeepSeek-V3, arXiv:2412.19437, section 3.3 (tiles).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from labkit.train.formats import E4M3, E5M2, Format

TINY = 2.0**-60
"""The smallest unit, for a tensor of zeros: the product of two is still a normal fp32 number."""
SIDES = 16
"""What an 8-bit unit of a GPU wants both sides of a matrix to be a multiple of."""


def eight_bits(x: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """x as codes, and the unit of one code: x is about codes * unit.   [M, K] -> 8 bits [M, K] in rows, fp32 []

    NaN and infinity become NaN, so that they are seen."""
    assert format.dtype is not None
    unit = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32).div_(format.largest).clamp_(min=TINY)
    # in fp32 and not in bf16, which would round twice; no clamp: |x| / unit exceeds the largest by a rounding at most
    wide = x.to(torch.float32, copy=True).div_(unit)
    return wide.to(format.dtype, memory_format=torch.contiguous_format), unit


def product(a: Tensor, b: Tensor, kind: Format = E4M3, bias: Tensor | None = None) -> Tensor:
    """a b^T + bias, of 8-bit copies: a's of this kind, b's in e4m3; in a's dtype.   [M, K], [N, K] -> [M, N]

    ValueError on a GPU for sides that 16 does not divide."""
    if a.is_cuda and (a.shape[1] % SIDES or b.shape[0] % SIDES):
        raise ValueError(
            f"8-bit products of a GPU want sides that {SIDES} divides, got [{a.shape[0]}, {a.shape[1]}] x "
            f"[{a.shape[1]}, {b.shape[0]}]: choose widths (over tp) and tokens of a micro-batch so, or precision='bf16'"
        )
    (left, left_unit), (right, right_unit) = eight_bits(a, kind), eight_bits(b, E4M3)
    return torch._scaled_mm(left, right.t(), left_unit, right_unit, bias, out_dtype=a.dtype)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.flatten(0, -2), weight, bias=bias).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, rows = grad.flatten(0, -2), x.flatten(0, -2)
        # transposed views: a GPU multiplies rows by rows, so the cast writes the rows of the transpose
        gx = product(grad, weight.t(), E5M2).view(x.shape) if ctx.needs_input_grad[0] else None
        gw = product(grad.t(), rows.t(), E5M2) if ctx.needs_input_grad[1] else None
        return gx, gw, grad.sum(0) if ctx.needs_input_grad[2] else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear on 8-bit operands, forward and backward.   [.., I], [O, I], [O] -> [.., O]"""
    return _Linear.apply(x, weight, bias)


def in_fp8_(module: nn.Module) -> None:
    """Let every linear inside a module multiply 8-bit numbers; parameters, names, hooks and what is sent stay.

    Those that are cut over tensor-parallel ranks have a `product` to set; plain ones get another forward."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.forward = partial(_forward, part)  # type: ignore[method-assign]
        elif hasattr(part, "product"):
            part.product = linear  # type: ignore[assignment]


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)
