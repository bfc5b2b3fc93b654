"""How large should a bucket be? Change its size and the link's speed for a recorded backward; run it for real."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

import ipywidgets as widgets

from labkit.course.topics.bucket_picture import buckets
from labkit.course.widgets.explorer import Explorer, in_two_columns
from labkit.plan.machine.collectives import Line
from labkit.plan.pocket.bucket_replay import Ready, best_bytes, sizes_of
from labkit.view.svg import Drawing
from labkit.view.units import bytes_text, parsed


class BucketExplorer(Explorer):
    """A slider for bucket sizes, or a size to be typed (`96 KiB`), and one for the link; arrow keys move a slider.

    `ready`, `wire` and `backward_s` are the recording (see plan/pocket/bucket_replay.py); `measured` maps bucket bytes
    to seconds, drawn while the link is the recorded one. With `measure(bucket_bytes) -> seconds` a button runs the real
    step; a line says so meanwhile, and the kernel's stop button ends it. `.bucket_bytes` is the shown size, `.picture`
    the last valid picture; invalid input keeps it and shows the reason."""

    recorded_over = ("size",)

    def __init__(
        self,
        ready: Sequence[Ready],
        wire: Line,
        backward_s: float = 0.0,
        measured: Mapping[int, float] | None = None,
        measure: Callable[[int], float] | None = None,
    ) -> None:
        self.ready, self.wire, self.backward_s = tuple(ready), wire, backward_s
        self.measured, self.measure = dict(measured or {}), measure
        sizes, self.bucket_bytes = sizes_of(ready), best_bytes(ready, wire, backward_s)
        options = [(bytes_text(size), size) for size in sizes]
        self.size = widgets.SelectionSlider(options=options, value=self.bucket_bytes, description="bucket")
        self.typed = widgets.Text(bytes_text(self.bucket_bytes), description="or type", continuous_update=False)
        speeds = [(f"{2.0**k:g} times", 2.0**k) for k in range(-4, 5)]
        self.speed = widgets.SelectionSlider(options=speeds, value=1.0, description="link speed")
        self.button = widgets.Button(description="run it on the ranks", disabled=measure is None)
        rows = [in_two_columns([self.size, self.typed, self.speed, self.button])]
        super().__init__(rows, [self.typed, self.speed])
        self.size.observe(lambda _: self.choose(), "value")
        self.button.on_click(lambda _: self.run())

    def choose(self) -> None:
        """Copy the slider's size into the field, and draw."""
        self.typed.value = bytes_text(self.size.value)
        self.draw()

    def drawn(self) -> Drawing:
        """The replay with the chosen size. ValueError for input that is no number of bytes."""
        chosen = parsed(self.typed.value, "B")
        if self.typed.value == bytes_text(self.size.value):
            chosen = self.size.value  # the text is rounded, the slider's value is exact
        line = Line(self.wire.alpha_s, self.wire.beta_s_per_byte / self.speed.value)
        picture = buckets(self.ready, chosen, line, self.backward_s, self.measured if self.speed.value == 1 else None)
        self.bucket_bytes = int(chosen)
        return picture

    def run(self) -> None:
        """Measure the chosen size on the ranks, and draw it as a dot. An error is shown."""
        if self.measure is None:
            return
        self.message.value = "<i>running on the ranks (the kernel's stop button ends it)</i>"
        self.button.disabled = True
        try:
            self.measured[self.bucket_bytes] = self.measure(self.bucket_bytes)
            self.speed.value = 1.0
            self.draw()
            self.message.value = f"measured with buckets of {bytes_text(self.bucket_bytes)}"
        except KeyboardInterrupt:
            self.message.value = "stopped: nothing was measured"
            raise
        except Exception as error:
            self.message.value = escape(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        finally:
            self.button.disabled = False
