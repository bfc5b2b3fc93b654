"""Two axes and what lies between them: lines, dots and marks, linear or logarithmic, in a part of a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from labkit.view.svg import line, round_marks, text, width_of

Point = tuple[float, float]


@dataclass(frozen=True)
class Axes:
    """A frame of a page: `left`, `top`, `right`, `bottom`, and the values that lie at its edges.

    `log_x` and `log_y` make an axis logarithmic; then its ends are above 0. Values outside are drawn at the edge."""

    left: float
    top: float
    right: float
    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]
    log_x: bool = False
    log_y: bool = False

    def at(self, x: float, y: float) -> Point:
        """The place of a point on the page."""
        across, up = _part(x, self.x, self.log_x), _part(y, self.y, self.log_y)
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)

    def path(self, points: Iterable[Point], colour: str, dash: str = "", width: float = 2.5) -> str:
        """A line through the points that are finite; one that is not leaves a gap."""
        runs: list[list[str]] = [[]]
        for x, y in points:
            if math.isfinite(y):
                runs[-1].append("{:.1f} {:.1f}".format(*self.at(x, y)))
            else:
                runs.append([])
        places = "".join("M" + "L".join(run) for run in runs if len(run) > 1)
        style = f' stroke-dasharray="{dash}"' if dash else ""
        return f'<path d="{places}" fill="none" stroke="{colour}" stroke-width="{width:g}"{style}/>' if places else ""

    def dot(self, x: float, y: float, fill: str, title: str) -> str:
        """A round mark; `title` shows when the pointer rests on it."""
        a, b = self.at(x, y)
        return f'<g><title>{title}</title><circle cx="{a:.1f}" cy="{b:.1f}" r="5" fill="{fill}" stroke="#fff"/></g>'

    def cross(self, x: float, y: float, colour: str, title: str) -> str:
        """A mark of two strokes."""
        a, b = self.at(x, y)
        strokes = f"M{a - 5:.1f} {b - 5:.1f}l10 10M{a - 5:.1f} {b + 5:.1f}l10 -10"
        return f'<g><title>{title}</title><path d="{strokes}" stroke="{colour}" stroke-width="3"/></g>'

    def diamond(self, x: float, y: float, fill: str) -> str:
        """The mark of what is chosen."""
        a, b = self.at(x, y)
        return f'<path d="M{a:.1f} {b - 8:.1f}l8 8l-8 8l-8-8z" fill="{fill}" stroke="currentColor"/>'

    def frame(
        self,
        across: str,
        words_x: Callable[[float], str],
        words_y: Callable[[float], str],
        marks_x: Sequence[float] | None = None,
        marks_y: Sequence[float] | None = None,
    ) -> list[str]:
        """Both axes with their marks, and the name of the lower one below it."""
        out = [
            line(self.left, self.bottom, self.right, self.bottom),
            line(self.left, self.top, self.left, self.bottom),
        ]
        taken = -math.inf
        for mark in self._marks(self.x, self.log_x) if marks_x is None else marks_x:
            x, said = self.at(mark, self.y[0])[0], words_x(mark)
            half = width_of(said, 12) / 2
            if x - half > taken:
                out += [line(x, self.bottom, x, self.bottom + 5), text(x, self.bottom + 19, said, "middle", 12)]
                taken = x + half + 4
        taken = math.inf
        for mark in self._marks(self.y, self.log_y) if marks_y is None else marks_y:
            y = self.at(self.x[0], mark)[1]
            if y + 14 < taken:
                out += [line(self.left, y, self.right, y, "1 5"), text(self.left - 8, y + 4, words_y(mark), "end", 12)]
                taken = y
        return [*out, text((self.left + self.right) / 2, self.bottom + 38, across, "middle", 12)]

    def _marks(self, ends: tuple[float, float], log: bool) -> list[float]:
        low, high = ends
        if not log:
            return [low + each for each in round_marks(high - low)] if low else round_marks(high)
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        every = max(1, math.ceil((last - first) / 6))
        return [10.0**power for power in range(first, last + 1, every)]


def _part(value: float, ends: tuple[float, float], log: bool) -> float:
    low, high = ends
    value = min(max(value, low), high)
    if log:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low)
