"""How long should a checkpointed segment be? Change layers, length and bytes of a layer; see bytes and flops."""

from __future__ import annotations

from collections.abc import Mapping

import ipywidgets as widgets

from labkit.course.topics.checkpoint_picture import segments
from labkit.course.widgets.explorer import Explorer
from labkit.plan.pocket.segments import Stack
from labkit.view.svg import Drawing
from labkit.view.units import bytes_text, parsed

MOST_LAYERS, MOST_RATIO = 128, 64


class CheckpointExplorer(Explorer):
    """Sliders over the law of segments, starting at `stack` and at the best whole length; arrow keys move a slider.

    `measured` maps lengths to bytes of `stack`: dots that are drawn while its layers and bytes are shown. `cap_bytes`
    is a line, to be typed (`16 MiB`, empty for none). `.stack` is the shown stack, `.picture` the last valid picture;
    invalid input keeps it and shows the reason."""

    recorded_over = ("length",)
    most_frames = 18  # a chart takes about 60 ms

    def __init__(
        self, stack: Stack, measured: Mapping[int, float] | None = None, cap_bytes: float | None = None
    ) -> None:
        self.first, self.measured = stack, dict(measured or {})
        ratio = min(max(1, round(stack.layer_bytes / stack.input_bytes)), MOST_RATIO)
        most = max(MOST_LAYERS, stack.n_layer)
        best = max(stack.lengths(stack.best_segments))
        self.layers = _slider("layers L", stack.n_layer, most, "how many equal layers")
        self.length = _slider("length k", best, stack.n_layer, "layers in a segment")
        self.ratio = _slider("A / I", ratio, MOST_RATIO, "bytes that a layer holds, for each byte of its input")
        cap = "" if cap_bytes is None else bytes_text(cap_bytes)
        self.cap = widgets.Text(cap, description="cap", placeholder="none", continuous_update=False)
        controls = [self.layers, self.length, self.ratio, self.cap]
        super().__init__(controls, controls)

    @property
    def stack(self) -> Stack:
        """The stack that the sliders describe; its inputs have as many bytes as the first one's."""
        size, ratio = self.first.input_bytes, self.ratio.value
        same = self.layers.value == self.first.n_layer and ratio == round(self.first.layer_bytes / size)
        return self.first if same else Stack(self.layers.value, ratio * size, size)

    def drawn(self) -> Drawing:
        """The picture for the present controls; no segment is longer than all layers. ValueError for an invalid cap."""
        self.length.max = self.layers.value
        stack, typed = self.stack, self.cap.value.strip()
        cap = parsed(typed, "B") if typed else None
        lengths = stack.lengths(stack.segments_of(self.length.value))
        if min(lengths) < max(lengths):
            self.note = f"{stack.n_layer} layers in {len(lengths)} segments of {min(lengths)} or {max(lengths)}"
        return segments(stack, self.length.value, self.measured if stack is self.first else None, cap)


def _slider(name: str, value: int, most: int, tooltip: str) -> widgets.IntSlider:
    return widgets.IntSlider(value, 1, most, description=name, tooltip=tooltip)
