"""What a product of 8-bit copies holds while it runs (labkit.train.fp8, labkit.train.blocks)."""

from __future__ import annotations

from labkit.plan.model.low_precision_products import BLOCKS, Size


def needs(units: str, size: Size, width: int, experts: int = 1, drawn: bool = False, turned: bool = False) -> int:
    """Bytes at the highest moment of [m, k] x [n, k] -> [m, n], the result of `width` bytes an element included; of so
    many `experts` one after another. `drawn`: the first operand is rounded stochastically; `turned`: the product over
    tokens.

    With units of a tensor: a copy in fp32 of one operand beside its codes, then the codes of both beside the result."""
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
    if not (law.spread or turned) and n > law.columns:
        multiplying += 4 * -(-n // law.columns) * -(-k // law.columns) * law.columns
    return before + max(highest, codes + spread, multiplying, 4 * m * n + result)
