"""A recorded collective, to be stepped through with a slider, buttons or arrow keys."""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets

from labkit.course.widgets.twin import Twin
from labkit.probe.film import Film
from labkit.view.film import frame, strip
from labkit.view.svg import Picture


class RingFilm(Twin, anywidget.AnyWidget):
    """Shows `film` one step at a time. Left and right arrow keys step, Home and End jump; resting the pointer on a box
    or an arrow shows ranks and bytes. `.step` is the present step, `.static()` the whole film as one picture."""

    _esm = Path(__file__).with_name("ring_film.js")
    _css = Path(__file__).with_name("ring_film.css")
    frames = traitlets.List(traitlets.Unicode()).tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)

    def __init__(self, film: Film):
        self.film = film
        super().__init__(frames=[str(frame(film, step)) for step in range(len(film.steps) + 1)])

    @traitlets.validate("step")
    def _within(self, proposal: traitlets.Bunch) -> int:
        return max(0, min(int(proposal["value"]), len(self.film.steps)))

    def static(self) -> Picture:
        """All steps on one page, for an export or a place without widgets."""
        return strip(self.film)
