"""A picture that controls draw again: by arithmetic, or by running the real thing again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from labkit.course.widgets.explorer import Explorer
from labkit.view.svg import Drawing
from labkit.view.units import seconds_text


class Play(Explorer):
    """`drawing(**values) -> Drawing` with a control for each of its arguments: `Play(drawing, log2_bytes=(6, 24, 16))`.

    A control is an ipywidgets widget with a value, or (lowest, highest, first) for a slider of whole numbers. `drawing`
    runs now and whenever a control was released; meanwhile a line says so, and the kernel's stop button ends it. An
    error is shown, and the picture before it stays. `.values` is what the controls show, `.picture` the last picture.
    `recorded_over` names controls over which a film is stored with the output; name some only if `drawing` computes,
    since it is then called for each of their values.

    The picture is the value of a widget and not printed output. So a notebook that is run without a browser needs no
    Output widget, through which clients that run notebooks can lose a reply (jupyter/nbclient issue 312)."""

    def __init__(self, drawing: Callable[..., Drawing], recorded_over: Sequence[str] = (), **controls: Any):
        self.drawing, self.recorded_over = drawing, tuple(recorded_over)
        self.controls = {name: _control(name, control) for name, control in controls.items()}
        super().__init__(self.controls.values(), self.controls.values())

    @property
    def values(self) -> dict[str, Any]:
        """The value of each control, by name."""
        return {name: control.value for name, control in self.controls.items()}

    def drawn(self) -> Drawing:
        """The picture for the present controls. ValueError for whatever went wrong."""
        self.message.value, self.is_valid = "<i>running ...</i>", False
        started = time.perf_counter()
        try:
            picture = self.drawing(**self.values)
        except KeyboardInterrupt:
            self.message.value = "stopped"
            raise
        except Exception as error:
            first = str(error).partition("\n")[0]
            raise ValueError(f"{type(error).__name__}: {first}") from error
        self.note = f"<small>in {seconds_text(time.perf_counter() - started)}</small>"
        return picture

    def moved(self) -> list[Any]:
        """The controls that a film goes over."""
        return [self.controls[name] for name in self.recorded_over]


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
