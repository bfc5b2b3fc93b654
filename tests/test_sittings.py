"""A lab fits in one sitting: few enough cells, and few enough minutes of reading, running and playing.

    minutes = words of prose / 200 + cells of code that are shown + 2 a widget

A folded cell, of checks or of drawing, counts none: its reader sees a line and what it prints. What is longer becomes
two labs, the second with a letter: 05 and 05b.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from labkit.course.reading.glossary import plain

LABS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("[0-9]*.ipynb"))
MOST_CELLS, MOST_MINUTES = 85, 90
WORDS_A_MINUTE, MINUTES_A_WIDGET = 200, 2
WIDGET = "application/vnd.jupyter.widget-view+json"


class Sitting(NamedTuple):
    """How much there is to read, run and play with in a lab; `shown` are the cells of code that are not folded."""

    cells: int
    words: int
    shown: int
    widgets: int

    @classmethod
    def of(cls, cells: Sequence[dict[str, Any]]) -> Sitting:
        """What is counted in the cells of a notebook."""
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        prose = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        return cls(
            cells=len(cells),
            words=sum(len(plain(text).split()) for text in prose),
            shown=sum(not cell["metadata"].get("jupyter", {}).get("source_hidden", False) for cell in code),
            widgets=sum(WIDGET in output.get("data", {}) for cell in code for output in cell["outputs"]),
        )

    @property
    def minutes(self) -> float:
        """The estimate that the head of this file gives."""
        return self.words / WORDS_A_MINUTE + self.shown + MINUTES_A_WIDGET * self.widgets

    def __str__(self) -> str:
        return (
            f"{self.cells} cells (at most {MOST_CELLS}); {self.minutes:.0f} minutes (at most {MOST_MINUTES}) = "
            f"{self.words} words / {WORDS_A_MINUTE} = {self.words / WORDS_A_MINUTE:.0f}, + {self.shown} cells of code "
            f"that are shown, + {MINUTES_A_WIDGET} * {self.widgets} widgets"
        )


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_fits_in_a_sitting(path: Path) -> None:
    """Would catch a lab that has grown until nobody comes to its end."""
    sitting = Sitting.of(json.loads(path.read_text(encoding="utf-8"))["cells"])
    fits = sitting.cells <= MOST_CELLS and sitting.minutes <= MOST_MINUTES
    assert fits, f"too long for a sitting: {sitting}"


def test_minutes_are_counted_by_words_shown_cells_and_widgets() -> None:
    """Would catch a sum that leaves out a part, and a link of the glossary whose hidden words count as read."""
    cells: list[dict[str, Any]] = [
        {"cell_type": "markdown", "source": ["word " * 399, '[rank](GLOSSARY.md#rank "One process of a group.")']},
        {"cell_type": "code", "metadata": {}, "outputs": [{"data": {WIDGET: {}}}, {"text": ["4"]}]},
        {"cell_type": "code", "metadata": {"jupyter": {"outputs_hidden": True}}, "outputs": []},
        {"cell_type": "code", "metadata": {"jupyter": {"source_hidden": True}}, "outputs": [{"data": {WIDGET: {}}}]},
    ]
    sitting = Sitting.of(cells)
    assert sitting == Sitting(cells=4, words=400, shown=2, widgets=2)
    assert sitting.minutes == 2 + 2 + 4
    parts = ("4 cells", "8 minutes", "400 words / 200 = 2", "2 cells of code", "2 * 2 widgets")
    assert [part for part in parts if part not in str(sitting)] == []
