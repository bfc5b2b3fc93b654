"""A pipeline to play with: change ranks, micro-batches and costs, pick an action, write an order of your own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets

from labkit.course.topics.in_flight_picture import LAWS, Pick
from labkit.course.topics.pipeline_player_picture import matches, played, player
from labkit.course.widgets.explorer import Explorer, in_a_row, in_two_columns, wide
from labkit.plan.schedules.schedule import Span
from labkit.plan.schedules.schedule_text import from_text, to_text
from labkit.view.svg import Picture

BY_HAND, NOBODY, MOST_RANKS, MOST_MICRO = "by hand", "none", 8, 32


class PipelinePlayer(Explorer):
    """Sliders over a simulated step, starting at `first`; arrow keys move them, also through the actions in time order.

    `measured`: real steps, each the spans of all its ranks; one is drawn below while the shown schedule is the one that
    it ran, with the times that it had then: costs move the simulation only, and a line says where they differ. "by
    hand" opens the programs for editing; for an order that cannot run the reason is shown, and the last picture stays.
    `.schedule` and `.spans` are what is shown. A rank's cost is the forward time of one micro-batch on it, shared by
    its stages."""

    recorded_over = ("action",)
    live_page = "schedule"

    def __init__(self, first: Pick | None = None, measured: Sequence[Sequence[Span]] = ()) -> None:
        first, self.measured = first or Pick("1f1b", 4, 8), [list(spans) for spans in measured]
        self.schedule, self.spans = first.schedule, list[Span]()
        names = [*(name for name, _ in LAWS), BY_HAND]
        self.name = widgets.Dropdown(options=names, value=first.name, description="schedule")
        self.ranks = _whole("ranks p", first.p, 1, MOST_RANKS, "ranks in a row")
        self.micro = _whole("micro m", first.m, 1, MOST_MICRO, "micro-batches of a step")
        self.stages = _whole("stages v", max(2, first.v), 2, 4, "stages on a rank, interleaved only")
        self.ratio = _real("B / F", 2.0, 0.5, 4.0, 0.5, "forwards that a backward takes")
        self.send = _real("message", 0.0, 0.0, 2.0, 0.1, "forwards that a message takes")
        upright = {"orientation": "vertical", "layout": {"height": "170px", "width": "62px"}}
        ranks = range(MOST_RANKS)
        self.costs = [_real(f"F on {r}", 1.0, 0.25, 3.0, 0.25, f"forward on rank {r}", **upright) for r in ranks]
        self.action = widgets.SelectionSlider(options=[NOBODY], description="action", layout=wide())
        self.program = widgets.Textarea(description="programs", continuous_update=False, rows=5, layout=wide())
        counts = [self.name, self.ranks, self.micro, self.stages, self.ratio, self.send]
        rows = [in_two_columns(counts), in_a_row(self.costs), self.program, self.action]
        super().__init__(rows, [*counts, *self.costs, self.action, self.program])

    def drawn(self) -> Picture:
        """The picture for the present controls; hides those that do not apply. ValueError for an impossible order."""
        by_hand = self.name.value == BY_HAND
        self.program.layout.display = "" if by_hand else "none"
        self.ranks.disabled = self.micro.disabled = by_hand
        self.stages.disabled = self.name.value != "interleaved"
        law, ratio, send = "", self.ratio.value, self.send.value
        if by_hand:
            schedule = from_text(self.program.value)
            if schedule.n_ranks > MOST_RANKS:
                raise ValueError(f"{MOST_RANKS} ranks at most, got {schedule.n_ranks} lines")
        else:
            pick = Pick(self.name.value, self.ranks.value, self.micro.value, self.stages.value)
            schedule = pick.schedule
            self.program.value = to_text(schedule)
        costs = [cost.value for cost in self.costs[: schedule.n_ranks]]
        if not by_hand and len(set(costs)) == 1 and not send:
            law = pick.waiting(ratio)
        spans = played(schedule, costs, ratio, send)
        actions = {str(span.action): span.action for span in spans}
        chosen = self.action.value if self.action.value in actions else NOBODY
        real = next((step for step in self.measured if matches(schedule, step)), [])
        picture = player(schedule, spans, actions.get(chosen), real, law)
        self.schedule, self.spans = schedule, spans
        if self.action.options != (wanted := (NOBODY, *actions)):
            self.action.options, self.action.value = wanted, chosen
        for rank, control in enumerate(self.costs):
            control.layout.display = "" if rank < schedule.n_ranks else "none"
        return picture


def _whole(name: str, value: int, least: int, most: int, tooltip: str) -> widgets.IntSlider:
    return widgets.IntSlider(value, least, most, description=name, tooltip=tooltip)


def _real(
    name: str, value: float, least: float, most: float, step: float, tooltip: str, **looks: Any
) -> widgets.Widget:
    return widgets.FloatSlider(value, min=least, max=most, step=step, description=name, tooltip=tooltip, **looks)
