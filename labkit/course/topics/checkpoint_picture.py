"""Segments of a checkpointed stack: bytes over the length of a segment, and the flops of one step.

bytes |  .                     .     held at most = inputs of segments + inside of one
      |   .       o          .       o  measured
      |     .  o       o  .
      |         ---x---              x  lowest at k = sqrt(L I / A)
        1      length k         L

forward | backward = two forwards | again

The axis of lengths is logarithmic, so that the square root of the number of layers is in the middle.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from labkit.plan.pocket.segments import Stack
from labkit.view import chart
from labkit.view.svg import PALETTE, round_marks
from labkit.view.units import binary_text, bytes_text, plural

LEFT, RIGHT, TOP, BOTTOM = 84.0, 770.0, 84.0, 312.0
STRIP, TALL = 378.0, 24.0
PEAK, INPUTS, INSIDE, SEEN = chart.LINES[0], PALETTE[1], PALETTE[2], PALETTE[6]


@chart.style()
def segments(
    stack: Stack,
    length: int,
    measured: Mapping[int, float] | None = None,
    cap_bytes: float | None = None,
    title: str = "",
) -> chart.Chart:
    """Bytes held over the length of a segment, with the lowest point and `length` marked, and the flops of its step.

    `measured` maps lengths to bytes, drawn as dots; `cap_bytes` is drawn as a line. ValueError for a length that the
    stack does not have, also in `measured`."""
    count, dots = stack.segments_of(length), dict(measured or {})
    for size in dots:
        stack.segments_of(size)
    held, best = stack.peak_bytes(count), stack.best_length
    low = stack.curve_bytes(best)
    top = max([stack.curve_bytes(1), stack.plain_bytes, held, *dots.values()])
    if cap_bytes and cap_bytes < 2 * top:
        top = max(top, cap_bytes)
    title = title or f"{plural(stack.n_layer, 'layer')} in {plural(count, 'segment')} of at most {length}"
    measurements = "; ".join(f"segments of {size}: {n_bytes:,.0f} B measured" for size, n_bytes in sorted(dots.items()))
    label = (
        f"{title}: {held:,.0f} B held at most, plain {stack.plain_bytes:,.0f} B, lowest at k = {best:.3g} with "
        f"{low:,.0f} B; at most {stack.most_flops(count):.3g} of the flops"
        + (f"; {measurements}" if measurements else "")
    )
    figure = chart.Chart(STRIP + TALL + 24, f"{title}: {bytes_text(held)} held at most", label)
    most = max(stack.n_layer, 2)
    margin = most ** (12 / (RIGHT - LEFT - 24))
    axes = figure.panel(LEFT, TOP, RIGHT, BOTTOM, xscale="log", xlim=(1 / margin, most * margin), ylim=(0, 1.08 * top))
    lengths = np.geomspace(1, stack.n_layer, 97)
    for name, heights, colour, dash in (
        ("held at most", [stack.curve_bytes(k) for k in lengths], PEAK, "-"),
        ("inputs of segments", (stack.n_layer / lengths - 1) * stack.input_bytes, INPUTS, chart.DASHES[1]),
        ("inside of one", lengths * stack.layer_bytes, INSIDE, chart.DASHES[2]),
    ):
        axes.plot(lengths, heights, color=colour, linestyle=dash, label=name)
    if cap_bytes and cap_bytes <= top:
        axes.axhline(cap_bytes, color=SEEN, linestyle=(0, (9, 4)), linewidth=2)
        axes.annotate(f"cap {bytes_text(cap_bytes)}", (1, cap_bytes), (0, 5), ("axes fraction", "data"),
                      "offset points", ha="right")  # fmt: skip
    axes.plot([best, best], [0, 1 + 6 / (BOTTOM - TOP)], color="black", linestyle=(0, (3, 3)), linewidth=1.5,
              transform=axes.get_xaxis_transform(), clip_on=False)  # fmt: skip
    at = min(max(chart.on_page(axes, best, 0)[0], LEFT + 110), RIGHT - 110)
    figure.words(at, TOP - 12, f"lowest at k = {best:.3g}: {bytes_text(low)}", "center")
    chart.dot(axes, length, held, f"chosen: segments of {length}, {bytes_text(held)}", "chosen", **chart.CHOSEN)
    for k, (size, n_bytes) in enumerate(dots.items()):
        hover = f"measured with segments of {size}: {n_bytes:,.0f} B"
        chart.dot(axes, size, n_bytes, hover, "" if k else "measured", color=SEEN)
    powers = [*(2**k for k in range(20) if 2**k < stack.n_layer * 0.8), stack.n_layer]
    axes.set_xlabel("layers in a segment, k")
    chart.marks(axes, powers, round_marks(1.08 * top, 2), "{:g}".format, binary_text)
    figure.keys(LEFT, 42, axes)
    _strip(figure, stack, count)
    return figure


def _strip(figure: chart.Chart, stack: Stack, count: int) -> None:
    """Draw one step as work of three forwards, and behind it the share that is computed again."""
    share = (stack.forwards(count) - stack.n_layer) / stack.n_layer
    words = f"flops of a step, at most {stack.most_flops(count):.3g} of the plain one's; "
    words += f"{stack.forwards(count):,} layer forwards instead of {stack.n_layer:,}"
    axes = figure.panel(LEFT, STRIP, RIGHT, STRIP + TALL, xlim=(0, 4), ylim=(0, 1))
    axes.set_axis_off()
    chart.box(axes, 0, 0, 1, 1, PALETTE[0], "forward", "forward", 13)
    chart.box(axes, 1, 0, 2, 1, PALETTE[7], "backward, two forwards", "backward, two forwards", 13)
    if share:
        chart.box(axes, 3, 0, share, 1, PALETTE[1], f"again: {share:.0%}", f"computed again: {share:.0%}", 13)
    figure.words(LEFT, STRIP + TALL + 18, words, fontsize=12)
