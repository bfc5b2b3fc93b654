"""LoRA in pictures: the two thin matrices beside the weight, and what rank and targets cost and buy.

parameters   full  ###########            loss |  o.
             law   ###########                 |    `o. . query, value
gradients    full  ###########                 |  x
             law   #                           |    `x._._ all linears
             seen  #                           |_________________ full fine-tuning
                                                  1   4   16   rank
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from labkit.plan.adapters import adapter_numel
from labkit.plan.breakdown import Breakdown
from labkit.view.svg import PALETTE, Picture, box, cut, headline, line, round_marks, text
from labkit.view.units import binary_text

ROWS = (("full", PALETTE[7]), ("LoRA, law", PALETTE[0]), ("measured", PALETTE[2]))
LINES = (("#2B8CD6", "", "o"), (PALETTE[6], "8 4", "s"), (PALETTE[2], "2 3", "d"), (PALETTE[3], "8 3 2 3", "t"))
BARS, WIDE = 130.0, 150.0
LEFT, RIGHT, TOP, BOTTOM = 470.0, 780.0, 148.0, 372.0


@dataclass(frozen=True)
class Seen:
    """Losses of real runs: of adapters by (targets, rank), of full fine-tuning, and of the model as it was.

    Raises ValueError where there is no run, or a loss is not finite."""

    losses: Mapping[tuple[str, int], float]
    full: float
    untouched: float

    def __post_init__(self) -> None:
        if not self.losses or not all(math.isfinite(each) for each in (*self.losses.values(), self.full)):
            raise ValueError(f"quality over rank needs finite losses of at least one run, got {dict(self.losses)}")

    def recovered(self, targets: str, rank: int) -> float:
        """The share of full fine-tuning's gain that this run has: 0 for nothing, 1 for all of it."""
        return (self.untouched - self.losses[targets, rank]) / (self.untouched - self.full)


def factors(in_features: int, out_features: int, rank: int) -> Picture:
    """W [O, I] beside B [O, r] times A [r, I], areas to scale; what is thinner than a pixel is drawn a pixel thin.

    Raises ValueError for a rank that the weight cannot have."""
    numel, whole = adapter_numel(in_features, out_features, rank), in_features * out_features
    scale = 170 / max(in_features, out_features)
    wide, tall, thin = in_features * scale, out_features * scale, max(1.0, rank * scale)
    y, second = 40.0, 470.0
    body = [
        text(
            4, 20, f"{numel:,} numbers train beside {whole:,} that do not: {whole / numel:.3g} times fewer", bold=True
        ),
        box(60, y, wide, tall, PALETTE[7], "", f"W: {out_features:,} x {in_features:,}"),
        text(60, y + tall + 20, f"W, frozen  {out_features:,} x {in_features:,} = {whole:,}", size=12),
        text(345, y + tall / 2 + 5, "+  α / r  ·", "middle", 16),
        box(second - 70, y, thin, tall, PALETTE[1], "", f"B: {out_features:,} x {rank}"),
        text(second - 70 + thin / 2, y + tall + 20, f"B  {out_features:,} x {rank}", "middle", 12),
        text(second - 30 + min(thin, 40), y + tall / 2 + 5, "·", "middle", 16),
        box(second + 30, y + (tall - thin) / 2, wide, thin, PALETTE[0], "", f"A: {rank} x {in_features:,}"),
        text(second + 30 + wide / 2, y + (tall + thin) / 2 + 20, f"A  {rank} x {in_features:,}", "middle", 12),
    ]
    said = f"W of {out_features:,} x {in_features:,} and a correction of rank {rank}: {numel:,} numbers of {whole:,}"
    return Picture("".join(body), y + tall + 34, said)


def lora(
    full: Breakdown,
    law: Breakdown | None,
    measured: Breakdown | None = None,
    quality: Seen | None = None,
    targets: str = "",
    rank: int = 0,
    title: str = "",
) -> Picture:
    """Bytes by kind of full fine-tuning, of LoRA by law and as measured; and losses over the rank, the chosen lit.

    `law` None: full fine-tuning is what is looked at. The kinds are those of `full`."""
    sides = [each for each in (full, law, measured) if each is not None]
    given = [
        (name, fill, side) for (name, fill), side in zip(ROWS, (full, law, measured), strict=True) if side is not None
    ]
    totals = {name: sum(side[kind] for kind in full) for name, _, side in given}
    most = max(*totals.values(), 1.0)
    body, y = [headline(title), *_legend([name for name, _, _ in given])], 74.0
    told = []
    for kind in (*full, "in all"):
        body.append(text(4, y + 12, kind, bold=True))
        for name, fill, side in given:
            n_bytes = totals[name] if kind == "in all" else side[kind]
            wide = max(1.0, WIDE * n_bytes / most)
            words = f"{name}: {n_bytes:,.0f} B"
            body += [box(BARS, y, wide, 14, fill, "", f"{kind}, {words}")]
            body.append(text(BARS + wide + 6, y + 11.5, binary_text(n_bytes), size=12))
            told.append(f"{kind}, {words}")
            y += 18
        y += 12
    if quality is not None:
        body += _quality(quality, targets, rank)
        told.append("; ".join(f"{name}, rank {r}: loss {each:.3g}" for (name, r), each in quality.losses.items()))
    assert sides
    return Picture("".join(body), max(y, BOTTOM + 44 if quality else 0) + 6, f"{title}: " + "; ".join(told))


def _legend(names: list[str]) -> list[str]:
    """The legend: the name of each bar."""
    out, x = [], BARS
    for (name, fill), _ in zip([row for row in ROWS if row[0] in names], names, strict=True):
        out += [box(x, 38, 14, 14, fill), text(x + 20, 50, name, size=12)]
        x += 34 + 7.2 * len(name)
    return out


def _quality(seen: Seen, targets: str, rank: int) -> list[str]:
    """Losses over the logarithm of the rank: a line for each choice of targets, and full fine-tuning as a level."""
    ranks = sorted({r for _, r in seen.losses})
    low, high = min(seen.full, *seen.losses.values()), max(seen.full, *seen.losses.values())
    room = 0.08 * (high - low or 1.0)
    low, high = low - room, high + room
    ends = math.log2(ranks[0]) - 0.3, math.log2(ranks[-1]) + 0.3

    def at(r: float, loss: float) -> tuple[float, float]:
        along = (math.log2(r) - ends[0]) / (ends[1] - ends[0])
        return LEFT + along * (RIGHT - LEFT), BOTTOM - (loss - low) / (high - low) * (BOTTOM - TOP)

    out = [text(LEFT - 40, 50, "loss of real runs over the rank", bold=True)]
    out += [line(LEFT, BOTTOM, RIGHT, BOTTOM), line(LEFT, TOP, LEFT, BOTTOM)]
    out += [text(at(r, low)[0], BOTTOM + 18, r, "middle", 12) for r in ranks]
    out.append(text((LEFT + RIGHT) / 2, BOTTOM + 36, "rank", "middle", 12))
    step = round_marks(high - low)[1]
    for height in (k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)):
        out.append(text(LEFT - 8, at(ranks[0], height)[1] + 4, f"{height:.2f}", "end", 12))
    level = at(ranks[0], seen.full)[1]
    out.append(line(LEFT, level, RIGHT, level, "1 4", 2))
    out.append(text(RIGHT, level - 6, f"full fine-tuning {seen.full:.2f}", "end", 12))
    names = list(dict.fromkeys(name for name, _ in seen.losses))
    for k, name in enumerate(names):
        colour, dash, mark = LINES[k % len(LINES)]
        points = [(r, seen.losses[name, r]) for r in ranks if (name, r) in seen.losses]
        places = "L".join("{:.1f} {:.1f}".format(*at(*point)) for point in points)
        style = f' stroke-dasharray="{dash}"' if dash else ""
        heavy = 4 if name == targets else 1.8
        out.append(f'<path d="M{places}" fill="none" stroke="{colour}" stroke-width="{heavy}"{style}/>')
        for r, loss in points:
            chosen = (name, r) == (targets, rank)
            said = f"{name}, rank {r}: loss {loss:.3f}, {seen.recovered(name, r):.0%} of full fine-tuning's gain"
            out.append(_mark(*at(r, loss), mark, colour, 7 if chosen else 4, said))
        x, y = LEFT - 40 + (k % 2) * 180, 74 + (k // 2) * 22
        out += [line(x, y - 4, x + 30, y - 4, dash, 2.5, colour), _mark(x + 15, y - 4, mark, colour, 4, name)]
        out.append(text(x + 38, y, cut(name, 16), size=12, bold=name == targets))
    if (targets, rank) in seen.losses:
        words = f"{targets}, rank {rank}: {seen.recovered(targets, rank):.0%} of full fine-tuning's gain"
    else:
        words = f"no run of {targets or 'this'} at rank {rank}" if targets in names else ""
    return [*out, text(LEFT - 40, 122, words, size=12)]


def _mark(x: float, y: float, kind: str, colour: str, size: float, said: str) -> str:
    """A circle, square, diamond or triangle, so that lines are told apart without their colours."""
    s = size
    shapes = {
        "o": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{s}" fill="{colour}" stroke="currentColor"/>',
        "s": f'<path d="M{x - s:.1f} {y - s:.1f}h{2 * s}v{2 * s}h{-2 * s}z" fill="{colour}" stroke="currentColor"/>',
        "d": f'<path d="M{x:.1f} {y - s - 1:.1f}l{s + 1} {s + 1}l{-s - 1} {s + 1}l{-s - 1} {-s - 1}z" fill="{colour}" '
        'stroke="currentColor"/>',
        "t": f'<path d="M{x:.1f} {y - s:.1f}l{s} {2 * s}h{-2 * s}z" fill="{colour}" stroke="currentColor"/>',
    }
    return f"<g><title>{said}</title>{shapes[kind]}</g>"
