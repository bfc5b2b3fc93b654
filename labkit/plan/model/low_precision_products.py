"""What a product of 8-bit copies holds while it runs, moment by moment, on a tape of shadows (tape.py).

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

from labkit.plan.model.tape import ACTIVATIONS, OTHER, Storage, Tape

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


def multiplied(
    tape: Tape, units: str, size: Size, width: int, kind: int, name: str = "", drawn: bool = False, turned: bool = False
) -> Storage:
    """The product of [m, k] and [n, k] in 8 bits or fewer, `width` bytes an element; what is made on the way is freed.

    `units` is one of Recipe.units. `drawn`: the first operand is rounded stochastically; `turned`: this is the product
    over tokens, whose operands are transformed and none of which is a weight."""
    m, k, n = size
    copies, law, out = ACTIVATIONS if kind == ACTIVATIONS else OTHER, BLOCKS.get(units), m * n
    if law is None:
        casts = copies_of(tape, (m * k, n * k), copies)
        y = tape.new(out * width, kind, name)
        casts.clear()
        return y
    transformed = turned and units == "nvfp4"
    k = -(-k // law.columns) * law.columns if transformed else k
    parts, spread = list[Storage](), 0
    for rows, noise, is_weight in ((m, drawn, False), (n, False, not turned)):
        numel, (filled, placed, blocks) = rows * k, law.blocks(rows, k, is_weight)
        made = (law.drawn if noise else law.quantize) * numel + placed + law.units * blocks
        tape.scratch(max(made, 4 * numel + filled + 4 * blocks) + 4 * transformed * numel, copies)
        parts.append(tape.new(law.codes * numel + law.unit * blocks, copies))
        spread = max(spread, law.spread * (placed + 4 * blocks))
    parts += [tape.new(law.wide * rows * k, copies) for rows in (m, n)]
    tape.scratch(spread, copies)
    if not (law.spread or turned) and n > law.columns:  # units of a weight's blocks, one for each of its rows
        parts.append(tape.new(4 * -(-n // law.columns) * -(-k // law.columns) * law.columns, copies))
    total = tape.new((law.result if k else 4) * out, copies)
    parts.clear()
    del total
    tape.scratch((4 + width) * out, copies)
    return tape.new(out * width, kind, name)


def copies_of(tape: Tape, sizes: tuple[int, int], kind: int) -> list[Storage]:
    """8-bit copies of tensors of these sizes, each with its unit, and each made by way of an fp32 copy."""
    copies = []
    for numel in sizes:
        unit, wide = tape.new(4, kind), tape.new(4 * numel, kind)
        copies += [unit, tape.new(numel, kind)]
        del wide
    return copies
