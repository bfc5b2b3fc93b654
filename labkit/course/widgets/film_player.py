"""Frames that were drawn beforehand, to be stepped through with a slider, buttons or arrow keys, or to be played."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import traitlets

from labkit.course.widgets.live import Live
from labkit.course.widgets.packed import packed
from labkit.course.widgets.twin import Twin
from labkit.view.svg import Drawing


class FilmPlayer(Twin, Live):
    """Shows `frames` one at a time, from frame `step` on.

    Left and right arrow keys step, Home and End jump, a button plays. A step beyond an end is that end. A subclass says
    in `static()` what an export shows, and in `name` what the film is of, for those who cannot see it. `words` say what
    each frame is; without them it is a step."""

    _esm = Path(__file__).with_name("film_player.js")
    _css = Path(__file__).with_name("film_player.css")
    frames = traitlets.List(traitlets.Unicode()).tag(sync=True)
    words = traitlets.List(traitlets.Unicode()).tag(sync=True)
    name = traitlets.Unicode("film").tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)

    def __init__(self, frames: Iterable[Drawing], step: int = 0):
        super().__init__(frames=[str(drawing) for drawing in frames])
        self.step = step

    def kept(self) -> dict[str, Any]:
        """The frames, packed, and how the film is called: a static page plays it."""
        return {"film": packed(self.frames), "name": self.name, "at": self.step}

    @traitlets.validate("step")
    def _within(self, proposal: traitlets.Bunch) -> int:
        return max(0, min(int(proposal["value"]), len(self.frames) - 1))
