"""A question that takes your number before anything runs, and shows it beside the law and the measurement after."""

from __future__ import annotations

from html import escape

import ipywidgets as widgets
import traitlets

from labkit.view.bars import compare
from labkit.view.svg import Picture
from labkit.view.units import parsed, value_text
from labkit.view.widgets.twin import Twin


class Predict(Twin, widgets.VBox):
    """`question` in words; `value` is the number to begin with; `unit` such as "B", "s" or "messages".

    Type a number (`9600`, `1,024`, `2 KiB`, `0.3 ms`), press the button (or Enter). `.value` is the last number that
    made sense, `.committed` whether it is yours; nonsense leaves both alone and says why. `.overlay(measured=, law=)`
    draws what came of it, and returns the picture; a `law` given here is used where overlay gets none."""

    value = traitlets.Float(0.0)
    committed = traitlets.Bool(False)

    def __init__(self, question: str, value: float = 0.0, unit: str = "B", law: float | None = None):
        self.question, self.unit, self.law = question, unit, law
        self.field = widgets.Text(value=f"{value:.15g}", description="my guess", continuous_update=False)
        self.button = widgets.Button(description="commit", button_style="primary", tooltip="keep this as my prediction")
        self.said = widgets.HTML(f"so far: {escape(value_text(value, unit))}")
        self.picture = widgets.HTML()
        self.field.observe(lambda _: self.commit(), "value")
        self.button.on_click(lambda _: self.commit())
        row = widgets.HBox([self.field, widgets.Label(unit), self.button])
        super().__init__([widgets.HTML(f"<b>{escape(question)}</b>"), row, self.said, self.picture])
        self.value = float(value)
        self.drawn: Picture | None = None

    def commit(self) -> None:
        """Take the number in the field."""
        try:
            number = parsed(self.field.value, self.unit)
        except ValueError as error:
            self.said.value = escape(f"{error}; still {value_text(self.value, self.unit)}")
            return
        self.value, self.committed = number, True
        self.said.value = escape(f"you predict {value_text(number, self.unit)}")

    def overlay(self, measured: float | None = None, law: float | None = None, title: str = "") -> Picture:
        """Prediction, law and measurement in one picture, with how far each is off; also shown under the question."""
        law = self.law if law is None else law
        self.drawn = compare(law=law, prediction=self.value, measured=measured, unit=self.unit, title=title)
        self.picture.value = str(self.drawn)
        return self.drawn

    def static(self) -> Picture:
        """The last overlay; before there is one, the question with the number so far."""
        return self.drawn or compare(prediction=self.value, unit=self.unit, title=self.question)
