"""How far does one outlier reach? Its size and the size of a tile, and the error of every number beside it."""

from __future__ import annotations

import ipywidgets as widgets

from labkit.course.topics.block_picture import beside_an_outlier
from labkit.course.widgets.explorer import Explorer
from labkit.view.svg import Drawing

BLOCKS = (1, 4, 16, 32, 64, 128)


class BlockExplorer(Explorer):
    """A slider for the outlier (powers of two), one for the numbers that share a scale, and one for other numbers.

    Arrow keys move a slider. `.picture` shows one scale, tiles, MX and NVFP4 below each other."""

    recorded_over = ("outlier",)
    most_frames = 9  # a chart takes about 60 ms

    def __init__(self, outlier: int = 14, block: int = 32, seed: int = 0) -> None:
        """The outlier is 2^`outlier`. ValueError for a block that is not among those of the slider."""
        if block not in BLOCKS:
            raise ValueError(f"a tile has {', '.join(map(str, BLOCKS))} numbers, got {block}")
        self.outlier = widgets.IntSlider(outlier, 0, 16, description="outlier 2^")
        self.block = widgets.SelectionSlider(options=BLOCKS, value=block, description="tile of")
        self.seed = widgets.IntSlider(seed, 0, 9, description="draw", tooltip="which numbers are drawn")
        controls = [self.outlier, self.block, self.seed]
        super().__init__(controls, controls)

    def drawn(self) -> Drawing:
        """The picture for the present controls."""
        return beside_an_outlier(2.0**self.outlier.value, self.block.value, self.seed.value)
