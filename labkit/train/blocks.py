"""Quantization by blocks: each block of a matrix has a scale of its own, so that an outlier spoils its block only.

    tensor       |a a a a a a a a A|          one unit: beside A = 1000 a, all others are coarse   (labkit.train.fp8)
    in blocks    |a a a|a a a|a a A|          three units: six numbers are as fine as they can be

             numbers   a block                     unit of a block                    bits a number, units included
    tiles    e4m3      1 x 128, weights 128 x 128  fp32: largest / 448                8 + 32/128, weights 8 + 32/128^2
    mx       e4m3      1 x 32                      e8m0: a power of two               8 + 8/32
    nvfp4    e2m1      1 x 16, weights 16 x 16     e4m3, times one fp32 of the tensor 4 + 8/16, weights 4 + 8/16^2

Blocks lie along K, the dim that a product sums over, so that a unit can be multiplied in after a partial sum. The three
products of a linear sum over three dims (inputs, outputs, tokens): each operand is quantized twice, along either of its
dims. Square blocks are the same both ways: W in forward and W^T in backward have the same codes.

    tiles    `y += (codes_a[:, k] codes_b[:, k]^T) units_a[:, k] units_b[:, k]^T` for each run k of 128: sums of codes
             travel from the matrix unit to fp32 registers every 128 terms, where the units are multiplied in
    mx       the unit is 2^(floor(log2(largest)) - 8), where 8 is e4m3's top exponent. What exceeds 448 then (up to 512)
             saturates. All three products in e4m3: a block of 32 gradients has not the range of a whole tensor of them
    nvfp4    unit of the tensor: largest / (6 x 448), so that every block's unit fits e4m3; unit of a block: its largest
             / 6, over that of the tensor, rounded to e4m3

With 4 bits rounding to nearest is biased: gradients below a quarter of their block's unit are always 0. Gradients are
rounded **stochastically**, up with the probability of what is cut off, so that their mean is kept, and the product over
tokens sees a **Hadamard transform** of both operands, which spreads an outlier over 16 numbers. Signs are drawn at
random once, H has orthonormal rows, and so (g H)(x H)^T = g x^T.

What this is: an emulation, bit for bit in the codes and the units, with plain tensor operations and sums in fp32. It is
slower than bf16 everywhere, and shows what the numbers become, not how long a GPU would take. What stays in bf16:
embeddings, head, norms, attention, biases, and what flows between layers; masters and the optimizer in fp32. NVIDIA
also keeps about one linear in seven in bf16 with nvfp4, mostly in the last blocks; here all linears of a block take
part. Sends nothing; ranks agree on nothing: a unit belongs to a block of a rank's own part of a matrix.

Sources: DeepSeek-V3, arXiv:2412.19437, section 3.3 (tiles, e4m3 everywhere, sums every 128 terms); OCP Microscaling
Formats (MX) Specification v1.0, section 6.3 (conversion); NVIDIA, arXiv:2506.08027 (mx in e4m3) and arXiv:2509.25149
(nvfp4: two levels of units, square blocks of weights, rounding, transform).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.train.formats import E2M1, E4M3

TILE, MX_BLOCK, FP4_BLOCK = 128, 32, 16
SMALLEST = 2.0**-126
"""The smallest largest number: blocks of zeros have a unit, too."""


class Quantized(NamedTuple):
    """A matrix in blocks: x is about codes * unit of the block * unit of the tensor.

    codes   [M, K] in 8 bits, or in fp32 that holds e2m1 numbers;   units [M / rows, K / columns], rounded up
    whole   the unit of the tensor: fp32 [], None for 1;            rows, columns: the sides of a block"""

    codes: Tensor
    units: Tensor
    rows: int
    columns: int
    whole: Tensor | None = None

    @property
    def spread(self) -> Tensor:
        """The unit of each number, without that of the tensor.   fp32 [M, K]"""
        return spread(self.units.float(), self.rows, self.columns, self.codes.shape)

    def dequantized(self) -> Tensor:
        """What the codes stand for, in fp32 [M, K]: exact for mx, rounded once for each unit that is no power of 2."""
        values = self.codes.float() * self.spread
        return values if self.whole is None else values * self.whole


def spread(units: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    """Each unit in all places of its block.   [M / rows, K / columns] -> [M, K]"""
    tall, wide = units.shape
    places = units[:, None, :, None].expand(tall, rows, wide, columns).reshape(tall * rows, wide * columns)
    return places[: shape[0], : shape[1]]


def largest(x: Tensor, rows: int, columns: int) -> Tensor:
    """The largest magnitude of each block; blocks at the edges may be smaller.   [M, K] -> [M / rows, K / columns]"""
    m, k = x.shape
    if m % rows or k % columns:
        x = F.pad(x, (0, -k % columns, 0, -m % rows))
    return torch.linalg.vector_norm(x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)), float("inf"), dim=(1, 3))


def tiles(x: Tensor, rows: int = 1, columns: int = TILE) -> Quantized:
    """x in e4m3 with an fp32 unit for each block of rows x columns: 1 x 128 numbers, or 128 x 128 of a weight."""
    wide = x.to(torch.float32, copy=True)
    units = largest(wide, rows, columns).clamp_(min=SMALLEST).div_(E4M3.largest)
    codes = wide.div_(spread(units, rows, columns, x.shape)).to(torch.float8_e4m3fn)
    return Quantized(codes, units, rows, columns)


def mx(x: Tensor, columns: int = MX_BLOCK) -> Quantized:
    """x in e4m3 with a power of two for each block of 32 numbers in a row."""
    wide = x.to(torch.float32, copy=True)
    # frexp: largest = mantissa * 2^exponent with a mantissa from 0.5 up to 1, so that floor(log2) is exponent - 1
    seen = largest(wide, 1, columns)
    _, exponent = torch.frexp(seen.clamp(min=SMALLEST))
    units = torch.ldexp(torch.ones_like(seen), (exponent - 9).clamp_(min=-127))
    units = torch.where(seen.isfinite(), units, float("nan"))
    wide.div_(spread(units, 1, columns, x.shape)).clamp_(-E4M3.largest, E4M3.largest)
    return Quantized(wide.to(torch.float8_e4m3fn), units.to(torch.float8_e8m0fnu), 1, columns)


def nvfp4(x: Tensor, rows: int = 1, columns: int = FP4_BLOCK, noise: torch.Generator | None = None) -> Quantized:
    """x in e2m1, with an e4m3 unit for each block of 16 numbers (16 x 16 of a weight) and an fp32 unit for the tensor.

    With `noise` rounded stochastically, otherwise to nearest."""
    wide = x.to(torch.float32, copy=True)
    seen = largest(wide, rows, columns)
    most = seen.amax() if seen.numel() else seen.new_zeros(())  # an expert may have no rows
    whole = most.clamp_(min=SMALLEST * E2M1.largest * E4M3.largest).div_(E2M1.largest * E4M3.largest)
    units = (seen / E2M1.largest / whole).to(torch.float8_e4m3fn)
    scales = spread(units.float(), rows, columns, x.shape)
    wide.div_(whole).div_(torch.where(scales > 0, scales, 1.0))  # where the unit is rounded to 0, so is the product
    return Quantized(to_e2m1(wide, noise), units, rows, columns, whole)


def to_e2m1(x: Tensor, noise: torch.Generator | None = None) -> Tensor:
    """Numbers rounded to e2m1's: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and below zero. Beyond 6 they saturate; NaN stays.

    same shape and dtype. To nearest, ties to even; with `noise` up with the probability of what is cut off, which makes
    the mean of many roundings the number itself, up to 2^-24 of a step, for |x| <= 6."""
    x = x.clamp(-E2M1.largest, E2M1.largest)
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    size = size.div_(step)
    if noise is None:
        whole = size.round()
    else:
        whole = size.floor()
        # the difference is exact, and rand is a multiple of 2^-24
        whole += torch.rand(x.shape, generator=noise, device=x.device) < size - whole
    return whole.mul_(step).copysign_(x)


def hadamard(x: Tensor, signs: Tensor) -> Tensor:
    """Each run of 16 numbers of a row times an orthonormal matrix of entries +-1/4: H of Sylvester, rows signed.

    [M, K], [16] -> fp32 [M, K rounded up to 16], padded with zeros before"""
    matrix = torch.ones(1, 1, device=x.device)
    while len(matrix) < FP4_BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix = matrix * signs[:, None] / FP4_BLOCK**0.5
    runs = F.pad(x.float(), (0, -x.shape[1] % FP4_BLOCK)).unflatten(1, (-1, FP4_BLOCK))
    return (runs @ matrix).flatten(1)


def product(a: Quantized, b: Quantized) -> Tensor:
    """a b^T in fp32. Units that are short go into the operands, exactly; fp32 ones are multiplied in after each run.

    [M, K], [N, K] -> [M, N]"""
    left, right = a.codes.float(), b.codes.float()
    if a.units.dtype != torch.float32:  # code and unit have 8 bits of mantissa together
        y = left.mul_(a.spread) @ right.mul_(b.spread).t()
        return y if a.whole is None or b.whole is None else y.mul_(a.whole).mul_(b.whole)
    y = torch.zeros(len(left), len(right), device=left.device)
    rows = spread(b.units, b.rows, 1, torch.Size((len(right), b.units.shape[1])))
    for k, start in enumerate(range(0, left.shape[1], a.columns)):
        run = slice(start, start + a.columns)
        y += (left[:, run] @ right[:, run].t()).mul_(a.units[:, k, None]).mul_(rows[:, k])
    return y


class InTiles:
    """The products of a linear in tiles (see labkit.train.fp8.Multiply): 128 x 128 for what is a weight."""

    def __call__(self, role: str, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """a b^T + bias.   [M, K], [N, K], [N] -> [M, N] in a's dtype"""
        return _rounded(product(tiles(a), tiles(b, 1 if role == "gw" else TILE)), a, bias)


class InMX:
    """The products of a linear in MXFP8."""

    def __call__(self, role: str, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """a b^T + bias.   [M, K], [N, K], [N] -> [M, N] in a's dtype"""
        return _rounded(product(mx(a), mx(b)), a, bias)


class InNVFP4:
    """The products of a linear in NVFP4: gradients are rounded stochastically, those over tokens are transformed.

    `seed` draws the noise and the signs: every rank's, and every linear's, is another one."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.noise = torch.Generator(device).manual_seed(seed)
        self.signs = 1.0 - 2.0 * torch.randint(2, (FP4_BLOCK,), generator=self.noise, device=device)

    def __call__(self, role: str, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """a b^T + bias.   [M, K], [N, K], [N] -> [M, N] in a's dtype"""
        if role == "gw":
            left = nvfp4(hadamard(a, self.signs), noise=self.noise)
            return _rounded(product(left, nvfp4(hadamard(b, self.signs))), a, bias)
        left = nvfp4(a, noise=None if role == "y" else self.noise)
        return _rounded(product(left, nvfp4(b, FP4_BLOCK)), a, bias)


def _rounded(y: Tensor, like: Any, bias: Tensor | None) -> Tensor:
    return (y if bias is None else y.add_(bias)).to(like.dtype)
