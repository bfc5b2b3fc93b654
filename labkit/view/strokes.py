"""A bent arrow between two discs: it goes around discs in its way, and beside the arrow of the other direction.

from o--------.
                `-----> o to          a quadratic curve through one pull point (Bezier)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from labkit.view.places import Spot


@dataclass(frozen=True)
class Stroke:
    """A curve from `a` to `b`, bent towards `pull`."""

    a: Spot
    pull: Spot
    b: Spot

    @classmethod
    def between(cls, a: Spot, b: Spot, gap: float, aside: float = 0.0, others: Iterable[Spot] = ()) -> Stroke:
        """From the edge of the disc around `a` to that around `b`, `gap` from their middle.

        `aside` moves it to its left, so that the arrows of both directions lie beside each other. It bends around
        `others`, the middles of other discs, if one lies in its way."""
        (x1, y1), (x2, y2) = a, b
        length = math.hypot(x2 - x1, y2 - y1) or 1.0
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        blocked = any(_near(spot, a, (ux, uy), length) < gap + 4 for spot in others)
        bend = 2 * aside + (0.28 * length + gap if blocked else 0.0)
        pull = ((x1 + x2) / 2 + uy * bend, (y1 + y2) / 2 - ux * bend)
        shift = (uy * aside, -ux * aside)
        start, end = (_leave(spot, pull, gap, shift) for spot in (a, b))
        return cls(start, pull, end)

    def at(self, share: float) -> Spot:
        """The place on the curve at its parameter `share`, from 0 at `a` to 1 at `b`."""
        p, q, r = (1 - share) ** 2, 2 * share * (1 - share), share**2
        return tuple(p * a + q * c + r * b for a, c, b in zip(self.a, self.pull, self.b, strict=True))  # type: ignore[return-value]

    def svg(self, width: float, hover: str, head: bool = True) -> str:
        """The arrow, or a line without its head; resting the pointer near it shows `hover`."""
        (x1, y1), (px, py), (x2, y2) = self.a, self.pull, self.b
        length = math.hypot(x2 - px, y2 - py) or 1.0
        ux, uy, long = (x2 - px) / length, (y2 - py) / length, (5 + 1.6 * width) * head
        path = f"M{x1:.1f} {y1:.1f}Q{px:.1f} {py:.1f} {x2 - 0.8 * ux * long:.1f} {y2 - 0.8 * uy * long:.1f}"
        corners = ((x2 - long * (ux + s * 0.45 * uy), y2 - long * (uy - s * 0.45 * ux)) for s in (1, -1))
        tip = "".join(f"L{x:.1f} {y:.1f}" for x, y in corners)
        return (
            f"<g><title>{hover}</title>"
            f'<path d="{path}" fill="none" stroke="#000" stroke-opacity="0" stroke-width="12"/>'
            f'<path d="{path}" fill="none" stroke="currentColor" stroke-width="{width:.2f}"/>'
            + (f'<path d="M{x2:.1f} {y2:.1f}{tip}z"/></g>' if head else "</g>")
        )


def _near(spot: Spot, a: Spot, along: Spot, length: float) -> float:
    """The distance of a spot from the straight piece of this length that begins at `a` in the direction `along`."""
    dx, dy = spot[0] - a[0], spot[1] - a[1]
    at = min(length, max(0.0, dx * along[0] + dy * along[1]))
    return math.hypot(dx - at * along[0], dy - at * along[1])


def _leave(spot: Spot, towards: Spot, gap: float, shift: Spot) -> Spot:
    """The place, moved by `shift`, at which a line to `towards` leaves the disc of radius `gap` around a spot."""
    x, y = spot[0] + shift[0], spot[1] + shift[1]
    length = math.hypot(towards[0] - x, towards[1] - y) or 1.0
    return x + (towards[0] - x) / length * gap, y + (towards[1] - y) / length * gap
