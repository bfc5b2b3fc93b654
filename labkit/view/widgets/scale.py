"""How should the loss scale move? Growth, backoff, interval and the first scale, on a run that was recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import ipywidgets as widgets

from labkit.train.loss_scale import LossScale
from labkit.view.scale import Replayed, replay, scales
from labkit.view.svg import Picture
from labkit.view.widgets.twin import Twin


class LossScaleExplorer(Twin, widgets.VBox):
    """Sliders over `rule`, replayed on `run`: for each step whether it was finite, or its ceiling (see view.scale).

    Arrow keys move a slider. `.rule` is what they show, `.replayed` what came of it. The real LossScale is run, nothing
    is trained. Where it gives up (no scale is small enough) the picture ends and a line says why. ValueError for a run
    without steps."""

    def __init__(self, run: Sequence[bool | float], rule: LossScale | None = None):
        rule = rule or LossScale()
        if not run:
            raise ValueError("a run of no steps cannot be replayed")
        self.run = tuple(run)
        most = max(len(self.run), rule.interval)
        slider, tip = widgets.FloatSlider, "clean steps in a row before it grows"
        first = round(math.log2(rule.scale))
        self.first = widgets.IntSlider(first, min(0, first), max(40, first), description="first 2^")
        self.growth = slider(rule.growth, min=1.1, max=max(8.0, rule.growth), step=0.1, description="growth")
        self.backoff = slider(rule.backoff, min=0.05, max=0.95, step=0.05, description="backoff")
        self.interval = widgets.IntSlider(rule.interval, 1, most, description="interval", tooltip=tip)
        self.said, self.shown = widgets.HTML(), widgets.HTML()
        self.replayed: Replayed | None = None
        self.picture: Picture | None = None
        controls = [self.first, self.growth, self.backoff, self.interval]
        grid = widgets.GridBox(controls, layout={"grid_template_columns": "repeat(2, 340px)"})
        super().__init__([grid, self.said, self.shown])
        for control in controls:
            control.observe(lambda _: self.draw(), "value")
        self.draw()

    @property
    def rule(self) -> LossScale:
        """The rule that the sliders describe."""
        return LossScale(2.0**self.first.value, self.growth.value, self.backoff.value, self.interval.value)

    def draw(self) -> None:
        """Replay the run and draw it."""
        self.replayed = replay(self.rule, self.run)
        self.said.value = escape(self.replayed.stopped)
        self.picture = scales(self.replayed, self.run)
        self.shown.value = str(self.picture)

    def static(self) -> Picture:
        """The last picture, for an export."""
        assert self.picture
        return self.picture
