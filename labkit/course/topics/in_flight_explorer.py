"""How many micro-batches does a rank hold? Change schedule, ranks and micro-batches; compare law and measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ipywidgets as widgets

from labkit.course.topics.in_flight_picture import LAWS, Pick, Steps, inflight
from labkit.course.widgets.explorer import Explorer, in_two_columns
from labkit.plan.typed import whole
from labkit.view.svg import Drawing

MOST_RANKS, MOST_MICRO, MOST_STAGES = 8, 64, 4


class InFlightExplorer(Explorer):
    """Controls over the law of activations in flight, starting at `first`; Tab goes to the next, arrows move it.

    `measured` maps picks to the steps of each rank, drawn while that pick is shown. Micro-batches are typed; for an
    invalid number the reason is shown, and the last picture stays. `.pick` is what is shown, `.picture` the last valid
    picture."""

    recorded_over = ("name",)
    live_page = "schedule"

    def __init__(self, first: Pick | None = None, measured: Mapping[Pick, Sequence[Steps]] | None = None) -> None:
        self.pick, self.measured = first or Pick("1f1b", 4, 32), dict(measured or {})
        names = [name for name, _ in LAWS]
        self.name = widgets.SelectionSlider(options=names, value=self.pick.name, description="schedule")
        self.ranks = widgets.IntSlider(self.pick.p, 1, MOST_RANKS, description="ranks p", tooltip="ranks in a row")
        self.micro = widgets.Text(
            str(self.pick.m), description="micro m", tooltip="micro-batches of a step", continuous_update=False
        )
        self.stages = widgets.IntSlider(
            max(2, self.pick.v), 2, MOST_STAGES, description="stages v", tooltip="on a rank"
        )
        controls = [self.name, self.ranks, self.micro, self.stages]
        super().__init__([in_two_columns(controls)], controls)

    def drawn(self) -> Drawing:
        """The picture for the present controls. ValueError for an impossible number of micro-batches."""
        name = self.name.value
        self.stages.disabled = name != "interleaved"
        n_micro = whole(self.micro.value, "micro-batches", most=MOST_MICRO)
        self.pick = Pick(name, self.ranks.value, n_micro, self.stages.value if name == "interleaved" else 1)
        return inflight(self.pick, self.measured.get(self.pick, ()))
