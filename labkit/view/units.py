"""Numbers with their units, for people: the only place where bytes become KiB and seconds become ms."""

from __future__ import annotations

import math
import re

from labkit.plan.breakdown import MEASURED, REHEARSED
from labkit.plan.typed import parsed as parsed
from labkit.plan.words import plural as plural

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def bytes_text(n_bytes: float) -> str:
    """Bytes in words, exact below 10,000: `384 B`, `9,600 B`, `18.8 KiB`, `16 MiB`."""
    return f"{n_bytes:,.6g} B" if abs(n_bytes) < 10_000 else binary_text(n_bytes)


def binary_text(n_bytes: float) -> str:
    """Bytes in the largest unit that fits: `64 B`, `4 KiB`, `16 MiB`."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(n_bytes) >= size:
            return f"{_short(n_bytes / size)} {unit}"
    return f"{_short(n_bytes)} B"


def metric_text(value: float, unit: str) -> str:
    """A number with a metric prefix, as data sheets write rates: `450 GB/s`, `12.5 MB/s`, `6.87 Tflop`."""
    for size, prefix in PREFIXES:
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def seconds_text(seconds: float) -> str:
    """Seconds in the largest unit that fits: `85 us`, `1.2 ms`, `3 s`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{_short(seconds / size)} {unit}"
    return f"{_short(seconds * 1e9)} ns"


def singular(nouns: str) -> str:
    """One of several: `messages` -> `message`, `processes` -> `process`; a sign such as GB/s stays as it is."""
    if re.fullmatch(r"[a-z]+(?:ss|x|ch|sh)es", nouns):
        return nouns[:-2]
    return nouns[:-1] if re.fullmatch(r"[a-z]{3,}[^s]s", nouns) else nouns


def value_text(value: float, unit: str) -> str:
    """A number with its unit: bytes ("B") exact and scaled, seconds ("s") scaled, others as they are."""
    if unit in ("B", "bytes"):
        exact = f"{value:,.0f} B = " if abs(value) >= 10_000 and value == int(value) and abs(value) < 1e15 else ""
        return exact + bytes_text(value)
    if unit in ("s", "seconds"):
        return seconds_text(value)
    if value == 1:
        unit = singular(unit)
    return f"{plain_text(value, 6 if abs(value) >= 1000 else 4)} {unit}".strip()


def plain_text(value: float, digits: int = 6) -> str:
    """A number to so many digits as people write it: `11,870,000` and not 1.187e+07, `1.2·10⁻⁷` where it is tiny."""
    words = f"{value:,.{digits}g}"
    if "e+" in words and abs(value) < 1e15:
        return f"{float(f'{value:.{digits}g}'):,.0f}"
    digits_of, _, power = words.partition("e")
    return f"{digits_of}·10{str(int(power)).translate(_RAISED)}" if power else words


def apart(value: float, measured: float, origin: str = MEASURED) -> str:
    """The distance of a number from the measured one, in words: `exact`, `33.3% below the measurement`, `4 times the
    rehearsal`."""
    base = "the rehearsal" if origin == REHEARSED else "the measurement"
    if value == measured:
        return "exact"
    if measured == 0:
        return f"{base} is 0"
    if value / measured < 0:
        return f"{plain_text(abs(value - measured), 3)} {'above' if value > measured else 'below'} {base}"
    ratio = value / measured
    if 0.5 <= ratio <= 2 or not ratio:
        return f"{100 * abs(ratio - 1):.3g}% {'above' if ratio > 1 else 'below'} {base}"
    many = f"{ratio:,.0f}" if 100 <= ratio < 1e9 else plain_text(ratio, 3)
    return f"{many} times {base}"


def number_text(value: float) -> str:
    """A number that fits a small box: `712`, `-0.53`, `1.2·10⁶`; `–` for none."""
    if math.isnan(value):
        return "–"
    if abs(value) < 1e5:
        return f"{value:.0f}" if value == round(value) else plain_text(value, 3).replace(",", "")
    digits_of, _, power = f"{value:.2e}".partition("e")
    return f"{float(digits_of):g}·10{power.lstrip('+0').translate(_RAISED)}" if power else f"{value:g}"


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
