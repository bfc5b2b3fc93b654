"""Which gradients does a format lose? Change the loss scale, the format and the layer, and see them shift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets

from labkit.course.widgets.explorer import Explorer, in_a_row
from labkit.probe.grads import GradientTable
from labkit.train.formats import FORMATS, Format
from labkit.view.histogram import histogram
from labkit.view.svg import Drawing

ALL, MOST = "all layers", 32
FLOATS = tuple(entry for entry in FORMATS.values() if not entry.integer)


class GradientHistogram(Explorer):
    """A slider for the loss scale (a power of two, 0 to 32), and menus of formats and layers, over a GradientTable.

    Left and right arrow keys move the slider. The axis stays fixed while the gradients move along it. `formats` are the
    choices of the menu. ValueError for a table without gradients, or a first format that is not among them."""

    recorded_over = ("scale",)
    most_frames = 11  # a chart takes about 100 ms

    def __init__(
        self,
        table: GradientTable,
        log2_scale: int = 0,
        format: str = "fp16",
        formats: tuple[Format, ...] = FLOATS,
    ):
        self.table, self.formats = table, {entry.name: entry for entry in formats}
        layers: Mapping[str, Any] = {ALL: ""} | {row.name: row.name for row in table if row.n}
        if len(layers) == 1:
            raise ValueError("no layer of this table has a gradient: run a backward pass first")
        if format not in self.formats:
            raise ValueError(f"format must be one of {', '.join(self.formats)}, got {format!r}")
        low, high = table.span
        self.page = (min(low, -32) - 1, max(high + 24, 18))
        self.scale = widgets.IntSlider(
            min(max(log2_scale, 0), MOST), 0, MOST, description="scale 2^", tooltip="the loss is multiplied by 2^this"
        )
        self.format = widgets.Dropdown(options=[*self.formats], value=format, description="format")
        self.layer = widgets.Dropdown(options=list(layers.items()), value="", description="layer")
        super().__init__([self.scale, in_a_row([self.format, self.layer])], [self.scale, self.format, self.layer])

    def drawn(self) -> Drawing:
        """The histogram for the present controls."""
        chosen = self.formats[self.format.value]
        return histogram(self.table, chosen, self.scale.value, self.layer.value, span=self.page)
