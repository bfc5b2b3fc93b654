"""Numbers as people type them. Every field of a widget and every option of the command line that is a text asks here.

parsed("1,024 B", "B")     parsed("2 KiB", "B")     parsed("0.3 ms", "s")     parsed("7B", "parameters")
whole("128k", "tokens a row")                       whole("16", "devices", most=65_536)
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from types import MappingProxyType

COUNTS = MappingProxyType({"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12})
SCALES = MappingProxyType(
    {
        "B": MappingProxyType(
            {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
        ),
        "s": MappingProxyType({"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}),
        "parameters": COUNTS,
        "tokens": COUNTS,
        "tokens a row": MappingProxyType({"k": 1 << 10, "m": 1 << 20}),
    }
)
"""What may follow a number of a unit, in small letters, and its factor; the unit itself may, too."""
EXAMPLES = MappingProxyType(
    {
        "B": "1,024 or 5.7 MiB", "s": "0.3 or 20 ms", "%": "33 or 12.5", "parameters": "7B or 124,000,000",
        "tokens": "1T, 300B or 1.5e12", "tokens a row": "8,192 or 128k",
    }
)  # fmt: skip
"""Numbers of a unit as they may be typed, in words."""
LONG_NAMES = MappingProxyType({"bytes": "B", "seconds": "s"})


def example(unit: str) -> str:
    """Numbers of a unit that may be typed: `1,024 or 5.7 MiB`."""
    return EXAMPLES.get(unit, "1,024 or 2.5")


def parsed(text: str, unit: str = "", least: float = 0.0) -> float:
    """The number that a person typed: `1,024`, `1.5e6`, `2 KiB`, `0.3 ms`, `7B`, in bytes, seconds or what `unit` says.

    ValueError, with numbers that would do, for anything else, and for a number below `least`."""
    value = _value(text, unit)
    if not least <= value < math.inf:
        of = f" of {unit}" * bool(unit)
        raise ValueError(f"{reprlib.repr(text)} is not a number{of}, {least:g} or more: write {example(unit)}")
    return value


def whole(text: str, name: str, least: int = 1, most: int = 10**9) -> int:
    """The whole number that a person typed for `name`; where that is a unit with prefixes, they may follow.

    ValueError, with the name and the range, for anything else."""
    value = _value(text, name)
    if not least <= value <= most or value != int(value):
        such = f", such as {EXAMPLES[name]}" if name in EXAMPLES else ""
        raise ValueError(f"{name}: a whole number from {least:,} to {most:,}{such}, got {reprlib.repr(text)}")
    return int(value)


def _value(text: str, unit: str) -> float:
    """The number, or nan if there is none."""
    match = re.fullmatch(r"([-+.\deE]+)\s*([^\s\d]*)", text.replace(",", "").replace("_", "").strip())
    suffix = match[2].lower() if match else ""
    factors: Mapping[str, float] = SCALES.get(LONG_NAMES.get(unit, unit), {})
    factor = 1.0 if suffix in ("", unit.lower()) else factors.get(suffix, math.nan)
    try:
        return float(match[1]) * factor if match else math.nan
    except ValueError:
        return math.nan
