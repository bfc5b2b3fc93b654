"""How many micro-batches does a rank hold? Move schedule, ranks and micro-batches; the law beside a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import ipywidgets as widgets

from labkit.view.inflight import LAWS, Pick, Steps, inflight
from labkit.view.svg import Picture, cut
from labkit.view.widgets.twin import Twin

MOST_RANKS, MOST_MICRO, MOST_STAGES = 8, 64, 4


class InFlightExplorer(Twin, widgets.VBox):
    """Controls over the law of activations in flight, starting at `first`; Tab goes to the next, arrows move it.

    `measured` maps picks to the steps of each rank, drawn while that pick is shown. Micro-batches are typed or stepped;
    what is no such number is told, and the last picture stays. `.pick` is what is shown, `.picture` the last picture.
    """

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
        self.said, self.shown = widgets.HTML(), widgets.HTML()
        self.picture: Picture | None = None
        controls = [self.name, self.ranks, self.micro, self.stages]
        grid = widgets.GridBox(controls, layout={"grid_template_columns": "repeat(2, 340px)"})
        super().__init__([grid, self.said, self.shown])
        for control in controls:
            control.observe(lambda _: self.draw(), "value")
        self.draw()

    def draw(self) -> None:
        """Draw for the present controls; a number that cannot be is told, and the picture stays."""
        typed, name = self.micro.value.strip(), self.name.value
        self.stages.disabled = name != "interleaved"
        if not (typed.isascii() and typed.isdigit() and 1 <= int(typed[:9]) <= MOST_MICRO):
            self.said.value = escape(
                f"micro-batches are a whole number from 1 to {MOST_MICRO}, got {cut(typed, 24)!r}: "
                "the picture is the last one that made sense"
            )
            return
        self.pick = Pick(name, self.ranks.value, int(typed), self.stages.value if name == "interleaved" else 1)
        self.picture = inflight(self.pick, self.measured.get(self.pick, ()))
        self.shown.value, self.said.value = str(self.picture), ""

    def static(self) -> Picture:
        """The last picture, for an export."""
        assert self.picture
        return self.picture
