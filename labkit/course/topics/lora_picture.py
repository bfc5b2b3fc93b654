"""LoRA in pictures: the two thin matrices beside the weight, and bytes and losses for ranks and targets.

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
from typing import Any

from labkit.plan.breakdown import Breakdown
from labkit.plan.step.adapters import adapter_numel
from labkit.view import chart
from labkit.view.panels import Column, page, phrase, table, tile
from labkit.view.svg import PALETTE, Picture, cut, round_marks
from labkit.view.units import binary_text

ROWS = (("full", PALETTE[7]), ("LoRA, law", PALETTE[0]), ("measured", PALETTE[2]))
BARS, WIDE = 130.0, 150.0
LEFT, RIGHT, TOP, BOTTOM = 470.0, 780.0, 148.0, 372.0


@dataclass(frozen=True)
class Seen:
    """Losses of real runs: of adapters by (targets, rank), of full fine-tuning, and of the model before training.

    Raises ValueError where there is no run, or a loss is not finite."""

    losses: Mapping[tuple[str, int], float]
    full: float
    untouched: float

    def __post_init__(self) -> None:
        if not self.losses or not all(math.isfinite(loss) for loss in (*self.losses.values(), self.full)):
            raise ValueError(f"quality over rank needs finite losses of at least one run, got {dict(self.losses)}")

    def recovered(self, targets: str, rank: int) -> float:
        """The share of full fine-tuning's gain that this run has: 0 for nothing, 1 for all of it."""
        return (self.untouched - self.losses[targets, rank]) / (self.untouched - self.full)


def factors(in_features: int, out_features: int, rank: int) -> Picture:
    """W [O, I] beside B [O, r] times A [r, I], with areas to scale, but no matrix thinner than a pixel.

    Raises ValueError for a rank that the weight cannot have."""
    numel, whole = adapter_numel(in_features, out_features, rank), in_features * out_features
    scale = 170 / max(in_features, out_features)
    wide, tall, thin = in_features * scale, out_features * scale, max(1.0, rank * scale)
    w, b, a = f"{out_features:,} x {in_features:,}", f"{out_features:,} x {rank}", f"{rank} x {in_features:,}"
    drawn = (
        tile(wide, tall, PALETTE[7], "", f"W: {w}"), phrase("+  α / r  ·", 16),
        tile(thin, tall, PALETTE[1], "", f"B: {b}"), phrase("·", 16), tile(wide, thin, PALETTE[0], "", f"A: {a}"),
    )  # fmt: skip
    words = (f"W, frozen  {w} = {whole:,}", "", f"B  {b}", "", f"A  {a}")
    return page(
        f"{numel:,} numbers train beside {whole:,} that do not: {whole / numel:.3g} times fewer",
        table([Column(anchor="middle")] * 5, [drawn, words], 12, lead=6).padded(left=40),
        label=f"W of {w} and a correction of rank {rank}: {numel:,} numbers of {whole:,}",
        size=13,
    )


@chart.style()
def lora(
    full: Breakdown,
    law: Breakdown | None,
    measured: Breakdown | None = None,
    quality: Seen | None = None,
    targets: str = "",
    rank: int = 0,
    title: str = "",
) -> chart.Chart:
    """Bytes by kind of full fine-tuning, and of LoRA by law and measured; and losses over the rank.

    The kinds are those of `full`. `law` is None for a picture of full fine-tuning only. In the losses, the run with
    `targets` and `rank` is highlighted."""
    sides = [
        (name, fill, side) for (name, fill), side in zip(ROWS, (full, law, measured), strict=True) if side is not None
    ]
    totals = {name: sum(side[kind] for kind in full) for name, _, side in sides}
    most = max(*totals.values(), 1.0)
    kinds = [*full, "in all"]
    sizes = {
        (kind, name): totals[name] if kind == "in all" else side[kind] for kind in kinds for name, _, side in sides
    }
    label = f"{title}: " + "; ".join(f"{kind}, {name}: {n_bytes:,.0f} B" for (kind, name), n_bytes in sizes.items())
    if quality is not None:
        label += "; " + "; ".join(f"{name}, rank {r}: loss {loss:.3g}" for (name, r), loss in quality.losses.items())
    tall = 18 * len(sides) + 12
    bottom = 74 + tall * len(kinds)
    figure = chart.Chart(max(bottom, BOTTOM + 44 if quality else 0) + 6, title, label)
    axes = figure.panel(BARS, 74, BARS + WIDE, bottom, xlim=(0, most), ylim=(bottom, 74))
    axes.set_axis_off()
    for row, kind in enumerate(kinds):
        figure.words(4, 86 + tall * row, kind, weight="bold")
        for k, (name, fill, _) in enumerate(sides):
            n_bytes, y = sizes[kind, name], 74 + tall * row + 18 * k
            chart.box(axes, 0, y, max(n_bytes, most / WIDE), 14, fill, "", f"{kind}, {name}: {n_bytes:,.0f} B")
            axes.annotate(binary_text(n_bytes), (n_bytes, y + 11.5), (6, 0), textcoords="offset points")
    figure.swatches(BARS, 39, ((name, fill) for name, fill, _ in sides))
    if quality is not None:
        _quality(figure, quality, targets, rank)
    return figure


def _quality(figure: chart.Chart, seen: Seen, targets: str, rank: int) -> None:
    """Draw losses over the logarithm of the rank: a line for each choice of targets, a level for full fine-tuning."""
    ranks = sorted({r for _, r in seen.losses})
    low, high = min(seen.full, *seen.losses.values()), max(seen.full, *seen.losses.values())
    room = 0.08 * (high - low or 1.0)
    axes = figure.panel(LEFT, TOP, RIGHT, BOTTOM, xscale="log", ylim=(low - room, high + room), xlabel="rank")
    axes.set_xlim(ranks[0] / 2**0.3, ranks[-1] * 2**0.3)
    figure.words(LEFT - 40, 50, "loss of real runs over the rank", weight="bold")
    axes.axhline(seen.full, color="black", linestyle=(0, (1, 4)), linewidth=2)
    axes.annotate(f"full fine-tuning {seen.full:.2f}", (1, seen.full), (0, 6), ("axes fraction", "data"),
                  "offset points", ha="right")  # fmt: skip
    names = list(dict.fromkeys(name for name, _ in seen.losses))
    for k, name in enumerate(names):
        colour, dash = chart.LINES[k % 4], chart.DASHES[k % 4]
        mark: dict[str, Any] = {"color": colour, "marker": "osD^"[k % 4], "markeredgecolor": "black"}
        points = [(r, seen.losses[name, r]) for r in ranks if (name, r) in seen.losses]
        axes.plot(*zip(*points, strict=True), color=colour, linestyle=dash, linewidth=4 if name == targets else 1.8)
        for r, loss in points:
            hover = f"{name}, rank {r}: loss {loss:.3f}, {seen.recovered(name, r):.0%} of full fine-tuning's gain"
            chart.dot(axes, r, loss, hover, **mark, markersize=14 if (name, r) == (targets, rank) else 8)
        axes.plot([], [], linestyle=dash, label=cut(name, 16), **mark, markersize=8)
    step = round_marks(high - low + 2 * room)[1]
    heights = [k * step for k in range(math.ceil((low - room) / step), math.floor((high + room) / step) + 1)]
    chart.marks(axes, ranks, heights, "{:g}".format, "{:.2f}".format)
    axes.grid(False)
    legend = figure.keys(LEFT - 40, 81, axes, ncols=2, handlelength=2.5)
    for key, name in zip(legend.get_texts(), names, strict=True):
        key.set_fontweight("bold" if name == targets else "normal")
    if (targets, rank) in seen.losses:
        words = f"{targets}, rank {rank}: {seen.recovered(targets, rank):.0%} of full fine-tuning's gain"
    else:
        words = f"no run of {targets or 'this'} at rank {rank}" if targets in names else ""
    figure.words(LEFT - 40, 122, words, fontsize=12)
