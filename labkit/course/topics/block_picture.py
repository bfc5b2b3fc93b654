"""What rounding in blocks does to numbers beside an outlier: the error of each of them, format by format.

one scale      . . . . . . . . . . | . . . . . .     all are as coarse as the outlier makes them
tiles          . . . . . . . . . . | . . . . . .     only those of its tile are
mx, nvfp4      small blocks: few share a scale with it
                                   ^ the outlier
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.train.blocks import MX_BLOCK, Quantized, mx, nvfp4, tiles
from labkit.train.formats import E4M3, round_to
from labkit.view import chart

N, PLACE = 128, 77
"""Numbers that are shown, and where the outlier stands among them."""
LEAST = 2.0**-9
"""Errors below this are drawn here."""


def numbers(outlier: float, seed: int = 0) -> Tensor:
    """128 normal numbers, one of which is replaced by the outlier.   fp32 [128]"""
    x = torch.randn(N, generator=torch.Generator().manual_seed(seed))
    x[PLACE] = outlier
    return x


def held(x: Tensor, block: int) -> dict[str, Tensor]:
    """What each way of quantizing makes of numbers [n]: name -> [n]. `block`: numbers of a tile.

    ValueError for a tile of no numbers."""
    if block < 1:
        raise ValueError(f"a tile has at least one number, got {block}")
    unit = x.abs().max().clamp(min=2.0**-100) / E4M3.largest
    row = x[None]
    ways: dict[str, Quantized] = {f"e4m3, a scale for each {block}": tiles(row, 1, block)}
    ways |= {f"mx: e4m3, a power of two for each {MX_BLOCK}": mx(row), "nvfp4: e2m1, a scale for each 16": nvfp4(row)}
    return {"e4m3, one scale": round_to(x / unit, E4M3) * unit} | {
        name: way.dequantized()[0] for name, way in ways.items()
    }


def errors(x: Tensor, block: int) -> dict[str, Tensor]:
    """The error of each number over its size, from 0 to 1 where it becomes zero.   [n] -> name: [n]"""
    return {name: (kept - x).abs() / x.abs().clamp(min=2.0**-100) for name, kept in held(x, block).items()}


@chart.style()
def beside_an_outlier(outlier: float, block: int, seed: int = 0) -> chart.Chart:
    """Four rows, one a way of quantizing; the height of a dot is the error of a number relative to its size."""
    seen = errors(numbers(outlier, seed), block)
    others = {name: torch.cat([error[:PLACE], error[PLACE + 1 :]]) for name, error in seen.items()}
    notes = {name: f"median {float(e.median()):.1%}, {int((e == 1).sum())} became zero" for name, e in others.items()}
    title = f"{N} numbers, one of them {outlier:g}"
    figure = chart.Chart(70 + 104 * len(seen), title, f"{title}: " + "; ".join(f"{k}: {v}" for k, v in notes.items()))
    for row, (name, error) in enumerate(seen.items()):
        top = 62 + 104 * row
        figure.words(58, top - 8, f"{name}: {notes[name]}", fontsize=12)
        axes = figure.panel(58, top, 780, top + 56, yscale="log", ylim=(LEAST / 1.4, 1.6), xlim=(-1, N))
        axes.plot(error.clamp(min=LEAST), linestyle="", marker=".", markersize=5, color=chart.LINES[0])
        axes.axvline(PLACE, color=chart.LINES[1], linewidth=1)
        chart.marks(axes, [0, 32, 64, 96, 127], [2.0**-8, 2.0**-4, 1.0], "{:.0f}".format, "{:.1%}".format)
    return figure
