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

    unit   = max of the last 16 steps' max |x| / largest      "delayed" scaling: known before x is, one reading less

Weights and activations take e4m3: they want precision. Gradients take e5m2: they want range, for the largest may be a
million times the median. This is torchao's "tensorwise" recipe, and the "hybrid" one of NVIDIA's TransformerEngine.
TransformerEngine began with delayed scaling: max |x| is noted for later steps, and what exceeds the largest of those
that went before saturates. A step without a history has current units. (Units for blocks of a tensor: blocks.py.)

What it trades:

    error      an element is off by up to 1/16 (e4m3) or 1/8 (e5m2) of itself, against 1/256 in bf16. Errors of both
               signs cancel in sums; one outlier makes the unit coarse for all others of its tensor
    time       each product reads its operands twice more (for max |x|, and to cast) and writes 1 byte an element
    memory     not less: backward holds x and W in bf16, as the bf16 linear does, and casts them again. Holding 8-bit
               copies instead would add to what is held anyway: query, key and value share one x, and the weights are
               there. While a product runs, its two casts are there, too: 1 byte an element, 5 for a moment
    wire       sums over tp travel in bf16, and so do gathers of ZeRO-3 unless asked for in fp8 (eight_bit_weights.py)

Embeddings, head, norms and attention stay in bf16, masters and the optimizer in fp32; of a mixture of experts the
router stays wide, and all linears of routed and shared experts multiply 8-bit numbers, as in DeepSeek-V3. Ranks agree
on no unit: that of x is of a rank's own rows, and under tensor parallelism each part of a tensor has its own, which is
no coarser than that of the whole. What ZeRO-3 has gathered is whole, and has the unit of the whole. No product needs an
agreed unit, for each multiplies its own operands' units back in. Histories are agreed on all the same, as
TransformerEngine does unless told not to (reduce_amax): then a history is one of the run, not of a rank, however the
next run is laid out.
labkit.assemble takes the largest over dp and tp once a step, 12 bytes a linear; of experts that are dealt out over
those ranks that hold the same ones. What was not seen in a step, such as the rows of an expert to which no token went,
leaves its history as it was. Histories are not saved with a checkpoint.

On a GPU the product is one kernel; on a CPU `torch._scaled_mm` multiplies the very same codes in fp32, more slowly than
fp32 itself. Both are one call, so that a rehearsal counts what a GPU holds. NVIDIA's GPUs have 8-bit units since sm_89
(L4, RTX 40, H100). On an older one, such as a T4, a V100 or an A100, the codes are multiplied in fp32, as on a CPU: the
numbers are those of 8 bits, the speed and the memory are not (`emulated` says so). 8-bit units want sides that 16
divides; of the product over tokens, of which an expert may have any number, it gets rows of zeros besides, which change
no sum (they are bf16 copies of x and g that a rehearsal does not count). Sends nothing.

Sources: Micikevicius et al., arXiv:2209.05433, sections 3 and 4 (formats, scaling per tensor); torchao/float8 (recipe;
operands held in high precision); TransformerEngine's user guide, "FP8 Delayed Scaling" (history, clipping);
DeepSeek-V3, arXiv:2412.19437, section 3.3 (which parts of a model with experts stay wide).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from labkit.comm.private import private, scaled_product
from labkit.plan.contracts import InEightBits, Multiplies, StaysWide
from labkit.plan.laws.precisions import HISTORY
from labkit.train.blocks import InMX, InNVFP4, InTiles
from labkit.train.formats import E4M3, E5M2, Format

TINY = 2.0**-60
"""The smallest unit, for a tensor of zeros: the product of two is still a normal fp32 number."""
UNITS_SINCE = (8, 9)
"""The compute capability of the first GPUs whose units multiply 8-bit floating-point numbers."""
SIDES = 16
"""What an 8-bit unit of a GPU wants both sides of a matrix to be a multiple of."""
Multiply = Callable[..., Tensor]
"""(role, a, b, bias=None) -> a b^T + bias in a's dtype: "y" of x and W, "gx" of g and W^T, "gw" of g^T and x^T."""


def eight_bits(x: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """x as codes, and the unit of one code: x is about codes * unit.   [M, K] -> 8 bits [M, K] in rows, fp32 []

    NaN and infinity become NaN, so that they are seen."""
    unit = unit_of(peak_of(x), format)
    return encode(x, unit, format), unit


def peak_of(x: Tensor) -> Tensor:
    """The largest magnitude of x, 0 of a tensor without numbers.   fp32 []"""
    if not x.numel():
        return torch.zeros((), device=x.device)
    return torch.linalg.vector_norm(x, math.inf, dtype=torch.float32)


def unit_of(peak: Tensor, format: Format = E4M3) -> Tensor:
    """The unit of a tensor whose largest magnitude is `peak`, which becomes it.   fp32 []"""
    return peak.div_(format.largest).clamp_(min=TINY)


def encode(x: Tensor, unit: Tensor, format: Format = E4M3) -> Tensor:
    """The codes of x in multiples of `unit`, which is at least max |x| / largest.   [..] -> 8 bits [..]"""
    assert format.dtype is not None
    # in fp32 and not in bf16, which would round twice; no clamp: |x| / unit exceeds the largest by a rounding at most
    wide = x.to(torch.float32, copy=True).div_(unit)
    return wide.to(format.dtype, memory_format=torch.contiguous_format)


def product(a: Tensor, b: Tensor, kind: Format = E4M3, bias: Tensor | None = None) -> Tensor:
    """a b^T + bias, of 8-bit copies: a's of this kind, b's in e4m3; in a's dtype.   [M, K], [N, K] -> [M, N]

    ValueError on a GPU with 8-bit units for sides that 16 does not divide."""
    _check_sides(a, b)
    return of_codes(*eight_bits(a, kind), *eight_bits(b, E4M3), bias, a.dtype)


def of_codes(
    left: Tensor, left_unit: Tensor, right: Tensor, right_unit: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(left right^T) left_unit right_unit + bias, added up in fp32.   8 bits [M, K], [N, K] -> [M, N] in dtype"""
    multiply = scaled_product if emulated(left.device) else private("torch._scaled_mm")
    return multiply(left, right.t(), left_unit, right_unit, bias, out_dtype=dtype)


def emulated(device: torch.device) -> str:
    """A sentence for a GPU that has no 8-bit units; "" for one that has, and for a CPU."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) >= UNITS_SINCE:
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return (
        f"{torch.cuda.get_device_name(device)} (sm_{major}{minor}) has no 8-bit units: fp8 rounds as it should and "
        "multiplies in fp32, slower than bf16"
    )


def _check_sides(a: Tensor, b: Tensor) -> None:
    if a.is_cuda and (a.shape[1] % SIDES or b.shape[0] % SIDES) and not emulated(a.device):
        raise ValueError(
            f"8-bit products of a GPU want sides that {SIDES} divides, got [{a.shape[0]}, {a.shape[1]}] x "
            f"[{a.shape[1]}, {b.shape[0]}]: choose widths (over tp) so, or precision='bf16'"
        )


def in_sixteens(x: Tensor) -> Tensor:
    """x with rows of zeros behind it, so that 16 divides their number; x itself if it does.   [M, K] -> [M + .., K]"""
    return F.pad(x, (0, 0, 0, -len(x) % SIDES)) if len(x) % SIDES else x


def current(role: str, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Products with the units of the tensors at hand; gradients in e5m2 (a `Multiply`)."""
    return product(a, b, E4M3 if role == "y" else E5M2, bias)


class Delayed:
    """Products of one linear whose units come from the steps before (a `Multiply`).

    seen       [3] the largest |x|, |W| and |g| since the step began
    history    [3, 16] those of earlier steps, newest first; zeros before there were any"""

    def __init__(self, device: torch.device) -> None:
        """Nothing is known yet."""
        self.seen = torch.zeros(3, device=device)
        self.history = torch.zeros(3, HISTORY, device=device)

    def __call__(self, role: str, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """a b^T + bias.   [M, K], [N, K], [N] -> [M, N] in a's dtype"""
        _check_sides(a, b)
        first, second = {"y": (0, 1), "gx": (2, 1), "gw": (2, 0)}[role]
        return of_codes(*self._cast(a, first), *self._cast(b, second), bias, a.dtype)

    def _cast(self, x: Tensor, which: int) -> tuple[Tensor, Tensor]:
        format = E5M2 if which == 2 else E4M3
        assert format.dtype is not None
        peak = peak_of(x)
        self.seen[which] = torch.maximum(self.seen[which], peak)
        known = self.history[which].amax()
        unit = unit_of(torch.where(known > 0, known, peak), format)
        unit = torch.where(peak.isfinite(), unit, math.nan)  # saturation would hide an infinity
        wide = x.to(torch.float32, copy=True).div_(unit).clamp_(-format.largest, format.largest)
        return wide.to(format.dtype, memory_format=torch.contiguous_format), unit

    def turn(self, seen: Tensor) -> None:
        """The step is over: `seen` [3], of this rank or the largest of several, becomes the newest of the history.

        0 means that nothing came, and takes nobody's place: otherwise an expert that gets no rows for 16 steps would
        forget how large they are."""
        newer = torch.cat([seen[:, None], self.history[:, :-1]], 1)
        self.history = torch.where(seen[:, None] > 0, newer, self.history)
        self.seen = torch.zeros_like(self.seen)


SCALINGS: MappingProxyType[str, Callable[[int, torch.device], Multiply]] = MappingProxyType(
    {
        "tensor": lambda seed, device: current,
        "delayed": lambda seed, device: Delayed(device),
        "tiles": lambda seed, device: InTiles(),
        "mx": lambda seed, device: InMX(),
        "nvfp4": InNVFP4,
    }
)
"""By name: makes the products of one linear, of a seed for what is drawn at random and the device of its weight."""


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, multiply: Multiply) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.multiply = multiply
        return multiply("y", x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, rows = grad.flatten(0, -2), x.flatten(0, -2)
        sums, terms = (in_sixteens(grad), in_sixteens(rows)) if grad.is_cuda else (grad, rows)
        # transposed views: a GPU multiplies rows by rows, so the cast writes the rows of the transpose
        gx = ctx.multiply("gx", grad, weight.t()).view(x.shape) if ctx.needs_input_grad[0] else None
        gw = ctx.multiply("gw", sums.t(), terms.t()) if ctx.needs_input_grad[1] else None
        return gx, gw, grad.sum(0) if ctx.needs_input_grad[2] else None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, multiply: Multiply = current) -> Tensor:
    """F.linear on 8-bit operands, forward and backward.   [.., I], [O, I], [O] -> [.., O]"""
    return _Linear.apply(x, weight, bias, multiply)


def in_fp8_(module: nn.Module, scaling: str = "tensor", seed: int = 0) -> None:
    """Let every linear inside a module multiply 8-bit numbers; parameters, names, hooks and what is sent stay.
    One that says `stays_wide`, such as the router of a mixture of experts, is left as it is.

    `scaling` is one of SCALINGS; each linear keeps its products as `multiply`. Linears that are cut over
    tensor-parallel ranks have a `product` to set; plain ones get another forward. Move the module to its device before.
    ValueError for a scaling that is not known."""
    if scaling not in SCALINGS:
        raise ValueError(f"a scaling is one of {', '.join(SCALINGS)}, got {scaling!r}")
    draw = random.Random(seed)
    for part in module.modules():
        if isinstance(part, nn.Linear | Multiplies) and not isinstance(part, StaysWide):
            multiply = SCALINGS[scaling](draw.getrandbits(62), part.weight.device)  # type: ignore[arg-type]
            part.multiply = multiply  # type: ignore[assignment]
            if isinstance(part, nn.Linear):
                part.forward = partial(_forward, part)  # type: ignore[method-assign]
            else:
                part.product = partial(linear, multiply=multiply)  # type: ignore[assignment]


def in_8_bits(module: nn.Module) -> list[nn.Module]:
    """The linears of a module that `in_fp8_` has changed, in order."""
    return [part for part in module.modules() if isinstance(part, InEightBits)]


def weights_in_8_bits(module: nn.Module) -> int:
    """The number of weights of all linears in 8 bits inside a module, biases not counted."""
    return sum(part.get_parameter("weight").numel() for part in in_8_bits(module))


def delayed_in(modules: Iterable[nn.Module]) -> list[Delayed]:
    """The products with delayed scaling in some modules, in order."""
    products = [part.multiply for module in modules for part in in_8_bits(module)]
    return [product for product in products if isinstance(product, Delayed)]


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias, layer.multiply)  # type: ignore[arg-type]
