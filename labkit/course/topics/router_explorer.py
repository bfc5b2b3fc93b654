"""What does an unfair router cost? Skew it, give experts a capacity, deal them out; see who waits for whom."""

from __future__ import annotations

import math
from types import MappingProxyType

import ipywidgets as widgets

from labkit.course.topics.router_picture import router
from labkit.course.topics.unfair_router import choose
from labkit.course.widgets.explorer import Explorer, in_two_columns
from labkit.view.svg import Drawing

N_EXPERT = 16
CAPACITIES = MappingProxyType({"dropless": math.inf, "1.0": 1.0, "1.25": 1.25, "1.5": 1.5, "2.0": 2.0})


class RouterExplorer(Explorer):
    """Sliders for the skew, the experts of a token and the ranks, a menu of capacities, and a slider that draws other
    tokens and another router.

    Sixteen experts, 256 tokens of each rank. Arrow keys move a slider. `.picture` shows rows by expert and who waits.
    ValueError for a choice that is not on a menu."""

    recorded_over = ("skew",)
    most_frames = 16

    def __init__(
        self, skew: float = 0.5, top_k: int = 2, capacity: float | None = None, n_ranks: int = 4, seed: int = 0
    ) -> None:
        """`capacity` None: no row is dropped."""
        room = math.inf if capacity is None else capacity  # None in a menu is ipywidgets' word for "nothing chosen"
        if room not in CAPACITIES.values():
            raise ValueError(f"capacity is one of {', '.join(CAPACITIES)} (None is dropless), got {capacity}")
        self.skew = widgets.FloatSlider(skew, min=0.0, max=3.0, step=0.1, description="skew")
        self.top_k = widgets.SelectionSlider(options=(1, 2, 4, 8), value=top_k, description="experts k")
        self.capacity = widgets.Dropdown(options=list(CAPACITIES.items()), value=room, description="capacity")
        self.ranks = widgets.SelectionSlider(options=(1, 2, 4, 8), value=n_ranks, description="ep ranks")
        self.seed = widgets.IntSlider(seed, 0, 9, description="draw", tooltip="which tokens and router are drawn")
        controls = [self.skew, self.top_k, self.capacity, self.ranks, self.seed]
        super().__init__([in_two_columns(controls)], controls)

    def drawn(self) -> Drawing:
        """The picture for the present controls: a row is 4,096 numbers in bf16."""
        capacity = None if self.capacity.value == math.inf else self.capacity.value
        return router(
            choose(self.skew.value, N_EXPERT, self.top_k.value, capacity, self.ranks.value, seed=self.seed.value)
        )
