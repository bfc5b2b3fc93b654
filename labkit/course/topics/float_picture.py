"""One number in every format: its bits, the number that they hold, the error, the neighbours; and all formats' ranges.

    format   sign exponent mantissa   holds          error    next below   next above
    bf16     0 01110001 1111100       0.000120163    0.14%    0.000119686  0.00012064
    fp16     0 00001 1111011101       0.000119984    0.01%    0.000119925  0.000120044

    fp32   ....:::::::::::::::::|:::::::::::::::::::::     : normal   . subnormal: fewer bits   | the number
    fp16              ..::::::::|::::

The numbers come from `labkit.train.formats`; this module only draws them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial

import torch

from labkit.train.formats import FORMATS, Format, round_to
from labkit.view.panels import Column, Panel, below, beside, page, phrase, space, table
from labkit.view.svg import INK, PALETTE, WIDTH, Picture, line, text

CELL, NAME, HOLDS = 9.2, 80.0, 112.0
"""The widths of a bit, of a format's name, and of the number that it holds."""
COLUMNS = (
    Column(width=NAME), Column("sign, exponent, mantissa", width=308), Column("holds", "end", HOLDS),
    Column("error", "end", 60), Column("next below", "end", 106), Column("next above", "end", 106),
)  # fmt: skip
FIELDS = (PALETTE[3], PALETTE[1], PALETTE[0])
"""The colours of sign, exponent and mantissa."""
LANE, LOWEST, HIGHEST = 21.0, -152, 130
TERM = r"([+-]?)(?:(\d+(?:\.\d*)?)(?:\^|\*\*)([+-]?\d+)|((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf|nan))"


def number(typed: str) -> float:
    """The number that a person typed: `0.00012`, `1e-7`, `inf`, `nan`, powers and sums such as `1 + 2^-9`.

    Raises ValueError for anything else."""
    plain = re.sub(r"[\s_,]", "", typed.lower())
    if not re.fullmatch(f"(?:{TERM})(?:(?=[+-]){TERM})*", plain):
        raise ValueError(f"{typed!r} is no number; write 0.00012, 1e-7, 2^-24, 1 + 2^-9, inf or nan")
    total = 0.0
    for sign, base, exponent, value in re.findall(TERM, plain):
        try:
            term = float(base) ** int(exponent) if base else float(value)
        except (OverflowError, ZeroDivisionError):
            term = math.inf
        total += -term if sign == "-" else term
    return -0.0 if plain.startswith("-0") and total == 0 else total


def neighbours(value: float, format: Format) -> tuple[float | None, float | None]:
    """The format's numbers next below and next above the one that it holds for `value`; None where there is none."""
    held = float(round_to(value, format))
    if math.isnan(held):
        return None, None
    if format.integer:
        ends = -(format.largest + format.scale), format.largest
        return (held - format.scale if held > ends[0] else None), (held + format.scale if held < ends[1] else None)
    top = 1 << (format.n_bits - 1)
    code = int(format.encode(held))
    rank = code if code < top else top - code  # place of the code in the order of numbers; both zeros are at 0
    around = [top - step if step < 0 else step for step in (rank - 1, rank + 1)]
    below, above = (float(decoded) for decoded in format.decode(torch.tensor(around)))
    return (
        None if math.isnan(below) or held == -math.inf else below,
        None if math.isnan(above) or held == math.inf else above,
    )


def floats(value: float, formats: Sequence[Format] = tuple(FORMATS.values()), title: str = "") -> Picture:
    """`value` in each of the formats, side by side, and where it lies in their ranges."""
    title = title or f"{_text(value, 12)} in {len(formats)} formats"
    rows, sentences = zip(*(_row(value, format) for format in formats), strict=True)
    ranges = phrase("ranges: full bars are normal numbers, pale ones subnormal (fewer bits)", 12)
    drawn = Panel(WIDTH - 8, LANE * len(formats) + 24, partial(_ranges, value, formats))
    table_ = table(COLUMNS, rows, 12, gap=4, lead=8)
    return page(title, table_, below(ranges, drawn, gap=2), label=f"{title}: {'; '.join(sentences)}")


def _row(value: float, format: Format) -> tuple[tuple[str | Panel, ...], str]:
    """(the row of one format, with its bits and two lines of words, the same as a sentence)."""
    counts = (
        f"1 + {format.exponent_bits} + {format.mantissa_bits} bits" if format.exponent_bits else f"{format.n_bits} bits"
    )
    name = format.name.removeprefix("fp8_")
    named = below(phrase(name, bold=True), phrase(counts, 11))
    if format.integer and math.isnan(value):
        return (named, "an integer format has no code for NaN", "", "", "", ""), f"{name} has no NaN"
    bits = beside(*(_bits(field, fill) for field, fill in zip(format.bits(value), FIELDS, strict=True) if field), gap=5)
    held = float(round_to(value, format)) + (0.0 if format.integer else -0.0)  # an integer has one zero
    off, kind = _error(value, held), _kind(held, format)
    around = [_apart(n, held) for n in neighbours(value, format)]
    holds = (phrase(_held(held), 12, True, "end", HOLDS), phrase(kind, 11, False, "end", HOLDS))
    ends = (below(phrase(words, 12 if len(words) < 13 else 11, anchor="end"), space(0, 15)) for words in (off, *around))
    sentence = f"{name} {format.bits(value)} holds {_held(held)} ({kind}, error {off}), between {' and '.join(around)}"
    return (named, bits.padded(bottom=15), below(*holds), *ends), sentence


def _bits(field: str, fill: str) -> Panel:
    """The bits of one field, in boxes of its colour."""

    def draw(left: float, y: float) -> str:
        places = ((left + k * CELL, bit) for k, bit in enumerate(field))
        return "".join(
            f'<rect x="{x:.1f}" y="{y:g}" width="{CELL}" height="17" fill="{fill}" stroke="#fff"/><text '
            f'x="{x + CELL / 2:.1f}" y="{y + 13:g}" text-anchor="middle" font-size="11" fill="{INK}">{bit}</text>'
            for x, bit in places
        )

    return Panel(CELL * len(field), 17.0, draw)


def _error(value: float, held: float) -> str:
    """The distance of the held number from the true one in words, as a share of the true one: `0.14%`, `exact`."""
    if held == value or (math.isnan(held) and math.isnan(value)):
        return "exact"
    if not math.isfinite(held) or not math.isfinite(value):
        return "infinite" if math.isinf(held) else "–"
    share = abs(held - value) / abs(value)
    return f"{share:.2g}" if share < 1e-4 else "100%" if share == 1 else f"{share:.2%}"


def _kind(held: float, format: Format) -> str:
    """The kind of number that a format holds, in words: "normal", "subnormal, 3 bits", "zero"."""
    if not math.isfinite(held):
        return "not a number" if math.isnan(held) else "infinity"
    if held == 0:
        return "zero"
    if abs(held) >= format.largest:
        return "the largest"
    if format.integer or abs(held) >= format.smallest_normal:
        return "a whole step" if format.integer else "normal"
    bits = int(abs(held) / format.smallest_subnormal).bit_length()
    return f"subnormal, {bits} bit{'s' * (bits > 1)}"


def _ranges(value: float, formats: Sequence[Format], left: float, top: float) -> str:
    """A bar for each format from its smallest to its largest positive number, on one axis of powers of two."""
    start, end = left + NAME, left + WIDTH - 14

    def at(exponent: float) -> float:
        return start + (min(max(exponent, LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST) * (end - start)

    body, bottom = [], top + LANE * len(formats)
    for i, format in enumerate(formats):
        y = top + i * LANE
        edges = [at(math.log2(n)) for n in (format.smallest_subnormal, format.smallest_normal, format.largest)]
        body.append(text(left, y + 14, format.name.removeprefix("fp8_"), size=12))
        ends = f"{format.smallest_subnormal:.3g} to {format.largest:.3g}"
        bars = (
            f'<rect x="{low:.1f}" y="{y + 2:g}" width="{high - low:.1f}" height="14" fill="{PALETTE[0]}"{look}/>'
            for low, high, look in zip(edges, edges[1:], (' opacity="0.4"', ""), strict=False)
            if high > low
        )
        label = f"{format.name}: {ends}, with all bits from {format.smallest_normal:.3g}"
        body.append(f"<g><title>{label}</title>{''.join(bars)}</g>")
    body.append(line(start, bottom, end, bottom))
    for exponent in range(-150, HIGHEST + 1, 25):
        body += [line(at(exponent), bottom, at(exponent), bottom + 4)]
        body.append(text(at(exponent), bottom + 18, f"2^{exponent}", "middle", 11))
    if math.isfinite(value) and value != 0:
        x = at(math.log2(abs(value)))
        body.append(line(x, top - 2, x, bottom, "4 3", 2, PALETTE[6]))
    return "".join(body)


def _text(value: float, digits: int = 9) -> str:
    return "NaN" if math.isnan(value) else f"{value:.{digits}g}"


def _held(value: float) -> str:
    """A number that a format holds: ten digits where there is place for them, nine otherwise."""
    return ten if len(ten := _text(value, 10)) <= 12 else _text(value)


def _apart(value: float | None, held: float) -> str:
    """A neighbour, with enough digits to differ from the number that is held."""
    if value is None:
        return "–"
    return next((words for n in (6, 7, 8) if (words := _text(value, n)) != _text(held, n)), _text(value))
