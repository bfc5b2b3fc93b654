"""Where does the time go, and which part should be made faster? Ranks, links, data and a serial share."""

from __future__ import annotations

import math
from collections.abc import Mapping

import ipywidgets as widgets

from labkit.course.topics.bottleneck_picture import MOST, explored, split_of
from labkit.course.widgets.explorer import Explorer, in_two_columns
from labkit.plan.breakdown import Breakdown
from labkit.plan.pocket.scaling import fit_serial
from labkit.plan.step.bottlenecks import scaled
from labkit.probe.recording import Recording
from labkit.view.svg import Drawing

TIMES = (1.0, 1.5, 2.0, 4.0, 8.0, 16.0, math.inf)
"""By how many times a part may get faster."""


class BottleneckExplorer(Explorer):
    """Sliders over recorded steps {n_ranks: recording of all ranks, or its split}; arrow keys move a slider.

    Spans named `data` are time for input. The serial share starts where it fits the recorded steps; `.serial_fit` keeps
    it, and `.splits` the seconds by part. `.picture` is the last valid picture. ValueError for fewer than two sizes."""

    recorded_over = ("ranks",)

    def __init__(self, steps: Mapping[int, Recording | Breakdown], data: str = "data") -> None:
        self.splits = {n: step if isinstance(step, Breakdown) else split_of(step, data) for n, step in steps.items()}
        if len(self.splits) < 2:
            raise ValueError(f"a curve needs recorded steps of two sizes or more, got {sorted(self.splits)}")
        points = scaled({n: split.total for n, split in self.splits.items()})
        self.serial_fit = fit_serial([(point.n_ranks, point.speed_up) for point in points])
        slider = widgets.SelectionSlider
        ranks = sorted({*(2**k for k in range(MOST.bit_length())), *self.splits})
        self.ranks = slider(options=[(f"{n:,}", n) for n in ranks], value=max(self.splits), description="ranks n")
        options = [("gone" if times == math.inf else f"{times:g} x", times) for times in TIMES]
        self.wire = slider(options=options, value=1.0, description="wire faster", tooltip="exposed communication")
        self.data = slider(options=options, value=1.0, description="data faster", tooltip="waiting for input")
        share = round(200 * self.serial_fit) / 2  # rounded to a step of the slider
        self.serial = widgets.FloatSlider(share, min=0, max=100, step=0.5, description="serial %", readout_format=".1f")
        controls = [self.ranks, self.serial, self.wire, self.data]
        super().__init__([in_two_columns(controls)], controls)

    def drawn(self) -> Drawing:
        """The picture for the present controls."""
        faster = {"communication": self.wire.value, "data": self.data.value}
        self.note = f"the recorded steps fit a serial share of {self.serial_fit:.1%}"
        return explored(self.splits, self.serial.value / 100, self.ranks.value, faster)
