"""Segments of a checkpointed stack: bytes over the length of a segment, and what one step computes.

bytes |  .                     .     held at most = inputs of segments + inside of one
      |   .       o          .       o  measured
      |     .  o       o  .
      |         ---x---              x  lowest at k = sqrt(L I / A)
        1      length k         L

forward | backward = two forwards | again

Lengths lie along a logarithmic axis, on which the square root of the layers is in the middle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from labkit.plan.segments import Stack
from labkit.view.svg import PALETTE, Picture, box, headline, line, round_marks, text
from labkit.view.units import binary_text, bytes_text

LEFT, RIGHT, TOP, BOTTOM = 84.0, 770.0, 84.0, 312.0
STRIP, TALL = 378.0, 24.0
PEAK, INPUTS, INSIDE, SEEN = "#2B8CD6", PALETTE[1], PALETTE[2], PALETTE[6]


def segments(
    stack: Stack,
    length: int,
    measured: Mapping[int, float] | None = None,
    cap_bytes: float | None = None,
    title: str = "",
) -> Picture:
    """Bytes held over the length of a segment, with the lowest point and `length` marked, and the flops of its step.

    `measured` maps lengths to bytes, drawn as dots; `cap_bytes` is drawn as a line. ValueError for a length that the
    stack does not have, also in `measured`."""
    count, dots = stack.segments_of(length), dict(measured or {})
    for each in dots:
        stack.segments_of(each)
    held, best = stack.peak_bytes(count), stack.best_length
    low = stack.curve_bytes(best)
    top = max([stack.curve_bytes(1), stack.plain_bytes, held, *dots.values()])
    if cap_bytes and cap_bytes < 2 * top:
        top = max(top, cap_bytes)
    frame = Frame(stack.n_layer, 1.08 * top)
    title = title or f"{stack.n_layer} layers in {count} segment{'s' * (count > 1)} of at most {length}"
    body = [headline(f"{title}: {bytes_text(held)} held at most"), *_legend(bool(dots))]
    body += frame.axes()
    lengths = [stack.n_layer ** (k / 96) for k in range(97)]
    body += [
        frame.path([(k, (stack.n_layer / k - 1) * stack.input_bytes) for k in lengths], INPUTS, "8 4"),
        frame.path([(k, k * stack.layer_bytes) for k in lengths], INSIDE, "2 3"),
        frame.path([(k, stack.curve_bytes(k)) for k in lengths], PEAK, ""),
    ]
    if cap_bytes and cap_bytes <= top:
        y = frame.at(1, cap_bytes)[1]
        body += [line(LEFT, y, RIGHT, y, "9 4", 2, SEEN), text(RIGHT, y - 5, f"cap {bytes_text(cap_bytes)}", "end", 12)]
    x, y = frame.at(best, low)
    words = f"lowest at k = {best:.3g}: {bytes_text(low)}"
    body += [
        line(x, TOP - 6, x, BOTTOM, "3 3", 1.5),
        text(min(max(x, LEFT + 110), RIGHT - 110), TOP - 12, words, "middle"),
    ]
    x, y = frame.at(length, held)
    body.append(f'<path d="M{x:.1f} {y - 8:.1f}l8 8l-8 8l-8-8z" fill="{PALETTE[4]}" stroke="currentColor"/>')
    for each, n_bytes in dots.items():
        x, y = frame.at(each, n_bytes)
        said = f"measured with segments of {each}: {n_bytes:,.0f} B"
        body.append(f'<g><title>{said}</title><circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{SEEN}"/></g>')
    body += _strip(stack, count)
    told = "; ".join(f"segments of {each}: {n_bytes:,.0f} B measured" for each, n_bytes in sorted(dots.items()))
    label = (
        f"{title}: {held:,.0f} B held at most, plain {stack.plain_bytes:,.0f} B, lowest at k = {best:.3g} with "
        f"{low:,.0f} B; at most {stack.most_flops(count):.3g} of the flops" + (f"; {told}" if told else "")
    )
    return Picture("".join(body), STRIP + TALL + 24, label)


class Frame:
    """Lengths 1 to L along a logarithmic axis, on which the lowest point of equal layers is in the middle; bytes up."""

    def __init__(self, n_layer: int, top: float) -> None:
        """L layers and the bytes at the upper edge."""
        self.n_layer, self.top = n_layer, top

    def at(self, length: float, n_bytes: float) -> tuple[float, float]:
        """The place of a point."""
        along = math.log(length) / math.log(self.n_layer) if self.n_layer > 1 else 0.5
        return LEFT + 12 + along * (RIGHT - LEFT - 24), BOTTOM - n_bytes / self.top * (BOTTOM - TOP)

    def path(self, points: list[tuple[float, float]], colour: str, dash: str) -> str:
        """A line through points of (length, bytes)."""
        places = "L".join("{:.1f} {:.1f}".format(*self.at(*point)) for point in points)
        style = f' stroke-dasharray="{dash}"' if dash else ""
        return f'<path d="M{places}" fill="none" stroke="{colour}" stroke-width="2.5"{style}/>'

    def axes(self) -> list[str]:
        """Both axes with their marks, and the name of the lower one."""
        out = [line(LEFT, BOTTOM, RIGHT, BOTTOM), line(LEFT, TOP, LEFT, BOTTOM)]
        taken = -math.inf
        for mark in (*(2**k for k in range(20) if 2**k < self.n_layer * 0.8), self.n_layer):
            x = self.at(mark, 0)[0]
            if x - taken > 30:
                out += [line(x, BOTTOM, x, BOTTOM + 5), text(x, BOTTOM + 19, mark, "middle", 12)]
                taken = x
        for n_bytes in round_marks(self.top, 2):
            y = self.at(1, n_bytes)[1]
            out += [line(LEFT, y, RIGHT, y, "1 5"), text(LEFT - 8, y + 4, binary_text(n_bytes), "end", 12)]
        return [*out, text((LEFT + RIGHT) / 2, BOTTOM + 37, "layers in a segment, k", "middle", 12)]


def _legend(dots: bool) -> list[str]:
    """The legend, in words."""
    out, x = [], LEFT
    rows = (("held at most", PEAK, ""), ("inputs of segments", INPUTS, "8 4"), ("inside of one", INSIDE, "2 3"))
    for name, colour, dash in rows:
        out += [line(x, 42, x + 26, 42, dash, 2.5, colour), text(x + 32, 46, name, size=12)]
        x += 50 + 7.2 * len(name)
    out += [f'<path d="M{x + 8:.1f} 34l8 8l-8 8l-8-8z" fill="{PALETTE[4]}" stroke="currentColor"/>']
    out += [text(x + 22, 46, "chosen", size=12)]
    if dots:
        out += [f'<circle cx="{x + 88:.1f}" cy="42" r="5" fill="{SEEN}"/>', text(x + 98, 46, "measured", size=12)]
    return out


def _strip(stack: Stack, count: int) -> list[str]:
    """One step as three forwards of work, and what is computed again behind them."""
    unit = (RIGHT - LEFT) / 4
    again = (stack.forwards(count) - stack.n_layer) / stack.n_layer
    words = f"again: {again:.0%}" if again * unit > 80 else ""
    said = f"flops of a step, at most {stack.most_flops(count):.3g} of the plain one's; "
    said += f"{stack.forwards(count):,} layer forwards instead of {stack.n_layer:,}"
    out = [box(LEFT, STRIP, unit, TALL, PALETTE[0], "forward")]
    out.append(box(LEFT + unit, STRIP, 2 * unit, TALL, PALETTE[7], "backward, two forwards"))
    if again:
        out.append(box(LEFT + 3 * unit, STRIP, again * unit, TALL, PALETTE[1], words, f"computed again: {again:.0%}"))
    return [*out, text(LEFT, STRIP + TALL + 18, said, size=12)]
