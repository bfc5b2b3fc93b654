"""Which stage of ZeRO does it take? Change the model, the ranks and the stage; see what a rank holds and sends."""

from __future__ import annotations

from collections.abc import Mapping

import ipywidgets as widgets

from labkit.course.topics.zero_picture import zero_stages
from labkit.course.widgets.explorer import Explorer, in_two_columns
from labkit.plan.breakdown import Breakdown
from labkit.plan.machine.devices import DEVICES
from labkit.plan.machine.hardware import Hardware
from labkit.plan.pocket.zero_table import MOST_RANKS, NAMES, OPTIMIZERS, PRECISIONS, STAGES, ModelState
from labkit.plan.typed import parsed, whole
from labkit.view.svg import Drawing

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
        ranks = whole(self.ranks.value, "ranks n", most=MOST_RANKS)
        return ModelState(parsed(self.params.value, "parameters"), ranks, self.precision.value, self.optimizer.value)

    def drawn(self) -> Drawing:
        """The picture for the present controls."""
        state, room = self.state, self.sizes[self.device.value]
        device = (self.device.value, room) if room else None
        measured = self.measured if state == self.first else None
        return zero_stages(state, self.stage.value, device, measured, self.micro.value)
