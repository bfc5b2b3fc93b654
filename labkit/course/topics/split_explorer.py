"""Cut a layer yourself: kind, ranks and sizes; see what one rank holds, where f and g stand and what they send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import ipywidgets as widgets

from labkit.comm.ledger import Ledger
from labkit.course.topics.split_picture import DIRECTIONS, KINDS, SplitLayer, split_layer
from labkit.course.widgets.explorer import Explorer, in_two_columns
from labkit.plan.typed import whole
from labkit.view.svg import Picture

TYPED = (
    ("n_ranks", "ranks n", "tensor-parallel ranks"),
    ("width", "width D", "width of x and y"),
    ("ff", "hidden F", "width of the hidden layer"),
    ("n_head", "heads", "attention heads"),
    ("batch", "rows B", "sequences of a batch"),
    ("seq", "length T", "positions of a sequence"),
)


class SplitExplorer(Explorer):
    """Controls over `SplitLayer`, starting at `layer`; Tab goes from one to the next, arrow keys move the rank.

    `measured` maps kinds to directions to ledgers of a rank that ran `layer` as that kind: their bytes stand beside the
    law while its sizes are shown. `.layer` is the shown layer, `.picture` the last valid picture; invalid input keeps
    it, and shows what is wrong and what would be valid."""

    recorded_over = ("direction", "rank")

    def __init__(
        self, layer: SplitLayer | None = None, measured: Mapping[str, Mapping[str, Ledger]] | None = None
    ) -> None:
        self.first, self.measured = layer or SplitLayer(), dict(measured or {})
        first = self.first
        self.kind = widgets.Dropdown(options=KINDS, value=first.kind, description="layer", tooltip="how it is cut")
        self.direction = widgets.ToggleButtons(options=DIRECTIONS, description="direction")
        self.typed = {
            name: widgets.Text(str(getattr(first, name)), description=words, tooltip=tooltip, continuous_update=False)
            for name, words, tooltip in TYPED
        }
        self.rank = widgets.IntSlider(0, 0, first.n_ranks - 1, description="rank", tooltip="whose parts are lit")
        self.sequence = widgets.Checkbox(first.sequence, description="x and y cut by position (sequence parallel)")
        rows = [self.kind, self.direction, in_two_columns(self.typed.values()), self.rank, self.sequence]
        super().__init__(rows, [self.kind, self.direction, *self.typed.values(), self.rank, self.sequence])

    @property
    def layer(self) -> SplitLayer:
        """The layer that the controls describe. ValueError for invalid input."""
        sizes = {name: whole(self.typed[name].value, words, most=10**6) for name, words, _ in TYPED}
        return replace(self.first, kind=self.kind.value, sequence=self.sequence.value, **sizes)

    def drawn(self) -> Picture:
        """The picture for the present controls; a rank beyond the last becomes the last."""
        layer = self.layer
        self.rank.max = layer.n_ranks - 1
        measured = self.measured if replace(layer, kind=self.first.kind) == self.first else None
        return split_layer(layer, self.rank.value, self.direction.value, measured)
