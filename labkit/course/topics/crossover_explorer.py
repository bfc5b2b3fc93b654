"""When does a ring beat a tree? Change the number of ranks, the latency and the bandwidth, and see."""

from __future__ import annotations

import math

import ipywidgets as widgets

from labkit.course.widgets.explorer import Explorer
from labkit.plan.machine.collectives import Line
from labkit.view.lines import laws
from labkit.view.svg import Drawing

MOST_RANKS = 64
STEP = 0.01
"""The step of a slider in decades, 2.3%."""


class CrossoverExplorer(Explorer):
    """Sliders over the laws of all_reduce, starting at `link` (your own, as measured) and `n_ranks` (2 to 64).

    A link outside the sliders' range starts at their end; `.link` is the link that they show. A browser rounds a slider
    to its nearest step as soon as it is drawn. A slider that is within that rounding of its start therefore still means
    the measured number, so that this picture shows the same crossover as all others of this link."""

    recorded_over = ("ranks",)
    most_frames = 14  # a chart takes about 60 ms
    live_page = "collectives"

    def __init__(self, link: Line, n_ranks: int = 4):
        self.ranks = widgets.IntSlider(min(max(n_ranks, 2), MOST_RANKS), 2, MOST_RANKS, description="ranks")
        alpha, rate = _inside(link.alpha_s * 1e6, 0.1, 1e4), _inside(link.bandwidth / 1e9, 1e-2, 1e3)
        self.alpha = widgets.FloatLogSlider(alpha, min=-1, max=4, step=STEP, description="alpha, us")
        self.rate = widgets.FloatLogSlider(rate, min=-2, max=3, step=STEP, description="GB/s")
        self._began = alpha, rate
        controls = (self.ranks, self.alpha, self.rate)
        super().__init__(controls, controls)

    @property
    def link(self) -> Line:
        """The link that the sliders describe."""
        shown = (self.alpha.value, self.rate.value)
        alpha, rate = (_unmoved(value, began) for value, began in zip(shown, self._began, strict=True))
        return Line(alpha * 1e-6, 1e-9 / rate)

    def drawn(self) -> Drawing:
        """The laws for the present controls."""
        return laws(self.ranks.value, self.link)


def _unmoved(value: float, began: float) -> float:
    """The start of a slider, if it is within half a step of it, to which a browser rounds; else the value."""
    return began if abs(math.log10(value / began)) <= STEP / 2 * (1 + 1e-6) else value


def _inside(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
