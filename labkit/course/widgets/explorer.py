"""The frame of every explorer: controls above, a picture below; for invalid input the last valid picture stays."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import ipywidgets as widgets

from labkit.course.widgets.recorded import Recorded
from labkit.view.svg import Drawing, Picture, text


class Explorer(Recorded, widgets.VBox):
    """A subclass makes its controls, and returns in `drawn()` the picture that they describe.

    It is drawn now and whenever one of `controls` changes. If `drawn` raises ValueError, the reason is shown,
    `.picture` stays the last valid one, and `.is_valid` is False. `note` is a line (HTML) above the picture, which
    `drawn` may set; it is empty otherwise. `recorded_over` names controls over which a film is stored (recorded.py)."""

    def __init__(self, rows: Iterable[widgets.Widget], controls: Iterable[widgets.Widget]) -> None:
        """`rows` stand above the picture; `controls` are those widgets in them that draw it again."""
        self.message, self.shown, self.note, self._at_work = widgets.HTML(), widgets.HTML(), "", False
        self.is_valid = True
        self.picture: Drawing | None = None
        super().__init__([*rows, self.message, self.shown])
        for control in controls:
            # ipywidgets shows an empty menu for the value None, also where None is one of the options
            shows = getattr(control, "index", 0) is not None
            assert shows, f"{control.description!r} of {type(self).__name__} starts without a choice"
            control.observe(lambda _: self.draw(), "value")
        self.draw()

    def drawn(self) -> Drawing:
        """The picture for the present controls. ValueError for invalid ones."""
        raise AssertionError(f"{type(self).__name__} does not say what it draws")

    def draw(self) -> None:
        """Draw for the present controls. Changes that `drawn` makes to controls do not draw again."""
        if self._at_work:
            return
        self.note, self._at_work = "", True
        try:
            self.picture = self.drawn()
            self.shown.value, self.message.value = str(self.picture), self.note
            self.is_valid = True
        except ValueError as error:
            self.is_valid = False
            self.message.value = escape(f"{error}: the picture is the last one that made sense")
        finally:
            self._at_work = False

    def frame(self) -> Drawing:
        """The picture for the present controls, drawn when they moved. ValueError if they are invalid."""
        if not self.is_valid:
            raise ValueError(self.message.value)
        return self.static()

    def static(self) -> Drawing:
        """The last valid picture, for an export; a line if there was none."""
        return self.picture or Picture(text(4, 20, "nothing was drawn"), 30, "nothing was drawn")


def in_two_columns(controls: Iterable[widgets.Widget]) -> widgets.GridBox:
    """Controls side by side, as wide as their words; below one another where a window is too narrow for two."""
    columns = {"grid_template_columns": "repeat(auto-fit, minmax(300px, 1fr))", "max_width": "680px"}
    return widgets.GridBox(list(controls), layout=columns)


def in_a_row(controls: Iterable[widgets.Widget]) -> widgets.HBox:
    """Controls side by side; a window that is too narrow gets several rows."""
    return widgets.HBox(list(controls), layout={"flex_flow": "row wrap"})


def wide() -> dict[str, str]:
    """The layout of a control that is as wide as a picture, in a window that has the room."""
    return {"width": "auto", "max_width": "680px"}
