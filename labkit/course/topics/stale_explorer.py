"""How long may a step be if its gradient is old? Staleness and learning rate on a quadratic, with recorded runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ipywidgets as widgets

from labkit.course.topics.stale_picture import HIGH, LOW, MOST, Seen, stale
from labkit.course.widgets.explorer import Explorer
from labkit.view.svg import Drawing
from labkit.view.units import parsed


class StaleExplorer(Explorer):
    """Sliders for staleness and learning rate, and a field for the curvature. Arrow keys move a slider.

    `runs` are recorded runs, drawn on the map. `.picture` is the last valid picture; a curvature that is no number
    keeps it and shows the reason."""

    recorded_over = ("staleness",)
    most_frames = 9  # a chart takes about 60 ms

    def __init__(
        self, runs: Sequence[Seen] = (), staleness: int = 4, lr: float = 0.1, curvature: float = 1.0, steps: int = 80
    ) -> None:
        self.runs, self.steps = tuple(runs), steps
        self.staleness = widgets.IntSlider(staleness, 0, MOST, description="staleness", tooltip="steps")
        lr = 10 ** (round(math.log10(lr) * 40) / 40)  # rounded to a step of the slider, as the page would do
        self.lr = widgets.FloatLogSlider(lr, min=-2, max=0.5, step=0.025, description="lr", readout_format=".3g")
        self.curvature = widgets.Text(f"{curvature:g}", description="curvature", continuous_update=False)
        controls = [self.staleness, self.lr, self.curvature]
        super().__init__(controls, controls)

    def drawn(self) -> Drawing:
        """The picture for the present controls. ValueError for a curvature that is no number, or far off the map."""
        rate = self.lr.value * parsed(self.curvature.value, "")
        if not LOW / 100 <= rate <= HIGH * 100:
            raise ValueError(f"lr × curvature is {rate:.3g}, and the picture goes from {LOW:g} to {HIGH:g}")
        return stale(self.staleness.value, rate, self.runs, self.steps)
