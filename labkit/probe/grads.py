"""Gradient statistics by layer: how large they are, how many are zero, how many a number format would lose.

    layer           n      norm       max  zeros  under    low  over  not finite  log2 |g|, -28 .. 2
    embedding  32 768  3.10e-02  4.40e-03  81.2%   3.1%  40.0%  0.0%        0.0%  ▁▁▂▂▃▅▇█▅▂▁
    blocks.0   12 288  8.80e-01  1.10e-01   0.0%   0.0%   0.2%  0.0%        0.0%             ▁▂▃▆█▅▂▁

`under` are gradients that are not zero and lie below the format's smallest number: at half of it or less they become
zero. `low` are those and the rest that have fewer bits than usual. `over` lie beyond the largest: they become infinite,
or the largest number, as the format defines. The histogram counts gradients by power of two, so a loss scale of 2^16
moves it 16 places to the right (`scale=2**16` shows that).

    gradient_statistics((name, p.grad) for name, p in model.named_parameters())

A pure function of gradients: nothing is changed or kept. It copies one gradient at a time in float64 (8 bytes a number)
and waits for the device. Source: Micikevicius et al., 1710.03740, section 3.2 and figure 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

import torch
from torch import Tensor

from labkit.plan.text_columns import in_columns

BARS = " ▁▂▃▄▅▆▇█"
COLUMNS = ("layer", "n", "norm", "max", "zeros", "under", "low", "over", "not finite")


class Limits(Protocol):
    """The limits of a number format. A `Format` of labkit.train has them; `LimitsOf.dtype` reads a torch dtype's."""

    @property
    def largest(self) -> float:
        """The largest finite number."""

    @property
    def smallest_normal(self) -> float:
        """The smallest number with full precision."""

    @property
    def smallest_subnormal(self) -> float:
        """The smallest number above zero."""


@dataclass(frozen=True)
class LimitsOf:
    """Plain numbers as limits of a format."""

    name: str
    largest: float
    smallest_normal: float
    smallest_subnormal: float

    @classmethod
    def dtype(cls, of: torch.dtype | torch.finfo) -> LimitsOf:
        """The limits of a torch dtype. Raises ValueError for one that is not floating."""
        if isinstance(of, torch.dtype) and not of.is_floating_point:
            raise ValueError(f"{of} has no smallest number above zero: give a floating dtype, or LimitsOf with numbers")
        info = torch.finfo(of) if isinstance(of, torch.dtype) else of
        return cls(str(info.dtype).removeprefix("torch."), info.max, info.tiny, info.tiny * info.eps)


@dataclass(frozen=True)
class GradientRow:
    """One layer's gradients. Shares are of all its numbers, 0 to 1; `n` is 0 for a layer that got no gradient.

    norm, largest   Euclidean norm and largest |g| (not finite if one of them is not)
    zeros           share that is exactly zero
    under           share above zero and below the format's smallest number
    low             share above zero and below its smallest normal number, `under` included: fewer bits than usual
    over            share beyond its largest number, and finite
    not_finite      share that is inf or NaN
    histogram       (e, count) for 2^e <= |g| < 2^(e+1), lowest first, empty ones left out
    """

    name: str
    n: int
    norm: float
    largest: float
    zeros: float
    under: float
    low: float
    over: float
    not_finite: float
    histogram: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class GradientTable:
    """All layers' rows in order, shown as a table. `format` names the limits; gradients were multiplied by `scale`."""

    rows: tuple[GradientRow, ...]
    format: str
    scale: float = 1.0

    def __getitem__(self, name: str) -> GradientRow:
        """The row of a layer. Raises KeyError with the layers there are."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no layer {name!r}; there are {', '.join(row.name for row in self.rows)}")

    def __iter__(self) -> Iterator[GradientRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def norm(self) -> float:
        """The norm of all gradients together."""
        return math.hypot(*(row.norm for row in self.rows))

    @property
    def under(self) -> float:
        """The share of all gradients that lies below the format's smallest number."""
        return sum(row.under * row.n for row in self.rows) / max(1, sum(row.n for row in self.rows))

    @property
    def span(self) -> tuple[int, int]:
        """Lowest and highest exponent of all histograms; (0, 0) if all gradients are zero."""
        exponents = [e for row in self.rows for e, _ in row.histogram] or [0]
        return min(exponents), max(exponents)

    def _cells(self) -> Iterator[tuple[str, ...]]:
        for row in self.rows:
            shares = (row.zeros, row.under, row.low, row.over, row.not_finite)
            if row.n:
                numbers = (f"{row.n:,}".replace(",", " "), f"{row.norm:.2e}", f"{row.largest:.2e}")
                yield (row.name, *numbers, *(f"{share:.1%}" for share in shares), self._bars(row))
            else:
                yield (row.name, "no gradient", *[""] * 8)

    def _bars(self, row: GradientRow) -> str:
        low, high = self.span
        counts, most = dict(row.histogram), max((count for _, count in row.histogram), default=1)
        heights = (counts.get(e, 0) for e in range(low, high + 1))
        return "".join(
            BARS[math.ceil(count / most * (len(BARS) - 1))] for count in heights
        )  # rounded up: one gradient shows

    def _title(self) -> str:
        times = "" if self.scale == 1 else f", gradients times {self.scale:g}"
        return f"limits of {self.format}{times}; norm of all {self.norm:.3e}, under {self.under:.1%}"

    def _head(self) -> tuple[str, ...]:
        return *COLUMNS, "log2 |g|, {} .. {}".format(*self.span)

    def __repr__(self) -> str:
        return "\n".join([self._title(), *in_columns([self._head(), *self._cells()], left=(0, 9))])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self._head())
        body = ("".join(f"<td style='white-space:pre'>{escape(cell)}</td>" for cell in row) for row in self._cells())
        rows = "".join(f"<tr>{cells}</tr>" for cells in body)
        return f"<p>{escape(self._title())}</p><table><tr>{head}</tr>{rows}</table>"


def gradient_statistics(
    named: Mapping[str, Tensor | None] | Iterable[tuple[str, Tensor | None]],
    limits: Limits | torch.dtype | torch.finfo = torch.float16,
    scale: float = 1.0,
) -> GradientTable:
    """The statistics of named gradients, as if multiplied by `scale`, beside the limits of a number format.

    A gradient may be None (a parameter that was not used) or sparse. Raises ValueError for a name that comes twice and
    for gradients that are not floating."""
    pairs = list(named.items() if isinstance(named, Mapping) else named)
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"each layer once, please: {', '.join(twice)}")
    known: Any = LimitsOf.dtype(limits) if isinstance(limits, torch.dtype | torch.finfo) else limits
    rows = tuple(_row(name, gradient, known, scale) for name, gradient in pairs)
    return GradientTable(rows, getattr(known, "name", type(known).__name__), scale)


def _row(name: str, gradient: Tensor | None, limits: Limits, scale: float) -> GradientRow:
    if gradient is None or gradient.numel() == 0:
        return GradientRow(name, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, ())
    if not gradient.is_floating_point():
        raise ValueError(f"{name}: gradients are floating tensors, got {gradient.dtype}")
    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    size = dense.double().mul(scale).abs().flatten()
    finite, nonzero = size.isfinite(), size > 0
    counted = size[finite & nonzero]
    exponents = torch.frexp(counted).exponent - 1  # frexp's mantissa is 0.5 to 1
    present, counts = torch.unique(exponents, return_counts=True)
    sums = torch.stack(
        [
            (size == 0).sum(),
            (nonzero & (size < limits.smallest_subnormal)).sum(),
            (nonzero & (size < limits.smallest_normal)).sum(),
            (finite & (size > limits.largest)).sum(),
            (~finite).sum(),
        ]
    )
    zeros, under, low, over, not_finite = (sums.double() / size.numel()).tolist()
    return GradientRow(
        name,
        size.numel(),
        float(torch.linalg.vector_norm(size)),
        float(size.max()),
        zeros,
        under,
        low,
        over,
        not_finite,
        tuple(zip(present.tolist(), counts.tolist(), strict=True)),
    )
