"""How few gradients are enough? The share that is sent, with and without error feedback, on recorded runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ipywidgets as widgets

from labkit.course.topics.compression_picture import MOST_RANKS, sparse
from labkit.course.widgets.explorer import Explorer
from labkit.plan.typed import whole
from labkit.view.svg import Drawing

Losses = Sequence[float]


class CompressionExplorer(Explorer):
    """A slider over the shares that were recorded, a box for error feedback, and a number of ranks to be typed.

    `runs` maps (share, feedback) to losses, `dense` has those of exact gradients, all of `numel` float32 gradients on
    `n_ranks` ranks; `measured` maps shares to bytes that a rank sent in a step. Arrow keys move the slider, the space
    bar ticks the box. `.picture` is the last valid picture; invalid input keeps it and shows the reason. ValueError for
    no runs."""

    recorded_over = ("share",)

    def __init__(
        self,
        runs: Mapping[tuple[float, bool], Losses],
        dense: Losses,
        numel: int,
        n_ranks: int,
        measured: Mapping[float, float] | None = None,
    ) -> None:
        shares = sorted({share for share, _ in runs})
        if not shares:
            raise ValueError("there are no recorded runs: give at least one (share, feedback) with its losses")
        self.runs, self.dense, self.numel, self.n_ranks = dict(runs), list(dense), numel, n_ranks
        self.measured = dict(measured or {})
        options = [(f"{share:.3g}", share) for share in shares]
        self.share = widgets.SelectionSlider(options=options, value=shares[len(shares) // 2], description="share k")
        self.feedback = widgets.Checkbox(True, description="error feedback")
        self.ranks = widgets.Text(str(n_ranks), description="ranks", continuous_update=False)
        controls = [self.share, self.feedback, self.ranks]
        super().__init__(controls, controls)

    def drawn(self) -> Drawing:
        """The picture for the present controls. ValueError for an invalid number of ranks."""
        share, feedback = self.share.value, self.feedback.value
        curves: dict[str, Losses] = {"dense": self.dense}
        if (share, feedback) in self.runs:
            curves["with feedback" if feedback else "without feedback"] = self.runs[share, feedback]
        dots = {self.n_ranks: self.measured[share]} if share in self.measured else None
        return sparse(share, curves, self.numel, whole(self.ranks.value, "ranks", most=MOST_RANKS), dots)
