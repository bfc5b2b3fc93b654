"""Cut a layer yourself: kind, ranks and sizes; see what one rank holds, where f and g stand and what they send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from html import escape

import ipywidgets as widgets

from labkit.comm.ledger import Ledger
from labkit.view.split import DIRECTIONS, KINDS, SplitLayer, split_layer
from labkit.view.svg import Picture
from labkit.view.widgets.twin import Twin

TYPED = (
    ("n_ranks", "ranks n", "tensor-parallel ranks"),
    ("width", "width D", "width of x and y"),
    ("ff", "hidden F", "width of the hidden layer"),
    ("n_head", "heads", "attention heads"),
    ("batch", "rows B", "sequences of a batch"),
    ("seq", "length T", "positions of a sequence"),
)


class SplitExplorer(Twin, widgets.VBox):
    """Controls over `SplitLayer`, starting at `layer`; Tab goes from one to the next, arrow keys move the rank.

    `measured` maps kinds to directions to ledgers of a rank that ran `layer`, as that kind: their bytes stand beside
    the law while its sizes are shown. `.layer` is what the controls say, `.picture` the last one that made sense;
    nonsense leaves it, and says what is wrong and what would do."""

    def __init__(
        self, layer: SplitLayer | None = None, measured: Mapping[str, Mapping[str, Ledger]] | None = None
    ) -> None:
        self.first, self.measured = layer or SplitLayer(), dict(measured or {})
        first = self.first
        self.kind = widgets.Dropdown(options=KINDS, value=first.kind, description="layer", tooltip="how it is cut")
        self.direction = widgets.ToggleButtons(options=DIRECTIONS, description="direction")
        self.typed = {
            name: widgets.Text(str(getattr(first, name)), description=words, tooltip=more, continuous_update=False)
            for name, words, more in TYPED
        }
        self.rank = widgets.IntSlider(0, 0, first.n_ranks - 1, description="rank", tooltip="whose parts are lit")
        self.sequence = widgets.Checkbox(first.sequence, description="x and y cut by position (sequence parallel)")
        self.said, self.shown = widgets.HTML(), widgets.HTML()
        self.picture: Picture | None = None
        grid = widgets.GridBox([*self.typed.values()], layout={"grid_template_columns": "repeat(2, 340px)"})
        super().__init__([self.kind, self.direction, grid, self.rank, self.sequence, self.said, self.shown])
        for control in (self.kind, self.direction, *self.typed.values(), self.rank, self.sequence):
            control.observe(lambda _: self.draw(), "value")
        self.draw()

    @property
    def layer(self) -> SplitLayer:
        """What the controls describe. ValueError for what is typed and cannot be."""
        sizes = {}
        for name, words, _ in TYPED:
            try:
                sizes[name] = int(self.typed[name].value.replace(",", "").strip())
            except ValueError:
                raise ValueError(f"{words} is a whole number, got {self.typed[name].value!r}") from None
        return replace(self.first, kind=self.kind.value, sequence=self.sequence.value, **sizes)

    def draw(self) -> None:
        """Draw for the present controls; what cannot be is told, and the picture stays."""
        try:
            layer = self.layer
        except ValueError as error:
            self.said.value = escape(f"{error}: the picture is the last one that made sense")
            return
        self.rank.max = layer.n_ranks - 1  # a rank beyond it becomes the last one, which draws again
        measured = self.measured if replace(layer, kind=self.first.kind) == self.first else None
        self.picture = split_layer(layer, self.rank.value, self.direction.value, measured)
        self.shown.value, self.said.value = str(self.picture), ""

    def static(self) -> Picture:
        """The last picture, for an export."""
        assert self.picture
        return self.picture
