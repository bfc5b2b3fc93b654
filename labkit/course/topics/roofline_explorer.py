"""What limits a model's step, compute or memory? Choose the device, the precision and the rows, and see."""

from __future__ import annotations

import ipywidgets as widgets

from labkit.course.widgets.explorer import Explorer
from labkit.plan.machine.devices import DEVICES
from labkit.plan.machine.hardware import PRECISIONS, Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.step.roofline import operations, setting_in
from labkit.view.roofline import roofline
from labkit.view.svg import Drawing

MOST_ROWS = 64


class RooflineExplorer(Explorer):
    """Menus of devices and precisions and a slider of rows, over the ops of `shape` (GPT-2 if none is given).

    `hardware`: the name of a preset to begin with, or your own Hardware (as measured), which then comes first in the
    menu. `.chosen` is the shown Hardware. ValueError for an unknown preset or precision, and rows not in 1 to 64."""

    recorded_over = ("rows",)
    most_frames = 10  # a chart takes about 60 ms

    def __init__(
        self,
        shape: ModelShape | None = None,
        hardware: Hardware | str = "h100",
        precision: str = "bf16",
        rows: int = 1,
    ):
        own = Hardware.preset(hardware) if isinstance(hardware, str) else hardware
        own.peak(precision)
        if not 1 <= rows <= MOST_ROWS:
            raise ValueError(f"rows of a micro-batch are 1 to {MOST_ROWS} here, got {rows}")
        self.shape = shape or ModelShape.preset("gpt2")
        self.known = {own.name: own, **{name: Hardware.preset(name) for name in DEVICES}, own.name: own}
        self.device = widgets.Dropdown(options=[*self.known], value=own.name, description="device")
        self.precision = widgets.Dropdown(options=PRECISIONS, value=precision, description="precision")
        self.rows = widgets.IntSlider(rows, 1, MOST_ROWS, description="rows", tooltip="sequences of a micro-batch")
        controls = (self.device, self.precision, self.rows)
        super().__init__(controls, controls)

    @property
    def chosen(self) -> Hardware:
        """The device that is shown."""
        return self.known[self.device.value]

    def drawn(self) -> Drawing:
        """The roofline for the present controls."""
        name, rows, seq = self.shape.name or "the model", self.rows.value, self.shape.seq
        ops = operations(self.shape, setting_in(self.shape, self.precision.value, rows))
        title = f"{name}, {rows} x {seq:,} tokens, forward, on {self.chosen.name} in {self.precision.value}"
        return roofline(self.chosen, ops, self.precision.value, title=title)
