"""How many sequences should generate at once? A model, devices and lengths, and what a decode step takes and makes."""

from __future__ import annotations

import ipywidgets as widgets

from labkit.course.topics.generation_picture import CUTS, MOST_ROWS, latency
from labkit.course.widgets.explorer import Explorer, in_two_columns
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.pocket.generation import Generator
from labkit.view.svg import Drawing
from labkit.view.units import parsed

MODELS = ("llama3-8b", "llama3-70b", "llama3-405b", "qwen3-32b", "llama-65b", "mixtral-8x7b", "deepseek-v3")
DEVICES = ("a100-80gb", "h100", "h200", "b200", "mi300x", "l4")


class GenerationExplorer(Explorer):
    """Menus for model and device, sliders for tp, tokens and sequences, a field for the latency. Arrow keys move a
    slider.

    "most sequences" moves their number to the most that fit into memory and keep the latency, rounded down to a place
    of the slider. A field that is no time keeps the last picture and shows the reason."""

    recorded_over = ("rows",)
    most_frames = 13  # a chart takes about 60 ms

    def __init__(
        self, model: str = "llama3-70b", device: str = "h100", tp: int = 8, tokens: int = 4096, rows: int = 16,
        latency_s: float = 0.02,
    ) -> None:  # fmt: skip
        self.model = widgets.Dropdown(options=MODELS, value=model, description="model")
        self.device = widgets.Dropdown(options=DEVICES, value=device, description="device")
        self.tp = widgets.SelectionSlider(options=CUTS, value=tp, description="tp")
        self.tokens = widgets.SelectionSlider(
            options=[(f"{2**k:,}", 2**k) for k in range(7, 18)], value=tokens, description="tokens"
        )
        places = sorted({round(2 ** (k / 2)) for k in range(25)})
        assert places[-1] == MOST_ROWS
        self.rows = widgets.SelectionSlider(
            options=[(f"{rows:,}", rows) for rows in places], value=rows, description="sequences"
        )
        self.latency = widgets.Text(f"{1e3 * latency_s:g} ms", description="latency", continuous_update=False)
        self.most = widgets.Button(description="most sequences")
        self.most.on_click(lambda _: self.go_to_most())
        controls = [self.model, self.device, self.tp, self.tokens, self.rows, self.latency]
        super().__init__([in_two_columns(controls), self.most], controls)

    def generator(self) -> Generator:
        """The model on its devices. ValueError for a tp that cannot cut it."""
        return Generator(ModelShape.preset(self.model.value), Hardware.preset(self.device.value), self.tp.value)

    def go_to_most(self) -> None:
        """Move the sequences to the most that fit and are in time; to 1 if none are, which the picture says."""
        try:
            most = self.generator().rows_within(parsed(self.latency.value, "s"), self.tokens.value)
            self.rows.value = max(rows for _, rows in self.rows.options if rows <= max(1, most))
        except ValueError:
            self.draw()  # which says the reason

    def drawn(self) -> Drawing:
        """The picture for the present controls. ValueError for a time that is none, or 0."""
        return latency(self.generator(), self.rows.value, self.tokens.value, parsed(self.latency.value, "s"))
