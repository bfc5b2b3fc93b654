"""Top-k gradients: the loss of runs with them, and the bytes that a rank sends over the number of ranks.

loss |\\                          bytes |        / top-k: (n-1) k (value + index)
     | \\___ without feedback           |      /
     |   \\__ dense                     |----x----- dense ring: 2(n-1)/n N
     |     \\ with feedback             |  /
       step                               ranks n
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.parallel.compress import TopK
from labkit.plan.machine.collectives import sent_bytes
from labkit.view import chart
from labkit.view.svg import PALETTE
from labkit.view.units import binary_text, bytes_text, number_text, plural

WITH, WITHOUT, DENSE, SEEN = chart.LINES[0], PALETTE[6], PALETTE[2], PALETTE[3]
MOST_RANKS = 4096
Losses = Sequence[float]


def pays_up_to(fraction: float, item_bytes: int = 4) -> float:
    """The number of ranks up to which top-k of this share sends less than a dense ring.

    It is 2 item / (item + index) / share, with the bytes of a number and of its index, which are 4."""
    return 2 * item_bytes / (item_bytes + 4) / fraction


@chart.style()
def sparse(
    fraction: float,
    runs: Mapping[str, Losses],
    numel: int,
    n_ranks: int,
    measured: Mapping[int, float] | None = None,
    title: str = "",
) -> chart.Chart:
    """Loss curves of recorded runs ("dense", "with feedback", "without"), beside bytes a rank sends over the ranks.

    A share `fraction` of `numel` float32 gradients is sent; `measured` maps a number of ranks to the bytes that one
    sent, drawn as dots. ValueError for no ranks, a share that is not in (0, 1], and runs without a finite loss."""
    if not 1 <= n_ranks <= MOST_RANKS:
        raise ValueError(f"the picture has 1 to {MOST_RANKS:,} ranks, got {n_ranks:,}")
    law = TopK(fraction)
    sends, dense = law.sent_bytes(numel, 4, n_ranks), sent_bytes("ring", "all_reduce", n_ranks, 4 * numel, 0, 4)
    ratio = f"{sends / dense:.3g} of a dense ring's {bytes_text(dense)}" if dense else "as a dense ring: nothing"
    title = title or f"the largest {fraction:.3g} of {numel:,} gradients, {plural(n_ranks, 'rank')}"
    label = f"{title}: a rank sends {bytes_text(sends)} a step, {ratio}; it pays up to {pays_up_to(fraction):.3g} ranks"
    for name, losses in runs.items():
        label += f"; {name}: last loss {number_text(losses[-1])}"
    for ranks, n_bytes in (measured or {}).items():
        label += f"; measured on {ranks} ranks: {bytes_text(n_bytes)}"
    figure = chart.Chart(412, title, label)
    figure.words(4, 42, f"a rank sends {bytes_text(sends)} a step, {ratio}")
    _losses(figure, runs)
    _bytes(figure, law, numel, n_ranks, dict(measured or {}))
    return figure


def _losses(figure: chart.Chart, runs: Mapping[str, Losses]) -> None:
    """On the left, the loss over the steps."""
    finite = [loss for losses in runs.values() for loss in losses if math.isfinite(loss) and loss > 0]
    if not finite:
        raise ValueError(f"no run has a loss above 0 that is finite: {', '.join(runs) or 'no runs'}")
    low, high = min(finite), max(finite)
    axes = figure.panel(58, 84, 378, 340, xlabel="step", ylim=(0, high * 1.06))
    if high / low > 30:
        axes.set(yscale="log", ylim=(low / 1.2, high * 1.2))
    for name, losses in runs.items():
        colour, dash = _style(name)
        axes.plot([max(loss, axes.get_ylim()[0]) for loss in losses], color=colour, linestyle=dash, label=name)
    axes.set_xlim(0, max(1, max(map(len, runs.values())) - 1))
    chart.marks(axes, x_text=number_text, y_text=number_text)
    figure.words(58, 404, "loss of the whole batch", fontsize=12)
    figure.keys(58, 66, axes)


def _style(name: str) -> tuple[str, Any]:
    if name.startswith("dense"):
        return DENSE, chart.DASHES[2]
    return (WITHOUT, chart.DASHES[1]) if "without" in name else (WITH, "-")


def _bytes(figure: chart.Chart, law: TopK, numel: int, n_ranks: int, measured: Mapping[int, float]) -> None:
    """On the right, the bytes that a rank sends over the number of ranks, and where top-k and the dense ring meet."""
    ranks = [2**k for k in range(1, 13)]
    top = [law.sent_bytes(numel, 4, n) for n in ranks]
    ring = [2 * (n - 1) / n * 4 * numel for n in ranks]
    values = [value for value in (*top, *ring, *measured.values()) if value > 0]
    axes = figure.panel(472, 84, 780, 340, xscale="log", yscale="log", xlim=(2, 4096), xlabel="ranks")
    axes.set_ylim(min(values) / 1.5, max(values) * 1.5)
    axes.plot(ranks, top, color=WITH, linestyle="-", label="top-k: all_gather")
    axes.plot(ranks, ring, color=DENSE, linestyle=chart.DASHES[2], label="dense: all_reduce")
    meet = pays_up_to(law.fraction)
    if 2 < meet < 4096:
        axes.axvline(meet, color="black", linestyle=(0, (4, 3)), linewidth=1)
    words = f"pays below {meet:,.3g} ranks" if meet > 2 else "pays for no number of ranks"
    figure.words(472, 404, words, fontsize=12)
    chart.marks(axes, [2, 8, 32, 128, 512, 2048], [2.0**power for power in range(0, 62, 4)], number_text, binary_text)
    figure.keys(472, 66, axes)
    if n_ranks > 1:
        chart.dot(axes, n_ranks, law.sent_bytes(numel, 4, n_ranks), f"chosen: {n_ranks} ranks", **chart.CHOSEN)
    for n, n_bytes in measured.items():
        chart.dot(axes, n, n_bytes, f"measured on {n} ranks: {n_bytes:,.0f} B", color=SEEN)
