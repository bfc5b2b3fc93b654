"""How far am I, and what next? A row for each lab, a box for each exercise, a table, and a button to read again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import ipywidgets as widgets

from labkit.course.learner.progress_picture import Standing, progress, table
from labkit.course.widgets.explorer import Explorer
from labkit.view.svg import Picture

ALL = "all labs"


class ProgressPanel(Explorer):
    """`rows()` gives the state of each exercise; it is called now, and when the button is pressed.

    A menu chooses a lab. `.rows` are the shown rows, `.table` is their table. If the rows cannot be read, the reason is
    shown, and the last picture stays. Tab goes from menu to button, arrow keys choose, Enter presses."""

    def __init__(self, rows: Callable[[], Sequence[Standing]], lab: str = "") -> None:
        """`lab` is the one to begin with, "03". ValueError if it has no exercise."""
        self.ask, self.rows = rows, tuple[Standing, ...]()
        self._every, self._fault = tuple[Standing, ...](), ""
        self.table = widgets.HTML()
        self.lab = widgets.Dropdown(options=(ALL,), description="lab", tooltip="whose exercises")
        self.refresh_button = widgets.Button(description="refresh", tooltip="read again what was done")
        self.refresh_button.on_click(lambda _: self.refresh())
        self._read()
        if lab and lab not in self.lab.options:
            raise ValueError(f"lab {lab!r} has no exercise; there are {', '.join(self.lab.options[1:]) or 'none'}")
        self.lab.value = lab or ALL
        above = widgets.HBox([self.lab, self.refresh_button])
        super().__init__([above], [self.lab])
        self.children = (above, self.message, self.shown, self.table)

    def refresh(self) -> None:
        """Read the rows again, and draw."""
        self._read()
        self.draw()

    def drawn(self) -> Picture:
        """The picture for the chosen lab."""
        lab = self.lab.value
        self.note = self._fault
        self.rows = tuple(row for row in self._every if lab in (ALL, row.lab))
        self.table.value = table(self.rows)
        return progress(self.rows, "" if lab == ALL else f"lab {lab}")

    def _read(self) -> None:
        """Read the rows; the menu keeps its choice if it still exists."""
        try:
            self._every, self._fault = tuple(self.ask()), ""
        except (OSError, ValueError) as error:
            self._fault = f"{escape(str(error))}: this is how far you were before"
            return
        labs, chosen = (ALL, *dict.fromkeys(row.lab for row in self._every)), self.lab.value
        if self.lab.options != labs:
            self.lab.options = labs
            self.lab.value = chosen if chosen in labs else ALL
