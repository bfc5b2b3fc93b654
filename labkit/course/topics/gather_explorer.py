"""What does a rank of ZeRO-3 hold, and when? Recorded runs, to be stepped through change by change."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from html import escape

import ipywidgets as widgets

from labkit.course.widgets.explorer import Explorer, in_a_row, wide
from labkit.probe.gather import GatherFilm
from labkit.view.gather import gather_film
from labkit.view.svg import Picture
from labkit.view.units import parsed, seconds_text


class GatherExplorer(Explorer):
    """Recorded films by name: choose a run, move to a moment (arrow keys step), or type a time (`120 ms`).

    Starts where the most weights are held. `.film` and `.moment` are what is shown, `.picture` the last picture; a time
    outside the film keeps it and shows the reason. ValueError for no films."""

    recorded_over = ("slider",)

    def __init__(self, films: Mapping[str, GatherFilm]) -> None:
        if not films:
            raise ValueError("give at least one recorded film, {'prefetch 1': probe.film}")
        self.films = dict(films)
        first = next(iter(self.films))
        self.run = widgets.Dropdown(options=list(self.films), value=first, description="run")
        film = self.films[first]
        tip = "after how many changes; arrow keys step"
        self.slider = widgets.IntSlider(
            film.peak, 0, len(film.changes), description="moment", tooltip=tip, layout=wide()
        )
        self.time = widgets.Text("", description="go to", placeholder="such as 120 ms", continuous_update=False)
        super().__init__([in_a_row([self.run, self.time]), self.slider], [self.slider])
        self.run.observe(lambda _: self.change_run(), "value")
        self.time.observe(lambda _: self.go(), "value")

    @property
    def film(self) -> GatherFilm:
        """The film of the chosen run."""
        return self.films[self.run.value]

    @property
    def moment(self) -> int:
        """The number of changes that have happened."""
        return int(self.slider.value)

    def change_run(self) -> None:
        """Show another run, at the moment when it holds the most weights."""
        with self.slider.hold_trait_notifications():
            self.slider.max = len(self.film.changes)
            self.slider.value = self.film.peak
        self.draw()

    def go(self) -> None:
        """Go to the last change before the typed time; for invalid input show the reason, and stay."""
        typed = self.time.value.strip()
        if not typed:
            return
        try:
            t = parsed(typed, "s")
            if t > self.film.seconds:
                raise ValueError(f"{seconds_text(t)} is after the end of this run at {seconds_text(self.film.seconds)}")
        except ValueError as error:
            self.message.value = escape(f"{error}: the picture is the last one that made sense")
            return
        self.slider.value = bisect.bisect_right(self.film.moments, t) - 1
        self.draw()

    def drawn(self) -> Picture:
        """The chosen run at the present moment."""
        return gather_film(self.film, self.moment, self.run.value)
