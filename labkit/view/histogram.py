"""Gradients by size, and what each number format makes of them: zero, fewer bits, whole, infinite.

    share |        __                         log2 |g|, times the loss scale
          |    |  |  |__
          |  __|__|  |  |__
          |_|__|__|__|__|__|___________
    fp16    zero |  subnormal  | normal              | infinite     31% become zero
    e5m2    zero          | subnormal | normal   ...                80% become zero

A loss scale of 2^k moves the gradients k places to the right and the formats stay: that is all it does. Counts are by
powers of two, so the edge at which a number becomes zero is met exactly (but for the tie on it), the edge at which it
becomes infinite or the largest to less than one power.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.probe.grads import GradientTable
from labkit.train.formats import BF16, E4M3, E5M2, FP16, Format
from labkit.view.svg import PALETTE, Picture, Room, box, headline, line, round_marks, text, width_of

LEFT, RIGHT, TOP, BOTTOM, LANE = 66.0, 600.0, 66.0, 236.0, 26.0
KINDS = ("zero", "subnormal", "normal", "over")
FILLS = (PALETTE[6], PALETTE[1], PALETTE[0], PALETTE[3])


@dataclass(frozen=True)
class Fates:
    """What a format makes of gradients, as shares of all of them. `zero` counts those that were zero before, too."""

    zero: float
    subnormal: float
    normal: float
    over: float


def edges(format: Format) -> tuple[int, int, int]:
    """Exponents e of 2^e <= |g| < 2^(e+1): the lowest that is not rounded to zero, the lowest normal, the highest."""
    lowest = math.floor(math.log2(format.smallest_subnormal)) - 1  # half of the smallest number rounds up to it
    return lowest, math.floor(math.log2(format.smallest_normal)), math.floor(math.log2(format.largest))


def fates(table: GradientTable, format: Format, log2_scale: int = 0, layer: str = "") -> Fates:
    """What `format` makes of the table's gradients (of one `layer`, or all) times 2^log2_scale. NaN and inf are over.

    KeyError for a layer that the table does not have."""
    counts, zeros, total = _counted(table, layer)
    lowest, normal, highest = edges(format)
    found = Counter[str]({"zero": zeros, "over": total - zeros - sum(counts.values())})
    for exponent, count in counts.items():
        found[_kind(exponent + log2_scale, lowest, normal, highest)] += count
    return Fates(*(found[kind] / max(1, total) for kind in KINDS))


def histogram(
    table: GradientTable,
    format: Format = FP16,
    log2_scale: int = 0,
    layer: str = "",
    formats: Sequence[Format] = (FP16, BF16, E5M2, E4M3),
    span: tuple[int, int] | None = None,
    title: str = "",
) -> Picture:
    """The table's gradients times 2^log2_scale, coloured by what `format` makes of them, above the lanes of `formats`.

    `layer`: one row of the table, all of them if empty. `span`: lowest and highest exponent of the page; what lies
    beyond is counted in words. ValueError for a span that goes down, KeyError for a layer that is not there."""
    counts, zeros, total = _counted(table, layer)
    moved = {exponent + log2_scale: count for exponent, count in counts.items()}
    low, high = span or (min([*moved, -30]) - 2, max([*moved, 16]) + 2)
    if low >= high:
        raise ValueError(f"the page goes from the lower exponent to the higher, got {low} to {high}")
    page = _Page(low, high, max(moved.values(), default=1) / max(1, total))
    times = f" times 2^{log2_scale}" if log2_scale else ""
    title = title or f"{layer or 'all'}: {total:,} gradients{times}, as {format.name.removeprefix('fp8_')} holds them"
    beyond = sum(count for e, count in moved.items() if not low <= e <= high) / max(1, total)
    words = f"{zeros / max(1, total):.1%} were zero before" + (f"; {beyond:.1%} beyond this page" if beyond else "")
    body = [headline(title), text(4, 42, words, size=12), *page.axes()]
    limits = edges(format)
    for exponent, count in sorted(moved.items()):
        if low <= exponent <= high:
            body.append(page.bar(exponent, count / max(1, total), _kind(exponent, *limits)))
    body += page.ends(format, formats)
    told = []
    for i, each in enumerate(formats):
        of = fates(table, each, log2_scale, layer)
        y = BOTTOM + 58 + i * LANE
        body += page.lane(each, y, of)
        told.append(
            f"{each.name}: {of.zero:.1%} zero, {of.subnormal:.1%} subnormal, {of.normal:.1%} normal, {of.over:.1%} over"
        )
    return Picture("".join(body), BOTTOM + 58 + LANE * len(formats) + 6, f"{title}: {'; '.join(told)}")


def _counted(table: GradientTable, layer: str) -> tuple[Counter[int], int, int]:
    """(exponent -> count, how many are zero, how many in all)."""
    rows = [table[layer]] if layer else list(table)
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update(dict(row.histogram))
    return counts, round(sum(row.zeros * row.n for row in rows)), sum(row.n for row in rows)


def _kind(exponent: int, lowest: int, normal: int, highest: int) -> str:
    if exponent < lowest:
        return KINDS[0]
    return KINDS[1] if exponent < normal else KINDS[2] if exponent <= highest else KINDS[3]


@dataclass(frozen=True)
class _Page:
    """Exponents across, shares up."""

    low: int
    high: int
    most: float

    def at(self, exponent: float) -> float:
        """Where |g| = 2^exponent stands; the ends of the page for what lies beyond."""
        along = (exponent - self.low) / (self.high + 1 - self.low)
        return LEFT + min(1.0, max(0.0, along)) * (RIGHT - LEFT)

    def bar(self, exponent: int, share: float, kind: str) -> str:
        """The gradients of one power of two."""
        x, tall = self.at(exponent), max(1.5, share / self.most * (BOTTOM - TOP - 4))
        said = f"2^{exponent} to 2^{exponent + 1}: {share:.2%}, {kind}"
        wide = self.at(exponent + 1) - x - 1
        fill = FILLS[KINDS.index(kind)]
        return (
            f'<g><title>{said}</title><rect x="{x + 0.5:.1f}" y="{BOTTOM - tall:.1f}" width="{wide:.1f}" '
            f'height="{tall:.1f}" fill="{fill}"/></g>'
        )

    def axes(self) -> Iterable[str]:
        """Both axes with their marks."""
        yield line(LEFT, BOTTOM, RIGHT, BOTTOM)
        yield line(LEFT, TOP, LEFT, BOTTOM)
        yield text((LEFT + RIGHT) / 2, BOTTOM + 38, "size of a gradient, times the loss scale", "middle", 12)
        every = 4 if self.high - self.low < 60 else 8
        for exponent in range(-(-self.low // every) * every, self.high + 1, every):
            x = self.at(exponent)
            yield line(x, BOTTOM, x, BOTTOM + 4)
            yield text(x, BOTTOM + 19, f"2^{exponent}", "middle", 11)
        for mark in round_marks(self.most)[1:]:
            y = BOTTOM - mark / self.most * (BOTTOM - TOP - 4)
            yield line(LEFT, y, RIGHT, y, "1 5")
            yield text(LEFT - 6, y + 4, f"{mark:.3g}" if mark < 0.01 else f"{mark:.0%}", "end", 12)

    def ends(self, chosen: Format, formats: Sequence[Format]) -> Iterable[str]:
        """Where gradients become zero: a line for each format, its name where there is place."""
        room = Room(right=RIGHT)
        for each in (chosen, *(other for other in formats if other != chosen)):
            x = self.at(edges(each)[0])
            if LEFT < x < RIGHT:
                name = ("becomes zero in " if each == chosen else "") + each.name.removeprefix("fp8_")
                yield line(x, TOP - 12, x, BOTTOM, *(("5 3", 2) if each == chosen else ("2 4", 1)))
                wide = width_of(name, 12)
                if room.take(x - 5 - wide, TOP - 14, wide + 10, 14):
                    yield text(x - 5, TOP - 3, name, "end", 12)

    def lane(self, each: Format, y: float, of: Fates) -> list[str]:
        """What a format makes of each size, and the shares in words."""
        name = each.name.removeprefix("fp8_")
        lowest, normal, highest = edges(each)
        stops = [self.low, lowest, normal, highest + 1, self.high + 1]
        names = ("zero", "subnormal", "normal", "infinite" if each.overflow == "inf" else "the largest")
        body = [text(LEFT - 8, y + 14, name, "end", bold=True)]
        for start, stop, words, fill in zip(stops, stops[1:], names, FILLS, strict=False):
            x, end = self.at(start), self.at(stop)
            if end - x > 1:
                fits = words if 7.2 * len(words) < end - x - 4 else ""
                body.append(box(x, y, end - x, 19, fill, fits, f"{name}: {words}, 2^{start} to 2^{stop}"))
        some = [(of.zero, "zero"), (of.subnormal, "low"), (of.over, "over")]
        body.append(text(RIGHT + 8, y + 14, ", ".join(f"{share:.0%} {what}" for share, what in some), size=12))
        return body
