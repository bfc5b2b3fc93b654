"""Looking at number formats: their limits side by side, and one number as each of them holds it.

    >>> explore(0.1)                                    >>> limits()
    format  sign exponent mantissa   holds      ...     format  bits  ...  largest  smallest  epsilon
    bf16    0 01111011 1001101       0.100097           bf16    16         3.39e+38 9.18e-41  0.00781
    fp16    0 01011 1001100110       0.0999756          fp16    16         6.55e+04 5.96e-08  0.000977

Nothing is stored: every cell is worked out by `labkit.train.formats`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from labkit.plan.text_columns import in_columns
from labkit.train.formats import FORMATS, Format, round_to


@dataclass(frozen=True)
class TextTable:
    """Rows of text under a heading, shown as a table in a terminal and in a notebook."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        return "\n".join(in_columns([self.head, *self.rows], left=range(len(self.head))))

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.head)
        body = ("".join(f"<td><code>{escape(cell)}</code></td>" for cell in row) for row in self.rows)
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>"


def limits(formats: Iterable[Format] = tuple(FORMATS.values())) -> TextTable:
    """The formats side by side: bits, largest, smallest normal and subnormal, epsilon."""
    head = ("format", "bits", "exponent", "mantissa", "largest", "smallest normal", "smallest", "epsilon")
    counts = ((f, (f.n_bits, f.exponent_bits, f.mantissa_bits)) for f in formats)
    sizes = ((f, n, (f.largest, f.smallest_normal, f.smallest_subnormal, f.epsilon)) for f, n in counts)
    return TextTable(head, tuple((f.name, *map(str, n), *(f"{size:.4g}" for size in s)) for f, n, s in sizes))


def explore(value: float, formats: Iterable[Format] = tuple(FORMATS.values())) -> TextTable:
    """One number as each format holds it: its bits, what they stand for, how far off that is, the step around it."""
    rows = []
    for fmt in formats:
        kept = float(round_to(value, fmt))
        off = "0" if kept == value else f"{abs(kept - value) / abs(value):.2g}" if math.isfinite(value) else "-"
        rows.append((fmt.name, str(fmt.bits(value)), f"{kept:.9g}", off, f"{fmt.gap(value):.3g}"))
    return TextTable(("format", "sign exponent mantissa", "holds", "relative error", "step"), tuple(rows))
