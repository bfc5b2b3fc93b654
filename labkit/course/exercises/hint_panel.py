"""A panel with three hints and the solution of an exercise, folded: each button opens the next one."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as widgets

from labkit.course.widgets.twin import Twin
from labkit.view.svg import Picture, headline, text

NAMES = ("the idea", "shapes, and who talks", "a skeleton")


class HintPanel(Twin, widgets.VBox):
    """Buttons for three hints and the solution.

    `hint(key, level)` returns a hint with the attribute `.words`, `solution(key)` a solution with `.code`. A hint can
    be opened only after the one before it. If the solution is refused (ValueError: no attempt yet), the panel shows
    why, and the button can be pressed again. `.opened` lists the levels that have been opened here."""

    def __init__(self, key: str, hint: Callable[[str, int], Any], solution: Callable[[str], Any]) -> None:
        self.key, self.hint, self.solution = key, hint, solution
        self.opened: list[int] = []
        self.buttons = [
            widgets.Button(description=f"hint {level}", tooltip=name, disabled=level > 1)
            for level, name in enumerate(NAMES, 1)
        ]
        self.last = widgets.Button(description="solution", tooltip="after an attempt of your own")
        self.message = widgets.HTML()
        for level, button in enumerate(self.buttons, 1):
            button.on_click(lambda _, level=level: self.unfold(level))
        self.last.on_click(lambda _: self.solve())
        super().__init__([widgets.HBox([*self.buttons, self.last]), self.message])

    def unfold(self, level: int) -> None:
        """Unfold a hint."""
        try:
            words = self.hint(self.key, level).words
        except ValueError as error:
            self._show(escape(str(error)))
            return
        if level not in self.opened:
            self.opened.append(level)
        if level < len(self.buttons):
            self.buttons[level].disabled = False
        self._show(f"<b>{level}, {NAMES[level - 1]}:</b> {words_as_html(words)}")

    def solve(self) -> None:
        """Unfold the solution, or show why it is refused."""
        try:
            code = self.solution(self.key).code
        except ValueError as error:
            self._show(escape(str(error)))
            return
        self._show(f"<pre>{escape(code)}</pre>")

    def static(self) -> Picture:
        """The picture that is shown where no widgets run."""
        words = f"{self.key}: three hints and a solution, folded"
        return Picture(headline(words) + text(4, 42, "They open in JupyterLab, one after the other."), 54, words)

    def _show(self, html: str) -> None:
        shown = self.message.value
        self.message.value = shown if html in shown else f"{shown}<div>{html}</div>"


def words_as_html(words: str) -> str:
    """Words as HTML, with `names` between backticks in code's type."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(words))
