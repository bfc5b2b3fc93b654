"""Which ranks work together? Change dp, pp, tp and the rank, and see its three groups light up."""

from __future__ import annotations

import ipywidgets as widgets

from labkit.course.widgets.explorer import Explorer
from labkit.plan.partition.layout import Layout
from labkit.view.cube import cube
from labkit.view.svg import Picture

MOST = 16
"""The longest axis of the sliders, unless the first layout has a longer one."""


class CubeExplorer(Explorer):
    """Sliders over a Layout and a rank of it, starting at `layout` and `rank`; arrow keys move a slider that has the
    focus. `.layout_` and `.rank` are what they show; a rank that a smaller layout lacks becomes its last one.

    ValueError for a rank outside the first layout."""

    recorded_over = ("rank",)
    most_frames = 16  # a cube of many ranks is much text, and each rank lights other parts of it

    def __init__(self, layout: Layout | None = None, rank: int = 0):
        layout = layout or Layout(2, 2, 2)
        layout.coords(rank)
        self.sizes = {
            axis: widgets.IntSlider(
                getattr(layout, axis),
                1,
                max(MOST, getattr(layout, axis)),
                description=axis,
                tooltip=f"ranks along {axis}",
            )
            for axis in ("dp", "pp", "tp")
        }
        self.rank = widgets.IntSlider(rank, 0, layout.size - 1, description="rank", tooltip="whose groups are lit")
        controls = (*self.sizes.values(), self.rank)
        super().__init__(controls, controls)

    @property
    def layout_(self) -> Layout:
        """The layout that the sliders describe (`.layout` is the box's own, of ipywidgets)."""
        return Layout(**{axis: control.value for axis, control in self.sizes.items()})

    def drawn(self) -> Picture:
        """The cube for the present controls; the rank's slider ends at the last rank."""
        self.rank.max = self.layout_.size - 1
        return cube(self.layout_, self.rank.value)
