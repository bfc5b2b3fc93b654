"""What a product of 8-bit copies holds while it runs, moment by moment.

    quantize a   a copy in fp32, units of the blocks, each unit in the place of each of its numbers  -> codes and units
    quantize b   the same beside the codes of a
    multiply     emulated: both operands as fp32, their units, sums                                  -> result in fp32
    round        the result in bf16; all else is freed

The first two rows are those of labkit.train.fp8 and labkit.train.blocks, the third is a kernel of its own for units of
a tensor. A row whose length is no multiple of a block's is filled up with zeros where the units are found and where
they are spread, so that 33 rows of an expert may take as much as 64.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

Size = tuple[int, int, int]
"""Rows of a product, terms of each of its sums, and columns: [m, k] x [n, k] -> [m, n]."""


class Emulated(NamedTuple):
    """What an emulated product of labkit.train.blocks holds, in bytes.

    columns    numbers in a row of a block; `square`: a weight's blocks are as tall as wide
    quantize   a number of an operand while it is quantized, besides 4 bytes of its unit in the place of each number;
               `drawn`: with stochastic rounding; `units`: a unit meanwhile
    codes      a number of the quantized operand until the product is done, and `unit` each of its units; `wide`: a
               number of its copy in fp32, if that is another one
    spread     True if each number is multiplied by its unit, and not each partial sum
    result     an element of the result, of which partial sums are there as well"""

    columns: int
    square: bool
    quantize: int
    drawn: int
    units: int
    codes: int
    unit: int
    wide: int
    spread: bool
    result: int

    def blocks(self, rows: int, columns: int, is_weight: bool) -> tuple[int, int, int]:
        """Bytes of an operand in fp32 that is filled up to whole blocks, 0 if it need not be; of its units in the place
        of each number, 0 where one unit is for all of a row, which needs no memory; and how many units there are."""
        tall = self.columns if self.square and is_weight else 1
        across, down = -(-columns // self.columns), -(-rows // tall)
        filled = 4 * across * self.columns * down * tall
        spread = across > 1 or (tall > 1 and down > 1)
        return filled * (filled != 4 * rows * columns), filled * spread, across * down


BLOCKS = MappingProxyType(
    {
        "tiles": Emulated(128, True, 4, 4, 4, 1, 4, 4, False, 8),
        "mx": Emulated(32, False, 4, 4, 16, 1, 1, 4, True, 4),
        "nvfp4": Emulated(16, True, 21, 29, 5, 4, 1, 0, True, 4),
    }
)


def needs(units: str, size: Size, width: int, experts: int = 1, drawn: bool = False, turned: bool = False) -> int:
    """Bytes at the highest moment of [m, k] x [n, k] -> [m, n], the result of `width` bytes an element included; of so
    many `experts` one after another.

    `units` is one of Recipe.units; those of a tensor take a copy in fp32 of one operand beside its codes, then the
    codes of both beside the result. `drawn`: the first operand is rounded stochastically; `turned`: this is the product
    over tokens, whose operands are transformed and none of which is a weight."""
    m, k, n = size
    law, result = BLOCKS.get(units), m * n * width
    before = result * (experts - 1)
    if law is None:
        return before + max(5 * m * k + 4, (m + 5 * n) * k + 8, (m + n) * k + 8 + result)
    transformed = turned and units == "nvfp4"
    k = -(-k // law.columns) * law.columns if transformed else k
    codes = highest = spread = 0
    for rows, noise, is_weight in ((m, drawn, False), (n, False, not turned)):
        numel, (filled, placed, blocks) = rows * k, law.blocks(rows, k, is_weight)
        made = (law.drawn if noise else law.quantize) * numel + placed + law.units * blocks
        made = max(made, 4 * numel + filled + 4 * blocks) + 4 * transformed * numel
        highest = max(highest, codes + made)
        codes += law.codes * numel + law.unit * blocks
        spread = max(spread, law.spread * (placed + 4 * blocks))
    codes += law.wide * (m + n) * k
    multiplying = codes + (law.result if k else 4) * m * n
    if not (law.spread or turned) and n > law.columns:  # units of a weight's blocks, one for each of its rows
        multiplying += 4 * -(-n // law.columns) * -(-k // law.columns) * law.columns
    return before + max(highest, codes + spread, multiplying, 4 * m * n + result)
