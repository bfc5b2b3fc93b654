"""A picture that controls draw again: by arithmetic, or by running the real thing again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from labkit.course.widgets.recorded import Recorded
from labkit.view.svg import Drawing, Picture, text
from labkit.view.units import seconds_text


class Play(Recorded, widgets.VBox):
    """`draw(**values) -> Drawing` with a control for each of its arguments: `Play(draw, log2_bytes=(6, 24, 16))`.

    A control is an ipywidgets widget with a value, or (lowest, highest, first) for a slider of whole numbers. `draw`
    runs now and whenever a control was released; meanwhile a line says so, and the kernel's stop button ends it.
    `.values` is what the controls show, `.picture` the last picture. `recorded_over` names controls over which a film
    is stored with the output; name some only if `draw` computes, since it is then called for each of their values.

    The picture is the value of a widget and not printed output. So a notebook that is run without a browser needs no
    Output widget, through which clients that run notebooks can lose a reply (jupyter/nbclient issue 312)."""

    def __init__(self, draw: Callable[..., Drawing], recorded_over: Sequence[str] = (), **controls: Any):
        self.draw, self.recorded_over, self.is_valid = draw, tuple(recorded_over), False
        self.controls = {name: _control(name, control) for name, control in controls.items()}
        self.message, self.shown = widgets.HTML(), widgets.HTML()
        self.picture: Drawing | None = None
        super().__init__([*self.controls.values(), self.message, self.shown])
        for control in self.controls.values():
            control.observe(lambda _: self.redraw(), "value")
        self.redraw()

    @property
    def values(self) -> dict[str, Any]:
        """The value of each control, by name."""
        return {name: control.value for name, control in self.controls.items()}

    def redraw(self) -> None:
        """Draw for the present controls. An error is shown, and the picture before it stays."""
        self.message.value, self.is_valid = "<i>running ...</i>", False
        started = time.perf_counter()
        try:
            self.picture = self.draw(**self.values)
            self.shown.value, self.is_valid = str(self.picture), True
            self.message.value = f"<small>in {seconds_text(time.perf_counter() - started)}</small>"
        except KeyboardInterrupt:
            self.message.value = "stopped"
            raise
        except Exception as error:
            first = str(error).partition("\n")[0]
            self.message.value = f"<b>{type(error).__name__}</b>: {escape(first)}"

    def moved(self) -> list[Any]:
        """The controls that a film goes over."""
        return [self.controls[name] for name in self.recorded_over]

    def frame(self) -> Drawing:
        """The picture for the present controls. ValueError if there was an error instead."""
        if not self.is_valid:
            raise ValueError(self.message.value)
        return self.static()

    def static(self) -> Drawing:
        """The last picture, for an export; a line if there is none."""
        return self.picture or Picture(text(4, 20, "nothing was drawn"), 30, "nothing was drawn")


def _control(name: str, spec: Any) -> Any:
    """A widget with a value. ValueError for anything but a widget and (lowest, highest, first)."""
    if hasattr(spec, "value") and hasattr(spec, "observe"):
        return spec
    if isinstance(spec, tuple) and len(spec) == 3 and all(isinstance(number, int) for number in spec):
        low, high, first = spec
        if low <= first <= high:
            words = name.replace("_", " ")
            return widgets.IntSlider(first, low, high, description=words, continuous_update=False)
    raise ValueError(f"{name}: a control is a widget with a value or (lowest, highest, first) in order, got {spec!r}")
