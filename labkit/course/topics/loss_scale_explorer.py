"""How should the loss scale move? Growth, backoff, interval and the first scale, on a recorded run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import ipywidgets as widgets

from labkit.course.topics.loss_scale_picture import Replayed, replay, scales
from labkit.course.widgets.explorer import Explorer, in_two_columns
from labkit.train.loss_scale import LossScale
from labkit.view.svg import Drawing


class LossScaleExplorer(Explorer):
    """Sliders over `rule`, replayed on `run`: for each step a bool or a ceiling (see loss_scale_picture.py).

    Arrow keys move a slider. `.rule` is the shown rule, `.replayed` its result. The real LossScale runs, but nothing is
    trained. If it gives up (no scale is small enough), the picture ends there and a line says why. ValueError for a run
    without steps."""

    recorded_over = ("interval",)
    most_frames = 16  # a chart takes about 60 ms

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
        self.replayed: Replayed | None = None
        controls = [self.first, self.growth, self.backoff, self.interval]
        super().__init__([in_two_columns(controls)], controls)

    @property
    def rule(self) -> LossScale:
        """The rule that the sliders describe."""
        return LossScale(2.0**self.first.value, self.growth.value, self.backoff.value, self.interval.value)

    def drawn(self) -> Drawing:
        """The run, replayed with the present rule."""
        self.replayed = replay(self.rule, self.run)
        self.note = escape(self.replayed.stopped)
        return scales(self.replayed, self.run)
