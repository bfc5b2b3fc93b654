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

import torch

from labkit.train.formats import FORMATS, Format, round_to
from labkit.view.svg import INK, PALETTE, Picture, headline, line, text

CELL, BITS, ROW, TOP = 9.2, 88.0, 42.0, 62.0
HOLDS, ERROR, BELOW, ABOVE = 512.0, 576.0, 687.0, 797.0
FIELDS = (PALETTE[3], PALETTE[1], PALETTE[0])
"""The colours of sign, exponent and mantissa."""
LANE, LEFT, RIGHT, LOWEST, HIGHEST = 21.0, 88.0, 790.0, -152, 130
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
    body = [headline(title)]
    ends = {HOLDS: "holds", ERROR: "error", BELOW: "next below", ABOVE: "next above"}
    body.append(text(BITS, 48, "sign, exponent, mantissa", size=12))
    body += [text(x, 48, words, "end", 12) for x, words in ends.items()]
    sentences = []
    for i, shown_format in enumerate(formats):
        row, sentence = _row(value, shown_format, TOP + i * ROW)
        body += row
        sentences.append(sentence)
    y = TOP + len(formats) * ROW + 14
    body += _ranges(value, formats, y)
    return Picture("".join(body), y + 30 + LANE * len(formats) + 24, f"{title}: {'; '.join(sentences)}")


def _row(value: float, format: Format, y: float) -> tuple[list[str], str]:
    """(the row of one format, with its bits and two lines of words, the same as a sentence)."""
    counts = (
        f"1 + {format.exponent_bits} + {format.mantissa_bits} bits" if format.exponent_bits else f"{format.n_bits} bits"
    )
    name = format.name.removeprefix("fp8_")
    body = [text(4, y + 12, name, bold=True), text(4, y + 27, counts, size=11)]
    if format.integer and math.isnan(value):
        return [*body, text(BITS, y + 12, "an integer format has no code for NaN", size=12)], f"{name} has no NaN"
    x = BITS
    for field, fill in zip(format.bits(value), FIELDS, strict=True):
        for bit in field:
            body.append(f'<rect x="{x:.1f}" y="{y:g}" width="{CELL}" height="17" fill="{fill}" stroke="#fff"/>')
            body.append(
                f'<text x="{x + CELL / 2:.1f}" y="{y + 13:g}" text-anchor="middle" font-size="11" fill="{INK}">{bit}'
                "</text>"
            )
            x += CELL
        x += 5 if field else 0
    held = float(round_to(value, format)) + (0.0 if format.integer else -0.0)  # an integer has one zero
    off, kind = _error(value, held), _kind(held, format)
    around = [_apart(n, held) for n in neighbours(value, format)]
    body += [text(HOLDS, y + 13, _held(held), "end", 12, bold=True), text(HOLDS, y + 28, kind, "end", 11)]
    for at, words in zip((ERROR, BELOW, ABOVE), (off, *around), strict=True):
        body.append(text(at, y + 13, words, "end", 12 if len(words) < 13 else 11))
    return (
        body,
        f"{name} {format.bits(value)} holds {_held(held)} ({kind}, error {off}), between {' and '.join(around)}",
    )


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


def _ranges(value: float, formats: Sequence[Format], y: float) -> list[str]:
    """A bar for each format from its smallest to its largest positive number, on one axis of powers of two."""

    def at(exponent: float) -> float:
        return LEFT + (min(max(exponent, LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST) * (RIGHT - LEFT)

    body = [text(4, y + 6, "ranges: full bars are normal numbers, pale ones subnormal (fewer bits)", size=12)]
    bottom = y + 18 + LANE * len(formats)
    for i, format in enumerate(formats):
        top = y + 18 + i * LANE
        low, normal, high = (
            at(math.log2(n)) for n in (format.smallest_subnormal, format.smallest_normal, format.largest)
        )
        body.append(text(4, top + 12, format.name.removeprefix("fp8_"), size=12))
        ends = f"{format.smallest_subnormal:.3g} to {format.largest:.3g}"
        bars = (
            f'<rect x="{start:.1f}" y="{top:g}" width="{stop - start:.1f}" height="14" fill="{PALETTE[0]}"{look}/>'
            for start, stop, look in ((low, normal, ' opacity="0.4"'), (normal, high, ""))
            if stop > start
        )
        label = f"{format.name}: {ends}, with all bits from {format.smallest_normal:.3g}"
        body.append(f"<g><title>{label}</title>{''.join(bars)}</g>")
    body.append(line(LEFT, bottom, RIGHT, bottom))
    for exponent in range(-150, HIGHEST + 1, 25):
        body += [line(at(exponent), bottom, at(exponent), bottom + 4)]
        body.append(text(at(exponent), bottom + 18, f"2^{exponent}", "middle", 11))
    if math.isfinite(value) and value != 0:
        x = at(math.log2(abs(value)))
        body.append(line(x, y + 12, x, bottom, "4 3", 2, PALETTE[6]))
    return body


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
