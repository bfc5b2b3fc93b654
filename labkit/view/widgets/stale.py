"""How long may a step be when its gradient is old? Staleness and learning rate on a quadratic, beside recorded runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import ipywidgets as widgets

from labkit.view.stale import HIGH, LOW, MOST, Seen, stale
from labkit.view.svg import Picture
from labkit.view.units import parsed
from labkit.view.widgets.twin import Twin


class StaleExplorer(Twin, widgets.VBox):
    """Sliders for staleness and learning rate; the curvature is typed. Arrow keys move a slider.

    `runs` are recorded runs, drawn on the map. `.picture` is the last picture that made sense; a curvature that is no
    number leaves it and says why."""

    def __init__(
        self, runs: Sequence[Seen] = (), staleness: int = 4, lr: float = 0.1, curvature: float = 1.0, steps: int = 80
    ) -> None:
        self.runs, self.steps = tuple(runs), steps
        self.staleness = widgets.IntSlider(staleness, 0, MOST, description="staleness", tooltip="steps")
        lr = 10 ** (round(math.log10(lr) * 40) / 40)  # where the slider can stand: the page would move it there
        self.lr = widgets.FloatLogSlider(lr, min=-2, max=0.5, step=0.025, description="lr", readout_format=".3g")
        self.curvature = widgets.Text(f"{curvature:g}", description="curvature", continuous_update=False)
        self.said, self.shown = widgets.HTML(), widgets.HTML()
        self.picture: Picture | None = None
        super().__init__([self.staleness, self.lr, self.curvature, self.said, self.shown])
        for control in (self.staleness, self.lr, self.curvature):
            control.observe(lambda _: self.draw(), "value")
        self.draw()

    def draw(self) -> None:
        """Draw for the present controls; what makes no sense is told, and the picture stays."""
        try:
            rate = self.lr.value * parsed(self.curvature.value, "")
            if not LOW / 100 <= rate <= HIGH * 100:
                raise ValueError(f"lr × curvature is {rate:.3g}, and the picture goes from {LOW:g} to {HIGH:g}")
            self.picture = stale(self.staleness.value, rate, self.runs, self.steps)
        except ValueError as error:
            self.said.value = escape(f"{error}: the picture is the last one that made sense")
            return
        self.shown.value, self.said.value = str(self.picture), ""

    def static(self) -> Picture:
        """The last picture, for an export."""
        assert self.picture
        return self.picture
