"""Which stage of ZeRO does it take? Change the model, the ranks and the stage; see what a rank holds and sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets

from labkit.course.topics.zero_picture import zero_stages
from labkit.course.widgets.explorer import Explorer, in_two_columns
from labkit.plan.breakdown import Breakdown
from labkit.plan.devices import DEVICES
from labkit.plan.hardware import Hardware
from labkit.plan.zero_table import NAMES, OPTIMIZERS, PRECISIONS, STAGES, ModelState
from labkit.view.svg import Drawing

SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}.items()
NO_DEVICE = "none"


class ZeROExplorer(Explorer):
    """Controls over the laws of ZeRO, starting at `state` and `stage`; Tab goes from one to the next, arrows move them.

    Parameters may be typed as `7B`, `124M` or `1.5e9`. `measured` maps stages to bytes of a run of `state`: stacks that
    are drawn while `state` is shown. `device`: a preset's name, or a name and its bytes. `.state` is the shown state,
    `.picture` the last valid picture; invalid input keeps it and shows the reason. ValueError for an unknown preset."""

    recorded_over = ("stage",)
    live_page = "memory"

    def __init__(
        self,
        state: ModelState | None = None,
        stage: int = 1,
        measured: Mapping[int, Breakdown] | None = None,
        device: str | tuple[str, float] = "h100",
    ) -> None:
        self.first, self.measured = state or ModelState(7e9, 8), dict(measured or {})
        sizes = {name: Hardware.preset(name).memory_bytes.value for name in DEVICES}
        own = (Hardware.preset(device).name, sizes[device.lower()]) if isinstance(device, str) else device
        self.sizes = {own[0]: own[1]} | sizes | {NO_DEVICE: 0.0}
        menu, first = widgets.Dropdown, self.first
        typed = {"continuous_update": False}
        self.params = widgets.Text(f"{first.n_params:,.0f}", description="parameters", tooltip="N: 7B, 124M", **typed)
        self.ranks = widgets.Text(str(first.n_ranks), description="ranks n", tooltip="data-parallel ranks", **typed)
        stages = [(name, number) for name, number in zip(NAMES, STAGES, strict=True)]
        self.stage = widgets.SelectionSlider(options=stages, value=stage, description="stage")
        self.precision = menu(options=[*PRECISIONS], value=first.precision, description="precision")
        self.optimizer = menu(options=[*OPTIMIZERS], value=first.optimizer, description="optimizer")
        self.device = menu(options=[*self.sizes], value=own[0], description="device")
        self.micro = widgets.IntSlider(1, 1, 16, description="micro-batches", tooltip="of one step")
        controls = [self.params, self.ranks, self.stage, self.micro, self.precision, self.optimizer, self.device]
        super().__init__([in_two_columns(controls)], controls)

    @property
    def state(self) -> ModelState:
        """The state that the controls describe. ValueError for invalid input."""
        try:
            ranks = int(self.ranks.value.strip())
        except ValueError:
            raise ValueError(f"n is a whole number of ranks, got {self.ranks.value!r}") from None
        return ModelState(count(self.params.value), ranks, self.precision.value, self.optimizer.value)

    def drawn(self) -> Drawing:
        """The picture for the present controls."""
        state, room = self.state, self.sizes[self.device.value]
        device = (self.device.value, room) if room else None
        measured = self.measured if state == self.first else None
        return zero_stages(state, self.stage.value, device, measured, self.micro.value)


def count(said: str) -> float:
    """The number that a person typed: `7B`, `124 M`, `1,300,000`, `7e9`. ValueError for anything else."""
    plain: Any = said.replace(",", "").replace("_", "").replace(" ", "").lower()
    factor = next((size for letter, size in SUFFIXES if plain.endswith(letter)), 1.0)
    try:
        return float(plain[:-1] if factor > 1 else plain) * factor
    except ValueError:
        raise ValueError(f"{said!r} is no number of parameters, such as 7B or 124,000,000") from None
