"""A question that takes your number before anything runs, and shows it beside the law and the measurement after."""

from __future__ import annotations

import math

import ipywidgets as widgets

from labkit.view.bars import compare
from labkit.view.svg import Picture, value_text


class Predict(widgets.VBox):
    """`question` in words; `value` is the number to begin with; `unit` such as "B", "s" or "messages".

    Type a number, press the button (or Enter). `.value` is the last number that made sense; nonsense leaves it alone
    and says why. `.overlay(law=, measured=)` draws what came of it, and returns the picture."""

    def __init__(self, question: str, value: float = 0.0, unit: str = "B"):
        self.unit, self.value, self.committed = unit, float(value), False
        label = widgets.HTML(f"<b>{question}</b>")
        self.field = widgets.Text(value=f"{value:g}", description="my guess", continuous_update=False)
        self.button = widgets.Button(description="commit", button_style="primary", tooltip="keep this as my prediction")
        self.said = widgets.HTML(f"so far: {value_text(self.value, unit)}")
        self.picture = widgets.HTML()
        self.field.observe(lambda _: self.commit(), "value")
        self.button.on_click(lambda _: self.commit())
        row = widgets.HBox([self.field, widgets.Label(unit), self.button])
        super().__init__([label, row, self.said, self.picture])

    def commit(self) -> None:
        """Take the number in the field."""
        try:
            number = float(self.field.value.replace(",", "").replace("_", ""))
            if not math.isfinite(number) or number < 0:
                raise ValueError
        except ValueError:
            kept = value_text(self.value, self.unit)
            self.said.value = f"{self.field.value!r} is not a number of {self.unit}, 0 or more; still {kept}"
            return
        self.value, self.committed = number, True
        self.said.value = f"you predict {value_text(number, self.unit)}"

    def overlay(self, law: float | None = None, measured: float | None = None, title: str = "") -> Picture:
        """Prediction, law and measurement in one picture; also shown under the question."""
        picture = compare(law=law, prediction=self.value, measured=measured, unit=self.unit, title=title)
        self.picture.value = str(picture)
        return picture
