"""A recorded collective, to be stepped through with a slider, buttons or arrow keys."""

from __future__ import annotations

import traitlets

from labkit.course.widgets.film_player import FilmPlayer
from labkit.probe.film import Film
from labkit.view.film import frame, strip
from labkit.view.svg import Picture


class RingFilm(FilmPlayer):
    """Shows `film` one step at a time. Resting the pointer on a box or an arrow shows ranks and bytes. `.step` is the
    present step, `.static()` the whole film as one picture. ValueError for a film of more than 16 ranks, with what to
    do then."""

    name = traitlets.Unicode("film of a collective").tag(sync=True)

    def __init__(self, film: Film):
        self.film = film
        super().__init__(frame(film, step) for step in range(len(film.steps) + 1))

    def static(self) -> Picture:
        """All steps on one page, for an export or a place without widgets."""
        return strip(self.film)
