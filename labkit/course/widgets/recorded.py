"""A film of what a widget draws while one of its controls moves, so that a page without a kernel can move it, too.

    class ZeROExplorer(Explorer):
        recorded_over = ("stage",)      # the attribute that holds the control
        live_page = "memory"            # a page of the site that answers the same with free inputs

The film is stored with the widget's output (`kept`), and the page plays it (labkit/course/export/site/films.js).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from typing import Any, NamedTuple

import ipywidgets as widgets

from labkit.course.widgets.packed import packed
from labkit.course.widgets.twin import Twin
from labkit.view.svg import Drawing


class Recorded(Twin):
    """A twin whose `kept()` holds a film over the values of the controls that are named in `recorded_over`.

    All other controls stay as they are. Of two controls the film goes through all values of the second for each of the
    first. Frames are at most `most_frames`, evenly thinned; the one that the widget shows is always among them. The
    widget is afterwards as it was before, and its page does not see it move."""

    recorded_over: tuple[str, ...] = ()
    most_frames = 40
    live_page = ""

    def moved(self) -> list[Any]:
        """The controls that a film goes over."""
        return [getattr(self, name) for name in self.recorded_over]

    def frame(self) -> Drawing:
        """The picture for the controls as they stand. ValueError if there is none for them."""
        return self.static()

    def kept(self) -> dict[str, Any]:
        """The film, what it goes over, the number of the frame that is shown first, and the name of a live page.

        {} for a widget that names no control, shows no valid picture, or has only one."""
        controls = self.moved()
        if not controls:
            return {}
        with unchanged(self):
            recording = self._recording(controls)
        shown = [place for place, moment in enumerate(recording) if moment.present]
        if not shown or len({moment.drawing for moment in recording}) < 2:
            return {}
        *others, last = map(name_of, controls)
        name = f"{', '.join(others)} and {last}" if others else last
        return {
            "film": packed([moment.drawing for moment in recording]),
            "name": f"recording over {name}",
            "over": {"name": name, "words": [moment.words for moment in recording]},
            "at": shown[0],
            "live": self.live_page,
        }

    def _recording(self, controls: list[Any]) -> list[RecordedFrame]:
        rows, present, room = list[list[Any]](), list[Any](), self.most_frames
        for control in controls:
            values, at = values_of(control)
            rows.append(thinned(values, at, room))
            present.append(values[at])
            room = max(1, room // len(rows[-1]))
        recording = []
        for values in map(list, product(*rows)):
            for control, value in zip(controls, values, strict=True):
                setattr(control, _trait(control), value)
            with suppress(ValueError):  # the widget keeps the picture before it; a film needs it once
                recording.append(RecordedFrame(words_of(controls), str(self.frame()), values == present))
        return recording


class RecordedFrame(NamedTuple):
    """A frame of a recording: the values in words, the drawing as SVG, and whether the widget shows it now."""

    words: str
    drawing: str
    present: bool


def values_of(control: Any) -> tuple[list[Any], int]:
    """All values of a control, and the place of the present one. Those of a list are the places in it.

    A slider may stand between two steps, at a measured number: that number then takes the place of the nearest step."""
    if hasattr(control, "options"):
        return [*range(len(control.options))], control.index
    if not hasattr(control, "step"):
        return [False, True], int(control.value)
    count = round((control.max - control.min) / control.step)
    values = [control.min + place * control.step for place in range(count + 1)]
    if hasattr(control, "base"):
        values = [control.base**value for value in values]
    at = min(range(len(values)), key=lambda place: abs(values[place] - control.value))
    values[at] = control.value
    return values, at


def thinned(values: list[Any], at: int, most: int) -> list[Any]:
    """At most so many of the values, evenly, with the first, the last and the one at `at`."""
    if len(values) <= most:
        return values
    if most < 2:
        return [values[at]]
    places = [round(step * (len(values) - 1) / (most - 1)) for step in range(most)]
    inner = range(1, most - 1) if at not in (0, len(values) - 1) else range(most)
    places[min(inner or [0], key=lambda step: abs(places[step] - at))] = at
    return [values[place] for place in places]


def words_of(controls: list[Any]) -> str:
    """What the controls say of their values, such as "stage ZeRO-2, micro-batches 4"."""
    pairs = [(name_of(control), _value(control)) for control in controls]
    return ", ".join(f"{name}{value}" if name.endswith("^") else f"{name} {value}" for name, value in pairs)


def name_of(control: Any) -> str:
    """The name that stands beside a control; "view" for buttons without one."""
    return control.description or "view"


@contextmanager
def unchanged(widget: Any) -> Iterator[None]:
    """Values of all parts of a widget may be changed within, and are afterwards as before; its page hears of none."""
    parts = [*_parts(widget)]
    before = [(part, part.value) for part in parts if hasattr(part, "value")]
    with ExitStack() as held:
        for part in parts:
            held.enter_context(part.hold_sync())
        try:
            yield
        finally:
            for part, value in before:  # words and pictures come last in an explorer: controls draw them again
                part.value = value


def _parts(widget: Any) -> Iterator[widgets.Widget]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from _parts(child)


def _trait(control: Any) -> str:
    return "index" if hasattr(control, "options") else "value"


def _value(control: Any) -> str:
    if hasattr(control, "options"):
        option = control.options[control.index]  # `.label` may be empty for a first choice by value
        return str(option[0] if isinstance(option, tuple) else option)
    if isinstance(control.value, bool):
        return "on" if control.value else "off"
    return format(control.value, getattr(control, "readout_format", "").replace("d", ",") or "g")
