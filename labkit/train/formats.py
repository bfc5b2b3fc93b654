"""Number formats: what the bits of fp32, tf32, bf16, fp16, fp8, fp4 and int8 mean, and what rounding to one of them is.

        sign exponent  mantissa               value of a code                      (bias = 2^(exponent_bits - 1) - 1)
    fp32  s  eeeeeeee  mmmmmmmmmmmmmmmmmmmmmmm
    tf32  s  eeeeeeee  mmmmmmmmmm             exponent 0       (-1)^s 0.mmm 2^(1 - bias)         subnormal, and zero
    bf16  s  eeeeeeee  mmmmmmm                otherwise        (-1)^s 1.mmm 2^(exponent - bias)  normal
    fp16  s  eeeee     mmmmmmmmmm             exponent all 1   infinity if mmm is 0, else NaN
    e5m2  s  eeeee     mm
    e4m3  s  eeee      mmm                    the same, but only s1111111 is NaN and nothing is infinite: largest is 448
    e2m1  s  ee        m                      the same, and no code is NaN: 0, 0.5, 1, 1.5, 2, 3, 4, 6 with either sign
    e8m0     eeeeeeee                         2^(exponent - 127): a scale of a block and no sign, no zero; all 1 is NaN
    int8  s            mmmmmmm                scale * two's complement: even steps everywhere, no exponent

More exponent is more range (how large, how small), more mantissa is more precision (how fine). bf16 keeps the range of
fp32 in half the bytes, so it needs no loss scaling; fp16 has 8 times its precision and loses gradients below 6e-8.
Bytes a number: fp32 and tf32 4 (tf32 is a way to multiply, kept in 32 bits), bf16 and fp16 2, fp8 and int8 1, e2m1 half
a byte. e2m1 and e8m0 only mean something for a block of numbers together (labkit.train.blocks).

Everything here is worked out in float64, which holds each of these numbers exactly.
Sources: IEEE 754-2019, sections 3.4 (layout) and 4.3.1 (nearest, ties to even); Kalamkar et al., 1905.12322, section 3
(bf16); Micikevicius et al., 2209.05433, section 3 (fp8); Jacob et al., 1712.05877, section 2.1 (int8 with a scale); OCP
Microscaling Formats (MX) Specification v1.0, 2023, section 5 (e2m1, e8m0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor


class Bits(NamedTuple):
    """The three fields of a code, each a string of 0 and 1. `str` joins them: "0 01111 0000000000"."""

    sign: str
    exponent: str
    mantissa: str

    @property
    def code(self) -> int:
        """The fields as one whole number, sign first."""
        return int("".join(self), 2)

    def __str__(self) -> str:
        return " ".join(field for field in self if field)


@dataclass(frozen=True)
class Format:
    """A number format. 2 to 8 exponent bits make a float, 0 an integer with a `scale`; 1 to 23 mantissa bits. Without
    mantissa bits it holds powers of two, and neither a sign nor zero.

    `infinity`: True if the top exponent is kept for infinity and NaN (IEEE), False for NaN at all ones only (e4m3fn).
    `nan`: False if that code is a number, too (e2m1).
    `overflow`: what rounding makes of a number beyond the largest: "inf", "saturate" (the largest) or "nan".
    `dtype`: torch's own, where it has one. Raises ValueError for fields that make no format."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    infinity: bool = True
    overflow: str = "inf"
    scale: float = 1.0
    dtype: torch.dtype | None = None
    nan: bool = True

    def __post_init__(self) -> None:
        fewest = 0 if self.exponent_bits == 8 and not self.infinity else 1
        if self.exponent_bits not in (0, *range(2, 9)) or not fewest <= self.mantissa_bits <= 23:
            raise ValueError(
                f"{self.name}: 2 to 8 exponent bits (0 for an integer) and 1 to 23 mantissa bits, "
                f"got {self.exponent_bits} and {self.mantissa_bits}"
            )
        only = not self.nan or self.integer
        holds = ("saturate",) if only else ("inf", "saturate", "nan") if self.infinity else ("saturate", "nan")
        if self.overflow not in holds:
            raise ValueError(f"{self.name}: overflow must be one of {', '.join(holds)}, got {self.overflow!r}")
        if not (math.isfinite(self.scale) and self.scale > 0) or (self.scale != 1 and not self.integer):
            raise ValueError(f"{self.name}: scale is a positive number for an integer, 1 for a float; got {self.scale}")

    @property
    def integer(self) -> bool:
        """True if the steps are even (int8) and do not grow with the number."""
        return self.exponent_bits == 0

    @property
    def powers(self) -> bool:
        """True if it holds powers of two only: an exponent, no sign and no zero (e8m0)."""
        return self.mantissa_bits == 0

    @property
    def n_bits(self) -> int:
        """Bits of a code: the sign, the exponent, the mantissa. (tf32's 19 are stored in 32.)"""
        return (not self.powers) + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """The bias, which is subtracted from the exponent field. 0 for an integer."""
        return 0 if self.integer else 2 ** (self.exponent_bits - 1) - 1

    @property
    def largest(self) -> float:
        """The largest finite number. (int8 goes one step further below zero.)"""
        if self.integer:
            return (2**self.mantissa_bits - 1) * self.scale
        top = 2**self.exponent_bits - 1 - self.bias
        if self.infinity or self.powers:
            return (2 - self.epsilon) * 2.0 ** (top - 1)
        # the mantissa of all ones is NaN there, unless there is no NaN
        return (2 - (1 + self.nan) * self.epsilon) * 2.0**top

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with all its mantissa bits; one step for an integer."""
        return self.scale if self.integer else 2.0 ** (1 - self.bias - self.powers)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number; what lies at or below its half becomes zero."""
        return self.scale if self.integer else self.smallest_normal * self.epsilon

    @property
    def epsilon(self) -> float:
        """From 1 to the next number; half of it is the largest relative error of a normal number. Or one step."""
        return self.scale if self.integer else 2.0**-self.mantissa_bits

    def gap(self, value: float) -> float:
        """The step between the format's numbers at |value| and above; beyond the largest, the step at the largest."""
        return float(_unit(torch.tensor(min(abs(value), self.largest), dtype=torch.float64), self))

    def encode(self, x: Tensor | float) -> Tensor:
        """Codes of x after rounding.   any shape -> int64 of that shape, 0 <= code < 2^n_bits"""
        wide = round_to(x, self).double()
        if self.integer:
            return (wide / self.scale).round().long() & (2**self.n_bits - 1)
        if self.powers:
            return torch.where(wide.isnan(), 2**self.n_bits - 1, _exponent(wide, self) + self.bias)
        finite = torch.where(wide.isfinite(), wide, 0.0)
        # a normal number is 2^m + mantissa units: that 2^m carries one into the exponent field, a subnormal has none
        field = ((_exponent(finite, self) + self.bias - 1) << self.mantissa_bits) + self._units(finite)
        infinite = (2**self.exponent_bits - 1) << self.mantissa_bits
        nan = infinite | (2 ** (self.mantissa_bits - 1) if self.infinity else 2**self.mantissa_bits - 1)
        field = torch.where(wide.isinf(), infinite, torch.where(wide.isnan(), nan, field))
        return (torch.signbit(wide).long() << (self.n_bits - 1)) | field

    def decode(self, codes: Tensor) -> Tensor:
        """Values of codes.   whole numbers of any shape -> float64. Only the lowest n_bits of a code count."""
        codes = codes.long() & (2**self.n_bits - 1)
        sign = codes >> (self.n_bits - 1)
        if self.integer:
            return (codes - (sign << self.n_bits)).double() * self.scale
        if self.powers:
            return torch.where(codes == 2**self.n_bits - 1, math.nan, _power(codes - self.bias))
        field, mantissa = codes >> self.mantissa_bits & (2**self.exponent_bits - 1), codes & (2**self.mantissa_bits - 1)
        units = mantissa + ((field > 0).long() << self.mantissa_bits)  # the leading 1 of a normal number is not stored
        value = units.double() * _power(field.clamp(min=1) - self.bias - self.mantissa_bits)
        top = field == 2**self.exponent_bits - 1
        if self.infinity:
            value = torch.where(top, torch.where(mantissa == 0, math.inf, math.nan), value)
        elif self.nan:
            value = torch.where(top & (mantissa == 2**self.mantissa_bits - 1), math.nan, value)
        return torch.where(sign == 1, -value, value)

    def bits(self, value: float) -> Bits:
        """The code of one number, field by field, after rounding."""
        text = format(int(self.encode(value)), f"0{self.n_bits}b")
        sign = 0 if self.powers else 1
        return Bits(text[:sign], text[sign : sign + self.exponent_bits], text[sign + self.exponent_bits :])

    def value(self, bits: Bits | str | int) -> float:
        """The number that a code stands for: Bits, a string such as "0 01111 0000000000", or a whole number.

        Raises ValueError if it is no code of this format."""
        if isinstance(bits, int):
            code = bits
        else:
            text = str(bits).replace(" ", "")
            if len(text) != self.n_bits or set(text) - {"0", "1"}:
                raise ValueError(f"{self.name} has {self.n_bits} bits of 0 and 1, got {str(bits)!r}")
            code = int(text, 2)
        if not 0 <= code < 2**self.n_bits:
            raise ValueError(f"codes of {self.name} are 0 to {2**self.n_bits - 1}, got {code}")
        return float(self.decode(torch.tensor(code)))

    def _units(self, x: Tensor) -> Tensor:
        return (x.abs() / _unit(x, self)).long()


def round_to(x: Tensor | float, format: Format) -> Tensor:
    """x as the format would hold it: to nearest, ties to even; beyond the largest as `format.overflow` says.

    same shape; float32 and float64 keep their dtype, everything else comes back in float32, which holds every float
    format here exactly. A format of powers of two drops the sign, and rounds 1.5 of one up. Raises ValueError for a NaN
    where the format has none."""
    x = x.detach() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
    wide = x.double().abs() if format.powers else x.double()
    unit = _unit(wide, format)
    steps = torch.round(wide / unit)  # torch rounds ties to even; dividing by a power of two is exact
    if format.powers:
        steps = steps.clamp(min=1)
    if (format.integer or not format.nan) and wide.isnan().any():
        raise ValueError(f"{format.name} has no NaN, and {int(wide.isnan().sum())} of {x.numel()} numbers are NaN")
    if format.integer:
        rounded = steps.clamp(-(2**format.mantissa_bits), 2**format.mantissa_bits - 1) * unit
    else:
        rounded = steps * unit
        beyond = math.inf if format.overflow == "inf" else math.nan if format.overflow == "nan" else format.largest
        limit = torch.copysign(torch.full_like(wide, beyond), wide)
        rounded = torch.where(rounded.abs() > format.largest, limit, rounded)
    return rounded.to(x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32)


def _unit(wide: Tensor, format: Format) -> Tensor:
    """The step between the format's numbers around each number, ignoring the largest."""
    if format.integer:
        return torch.full_like(wide, format.scale)
    return _power(_exponent(wide, format) - format.mantissa_bits)


def _exponent(wide: Tensor, format: Format) -> Tensor:
    """floor(log2 |x|) read from float64's own exponent field, not below the exponent of the subnormals."""
    return ((wide.view(torch.int64) >> 52 & 0x7FF) - 1023).clamp(min=1 - format.bias - format.powers)


def _power(exponent: Tensor) -> Tensor:
    """2^exponent, built from bits: `pow` may be off by one unit in the last place on some devices."""
    return ((exponent + 1023) << 52).view(torch.float64)


FP32 = Format("fp32", 8, 23, dtype=torch.float32)
TF32 = Format("tf32", 8, 10)
BF16 = Format("bf16", 8, 7, dtype=torch.bfloat16)
FP16 = Format("fp16", 5, 10, dtype=torch.float16)
E4M3 = Format("fp8_e4m3fn", 4, 3, infinity=False, overflow="saturate", dtype=torch.float8_e4m3fn)
E5M2 = Format("fp8_e5m2", 5, 2, dtype=torch.float8_e5m2)
E2M1 = Format("fp4_e2m1fn", 2, 1, infinity=False, overflow="saturate", nan=False)
"""Torch has a dtype for pairs of them in a byte (float4_e2m1fn_x2), to which nothing is cast."""
E8M0 = Format("e8m0fnu", 8, 0, infinity=False, overflow="nan", dtype=torch.float8_e8m0fnu)
INT8 = Format("int8", 0, 7, infinity=False, overflow="saturate", dtype=torch.int8)
FORMATS = MappingProxyType({fmt.name: fmt for fmt in (FP32, TF32, BF16, FP16, E4M3, E5M2, INT8)})
"""Those that a tensor can be kept in by itself: e2m1 and e8m0 come in blocks."""
