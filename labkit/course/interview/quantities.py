"""Numbers with units in a text, and whether one of them equals a figure of a card.

    quantities("about 16GiB, 40 % of it, for 7B parameters")    three of them
    held_against(figure, spoken)                                 Match: which one it is, or what is wrong with one

Some quantities can be read in several ways: 7B is seven billion or seven bytes, 8k is 8,000 or 8,192. Units are
converted. A figure is met within TOLERANCE, since people round when they speak. 16 GiB for 16 GB, gigabits for
gigabytes, or a thousandth of the figure do not meet it; the mistake is named.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

from labkit.course.cards.card import NAME
from labkit.course.cards.figures import UNITS, Figure

TOLERANCE, TYPED = 0.03, 0.005
"""How far a spoken number may be from the figure, as a share; and how near two numbers with the same digits are."""
COUNT, BYTES, SECONDS, FLOPS = "", "bytes", "seconds", "flops"
"""What a unit measures; a rate has `/s` after it. A count may also be a share or a factor."""
THOUSANDS = MappingProxyType({"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18})
LONG = MappingProxyType({"kilo": "k", "mega": "m", "giga": "g", "tera": "t", "peta": "p", "exa": "e"})
COUNTS = MappingProxyType(
    {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "thousand": 1e3, "thousands": 1e3, "million": 1e6,
     "millions": 1e6, "billion": 1e9, "billions": 1e9, "bn": 1e9, "trillion": 1e12, "trillions": 1e12, "%": 0.01,
     "percent": 0.01, "per cent": 0.01, "x": 1.0, "×": 1.0, "times": 1.0, "fold": 1.0, "-fold": 1.0}
)  # fmt: skip
SPANS = MappingProxyType(
    {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0,
     "nanosecond": 1e-9, "microsecond": 1e-6, "millisecond": 1e-3, "second": 1.0, "minute": 60.0, "hour": 3600.0,
     "day": 86400.0, "week": 7 * 86400.0, "year": 365.25 * 86400}
)  # fmt: skip
NUMBER = r"(?<![\w.])(?<![A-Za-z]-)(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+)"
UNIT = (
    r"(?P<size>(?:[kKMGTP]i?|kilo|mega|giga|tera|peta|kibi|mebi|gibi|tebi)?(?:bytes?|bits?|[Bb])(?=ps\b|(?![A-Za-z])))"
    r"|(?P<work>(?:[kKMGTPE]|kilo|mega|giga|tera|peta|exa)?-?flop(?:s\b|\b))"
    r"|(?P<span>(?:(?:nano|micro|milli)?seconds?|minutes?|hours?|days?|weeks?|years?|[nuµμm]?s|sec|min|h)(?![A-Za-z]))"
    r"|(?P<count>%|per ?cent\b|thousands?\b|millions?\b|billions?\b|bn\b|trillions?\b|times\b|-?fold\b"
    r"|[x×](?!\w|\s*\d))"
)
QUANTITY = re.compile(rf"{NUMBER}(?:\s*-?\s?(?:{UNIT})(?P<rate>\s?/\s?s(?:ec)?\b| per second\b| a second\b|ps\b)?"
                      r"|(?P<short>[kKMBT])\b)?", re.IGNORECASE)  # fmt: skip
DENIED = re.compile(
    r"(?:\bnot|\bno|\bnever|n['’]t|\bnor|\bneither)\s+(?:(?!but\b|rather\b|only\b)\w+\s+){0,2}$", re.IGNORECASE
)
REFUSED = re.compile(r"^\s*(?:\w+\s+){0,2}?(?:is|are|would be|was)\s+(?:wrong|false|incorrect|not)\b", re.IGNORECASE)
WORDS = MappingProxyType(
    {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
     "ten": "10", "twelve": "12", "fourteen": "14", "sixteen": "16", "eighteen": "18", "twenty": "20",
     "thirty-two": "32", "sixty-four": "64", "hundred": "100"}
)  # fmt: skip


class Reading(NamedTuple):
    """One way to read a quantity: the number as typed, what its unit measures, and the unit's size in base units."""

    number: float
    kind: str
    scale: float
    unit: str

    @property
    def value(self) -> float:
        """The value in bytes, seconds, flops, or as a plain number."""
        return self.number * self.scale


class Quantity(NamedTuple):
    """A quantity: the words of the text, its readings, and whether the text denies it ("not 16 GB")."""

    words: str
    readings: tuple[Reading, ...]
    denied: bool


class Match(NamedTuple):
    """`met` are the words that state the figure, "" if none do; `remark` says what is wrong with a near one."""

    met: str
    remark: str


def quantities(typed: str) -> list[Quantity]:
    """Every number of a text with its unit, without names that have digits (bf16, ZeRO-3) and code in backticks."""
    text = re.sub(r"`[^`]*`", lambda match: " " * len(match[0]), typed)
    text = NAME.sub(
        lambda match: match[0] if match[0][0].isdecimal() and "-" in match[0] else "_" * len(match[0]), text
    )
    spelled = re.compile(rf"\b({'|'.join(sorted(WORDS, key=len, reverse=True))})\b", re.IGNORECASE)
    text = spelled.sub(lambda match: WORDS[match[0].lower()].ljust(len(match[0])), text)
    read = []
    for match in QUANTITY.finditer(text):
        end = match.end()
        while end < len(typed) and text[end] == " " != typed[end]:  # a spelled number is longer than its digits
            end += 1
        words = typed[match.start() : end].strip()
        denied = bool(DENIED.search(text[: match.start()]) or REFUSED.match(text[match.end() :]))
        read.append(Quantity(words, tuple(_readings(match)), denied))
    return read


def held_against(figure: Figure, spoken: Sequence[Quantity], others: Sequence[Figure] = ()) -> Match:
    """The quantity that equals the figure, or what is wrong with one. A quantity that equals one of `others` is right
    in itself, so nothing is said about it.

    No quantity meets a figure that is a word."""
    if isinstance(figure.value, (str, bool)):
        return Match("", "")
    kind, remark = kind_of(figure), ""
    for quantity in spoken:
        if quantity.denied:
            continue
        for reading in quantity.readings:
            if wrong := _told(figure, kind, reading, quantity.words):
                is_another = any(_meets(other, kind_of(other), reading) for other in others if other is not figure)
                remark = remark or ("" if is_another else wrong)
            elif _meets(figure, kind, reading):
                return Match(quantity.words, "")
    return Match("", remark)


def kind_of(figure: Figure) -> str:
    """The quantity that the unit of a figure measures, such as time or memory."""
    unit, rate = figure.unit.removesuffix("/s"), "/s" * figure.unit.endswith("/s")
    if unit.endswith("flop"):
        return FLOPS + rate
    if unit in ("B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB"):
        return BYTES + rate
    return SECONDS if unit in ("ns", "us", "ms", "s", "min", "h", "days", "years") else COUNT


def _meets(figure: Figure, kind: str, reading: Reading) -> bool:
    if isinstance(figure.value, (str, bool)):
        return False
    if reading.kind == kind:
        return _close(reading.value, figure.value, TOLERANCE)
    return kind == COUNT and reading.scale == 1.0 and _close(reading.number, figure.value, TOLERANCE)  # 16 bytes each


def _told(figure: Figure, kind: str, reading: Reading, words: str) -> str:
    """A sentence on the mistake in a quantity that is nearly the figure; "" if it is the figure, or a different one."""
    if kind == COUNT and figure.unit not in ("%",) or not figure.value:
        return ""
    shown, digits = figure.value / UNITS[figure.unit], f"{figure}"
    same = _close(reading.number, shown, TYPED)
    if kind == COUNT:
        return f"“{words}”: the card has {digits}" if same and reading.scale != 0.01 and shown > 1 else ""
    if reading.kind != kind:
        whose = "has no unit" if not reading.unit else f"is in {reading.unit}"
        return f"“{words}” {whose}: the card has {digits}" if same else ""
    binary = ("i" in reading.unit[:2]) != ("i" in figure.unit)
    if same and binary and kind == BYTES and not _close(reading.scale, UNITS[figure.unit], 1e-9):
        return f"“{words}” is {_shown(figure, reading)}: the card has {digits}; 1,024 is not 1,000"
    if _close(reading.value, figure.value, TOLERANCE):
        return ""
    ratio = reading.value / figure.value if figure.value else 0.0
    if same and _close(ratio, 1 / 8, TOLERANCE) and "bit" in reading.unit:
        return f"“{words}” is {_shown(figure, reading)}: the card has {digits}; these are bits, and not bytes"
    if kind.startswith(BYTES) and any(_close(ratio, factor, TYPED) for factor in (8.0, 1 / 8)):
        return f"“{words}” is {'8 times' if ratio > 1 else 'an eighth of'} {digits}: bits for bytes?"
    for power in (1, 2, 3):
        for base in (1000.0, 1024.0):
            factor = base**power
            if _close(ratio, factor, TYPED) or _close(ratio, 1 / factor, TYPED):
                way = f"{factor:,.0f} times" if ratio > 1 else f"a {factor:,.0f}th of"
                return f"“{words}” is {way} {digits}"
    return f"“{words}” is {_shown(figure, reading)}: the card has {digits}" if same else ""


def _shown(figure: Figure, reading: Reading) -> str:
    """A reading in the unit of the figure."""
    return str(Figure("", reading.value, figure.unit))


def _readings(match: re.Match[str]) -> list[Reading]:
    number, rate = float(match[1].replace(",", "")), "/s" * bool(match["rate"])
    if unit := match["size"]:
        scale = _size(unit)
        readings = [Reading(number, BYTES + rate, scale, _named(unit))]
        if unit == "B" and not rate:  # 7B: seven billion
            readings.append(Reading(number, COUNT, 1e9, "billion"))
        return readings
    if unit := match["work"]:
        prefix = re.sub(r"-?flops?$", "", unit.lower())
        scale = THOUSANDS[LONG.get(prefix, prefix)] if prefix else 1.0
        a_second = unit.endswith(("S", "s")) and not unit.lower().startswith("flop") and not rate
        same = [Reading(number, FLOPS + rate, scale, unit)]
        return [*same, Reading(number, f"{FLOPS}/s", scale, unit)] if a_second else same  # Tflops is often a rate
    if unit := match["span"]:
        size = SPANS.get(unit.lower()) or SPANS[unit.lower().rstrip("s")]
        return [Reading(number, SECONDS, size, unit)]
    if unit := match["count"]:
        return [Reading(number, COUNT, COUNTS[unit.lower().replace("percent", "per cent")], unit)]
    if unit := match["short"]:
        readings = [Reading(number, COUNT, COUNTS[unit if unit in COUNTS else unit.upper()], unit)]
        return [*readings, Reading(number, COUNT, 1024.0, unit)] if unit in "kK" else readings
    return [Reading(number, COUNT, 1.0, "")]


def _size(unit: str) -> float:
    """Bytes of a unit of memory: 1 for B, 1e9 for GB, 2^30 for GiB, an eighth of 1e9 for Gbit and Gb."""
    word = unit.lower()
    bits = "bit" in word or (unit.endswith("b") and len(unit) > 1 and unit[0].isupper())
    if re.match(r"[kmgt]i(b|$)|(ki|me|gi|te)bi", word):
        size = 1024.0 ** (" kmgt".index(word[0]))
    else:
        prefix = re.sub(r"(bytes?|bits?|b)$", "", word)
        size = THOUSANDS[LONG.get(prefix, prefix)] if prefix else 1.0
    return size / 8 if bits else size


def _named(unit: str) -> str:
    return unit.replace("Gb", "Gbit") if unit.endswith("b") and unit[0].isupper() else unit


def _close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * abs(b)
