"""Top-k gradients: what they do to the loss, and what they cost on the wire with more and more ranks.

loss |\\                          bytes |        / top-k: (n-1) k (value + index)
     | \\___ without feedback           |      /
     |   \\__ dense                     |----x----- dense ring: 2(n-1)/n N
     |     \\ with feedback             |  /
       step                               ranks n
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from labkit.parallel.compress import TopK
from labkit.plan.collectives import sent_bytes
from labkit.view.axes import Axes
from labkit.view.svg import PALETTE, Picture, headline, line, text
from labkit.view.units import binary_text, bytes_text, number_text

WITH, WITHOUT, DENSE, SEEN = "#2B8CD6", PALETTE[6], PALETTE[2], PALETTE[3]
MOST_RANKS = 4096
Losses = Sequence[float]


def pays_up_to(fraction: float, item_bytes: int = 4) -> float:
    """Up to how many ranks top-k of this share sends less than a dense ring: 2 item / (item + index) / share."""
    return 2 * item_bytes / (item_bytes + 4) / fraction


def sparse(
    fraction: float,
    runs: Mapping[str, Losses],
    numel: int,
    n_ranks: int,
    measured: Mapping[int, float] | None = None,
    title: str = "",
) -> Picture:
    """Loss curves of recorded runs ("dense", "with feedback", "without"), beside bytes a rank sends over the ranks.

    `fraction` of `numel` float32 gradients travel; `measured` maps a number of ranks to bytes that one sent, drawn as
    dots. ValueError for no ranks, a share that is not in (0, 1], and runs without a finite loss."""
    if not 1 <= n_ranks <= MOST_RANKS:
        raise ValueError(f"the picture has 1 to {MOST_RANKS:,} ranks, got {n_ranks:,}")
    law = TopK(fraction)
    sends, dense = law.sent_bytes(numel, 4, n_ranks), sent_bytes("ring", "all_reduce", n_ranks, 4 * numel, 0, 4)
    ratio = f"{sends / dense:.3g} of a dense ring's {bytes_text(dense)}" if dense else "as a dense ring: nothing"
    title = title or f"the largest {fraction:.3g} of {numel:,} gradients, {n_ranks:,} ranks"
    body = [headline(title), text(4, 42, f"a rank sends {bytes_text(sends)} a step, {ratio}")]
    body += _losses(runs) + _bytes(law, numel, n_ranks, dict(measured or {}))
    label = f"{title}: a rank sends {bytes_text(sends)} a step, {ratio}; it pays up to {pays_up_to(fraction):.3g} ranks"
    for name, losses in runs.items():
        label += f"; {name}: last loss {number_text(losses[-1])}"
    for ranks, n_bytes in (measured or {}).items():
        label += f"; measured on {ranks} ranks: {bytes_text(n_bytes)}"
    return Picture("".join(body), 412, label)


def _losses(runs: Mapping[str, Losses]) -> list[str]:
    """Left: loss over steps."""
    finite = [each for losses in runs.values() for each in losses if math.isfinite(each) and each > 0]
    if not finite:
        raise ValueError(f"no run has a loss above 0 that is finite: {', '.join(runs) or 'no runs'}")
    steps = max(len(losses) for losses in runs.values())
    low, high = min(finite), max(finite)
    log = high / low > 30
    ends = (low / 1.2, high * 1.2) if log else (0.0, high * 1.06)
    axes = Axes(58, 84, 378, 340, (0.0, float(max(1, steps - 1))), ends, log_y=log)
    out, x = axes.frame("step", number_text, number_text), 58.0
    for name, losses in runs.items():
        colour, dash = _style(name)
        out.append(axes.path([(t, max(each, ends[0])) for t, each in enumerate(losses)], colour, dash))
        out += [line(x, 66, x + 22, 66, dash, 2.5, colour), text(x + 27, 70, name, size=12)]
        x += 44 + 6.6 * len(name)
    return [*out, text(58, 404, "loss of the whole batch", size=12)]


def _style(name: str) -> tuple[str, str]:
    if name.startswith("dense"):
        return DENSE, "2 3"
    return (WITHOUT, "8 4") if "without" in name else (WITH, "")


def _bytes(law: TopK, numel: int, n_ranks: int, measured: Mapping[int, float]) -> list[str]:
    """Right: bytes over ranks, and where the two meet."""
    ranks = [2**k for k in range(1, 13)]
    top = [(float(n), float(law.sent_bytes(numel, 4, n))) for n in ranks]
    ring = [(float(n), 2 * (n - 1) / n * 4 * numel) for n in ranks]
    values = [y for _, y in (*top, *ring)] + [y for y in measured.values() if y > 0]
    axes = Axes(472, 84, 780, 340, (2.0, 4096.0), (min(values) / 1.5, max(values) * 1.5), log_x=True, log_y=True)
    powers = [2.0**k for k in range(0, 62, 4) if axes.y[0] <= 2**k <= axes.y[1]]
    marks = [2.0, 8.0, 32.0, 128.0, 512.0, 2048.0]
    out = axes.frame("ranks", number_text, binary_text, marks, powers)
    out += [axes.path(top, WITH), axes.path(ring, DENSE, "2 3")]
    out += [line(472, 66, 496, 66, "", 2.5, WITH), text(501, 70, "top-k: all_gather", size=12)]
    out += [line(626, 66, 650, 66, "2 3", 2.5, DENSE), text(655, 70, "dense: all_reduce", size=12)]
    meet = pays_up_to(law.fraction)
    if 2 < meet < 4096:
        x = axes.at(meet, axes.y[0])[0]
        out.append(line(x, 84, x, 340, "4 3"))
    said = f"pays below {meet:,.3g} ranks" if meet > 2 else "pays for no number of ranks"
    out.append(text(472, 404, said, size=12))
    if n_ranks > 1:
        out.append(axes.diamond(n_ranks, law.sent_bytes(numel, 4, n_ranks), PALETTE[4]))
    for n, n_bytes in measured.items():
        out.append(axes.dot(n, n_bytes, SEEN, f"measured on {n} ranks: {n_bytes:,.0f} B"))
    return out
