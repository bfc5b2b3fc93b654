"""How gradients travel along dp, and what that costs: the one table that the laws of bytes, seconds and memory ask.

                bytes an element on the wire    remembered             read and written to code and decode
    exact       as they are added up            nothing                nothing
    bf16        2                               nothing                a copy in bf16, and back
    8bit        1 + 4/256                       4 + 4/n an element     see labkit.parallel.eight_bit_gradients

Only DDP has these choices. What they do to numbers: labkit.parallel.compress (bf16),
labkit.parallel.eight_bit_gradients.
"""

from __future__ import annotations

from types import MappingProxyType

WAYS = ("exact", "bf16", "8bit")
"""The names that a recipe has for the ways in which DDP sends gradients; the table above says what each costs."""
TILE = 256
"""Numbers that share a unit."""
UNIT_BYTES = 4
"""Bytes of a unit, in fp32."""
CODING_BYTES = MappingProxyType({"exact": 0, "bf16": 12, "8bit": 140})
"""Bytes that a device reads and writes for an element of fp32, all operations of both halves together."""


def refused(way: str, strategy: str, precision: str, width: int) -> str:
    """Why a recipe cannot have this way, and the mend; "" if it can. `width`: bytes in which gradients are added up."""
    if way != "exact" and strategy != "ddp":
        return (
            f"gradients={way!r} is a choice for strategy='ddp', got {strategy!r}: the reduce_scatter of ZeRO sends "
            "gradients as they are added up. Take ddp, or gradients='exact'"
        )
    if way == "bf16" and width <= 2:
        return f"with precision={precision!r} gradients are in bf16 already: gradients='exact', or '8bit'"
    if way == "8bit" and precision == "fp16":
        return (
            "gradients='8bit' adds what rounding has cut off to the next step's gradients, and with precision='fp16' "
            "these may have another loss scale: precision='amp', or gradients='bf16'"
        )
    return ""


def message_bytes(k: int, tile: int = TILE) -> int:
    """Bytes of k codes and of the units of their tiles, of which the last may be shorter."""
    return k + UNIT_BYTES * -(-k // tile)


def element_bytes(way: str, width: int) -> float:
    """Bytes on the wire for an element that is added up in `width` bytes, its share of a unit included."""
    return {"bf16": 2.0, "8bit": 1 + UNIT_BYTES / TILE}.get(way, float(width))


def remembered_bytes(way: str, numel: int, n: int, width: int) -> int:
    """Bytes of what rounding has cut off so far: of a rank's gradients, and of its 1/n of the sums."""
    return (numel + -(-numel // n)) * max(4, width) * (way == "8bit")
