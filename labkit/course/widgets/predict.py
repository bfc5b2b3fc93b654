"""A question that asks for your number before anything runs, and then shows it with the law and the measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any
from uuid import uuid4

import ipywidgets as widgets
import traitlets
from IPython.display import publish_display_data
from IPython.utils.capture import CapturedIO, capture_output

from labkit.course.widgets.twin import Twin, metadata_of
from labkit.view.bars import compare
from labkit.view.svg import Drawing, Picture, cut, headline, text
from labkit.view.units import parsed, value_text

NOT_YET = "You have not predicted yet"


class Predict(Twin, widgets.VBox):
    """`question` in words; `value` is the number to begin with; `unit` such as "B", "s" or "messages".

    Type a number (`9600`, `1,024`, `2 KiB`, `0.3 ms`), press the button (or Enter). `.value` is the last valid number,
    `.committed` is true once it is yours; invalid input changes neither and shows the reason. `.overlay(measured=,
    law=)` shows the answer; a `law` given here is used if overlay gets none."""

    value = traitlets.Float(0.0)
    committed = traitlets.Bool(False)

    def __init__(self, question: str, value: float = 0.0, unit: str = "B", law: float | None = None):
        self.question, self.unit, self.law = question, unit, law
        self.field = widgets.Text(value=f"{value:.15g}", description="my guess", continuous_update=False)
        self.button = widgets.Button(description="commit", button_style="primary", tooltip="keep this as my prediction")
        self.message = widgets.HTML(f"so far: {escape(value_text(value, unit))}")
        self.picture = widgets.HTML()
        self.field.observe(lambda _: self.commit(), "value")
        self.button.on_click(lambda _: self.commit())
        row = widgets.HBox([self.field, widgets.Label(unit), self.button])
        super().__init__([widgets.HTML(f"<b>{escape(question)}</b>"), row, self.message, self.picture])
        self.value = float(value)
        self.answer: Answer | None = None
        self.folds: list[Fold] = []

    def commit(self) -> None:
        """Take the number in the field, and draw the answer again if there is one already."""
        try:
            number = parsed(self.field.value, self.unit)
        except ValueError as error:
            self.message.value = escape(f"{error}; still {value_text(self.value, self.unit)}")
            return
        self.value, self.committed = number, True
        self.message.value = escape(f"you predict {value_text(number, self.unit)}")
        if self.answer is not None:
            self.answer.update()
        for fold in self.folds:
            fold.update()

    def overlay(
        self,
        measured: float | None = None,
        law: float | None = None,
        title: str = "",
        rehearsed: float | None = None,
    ) -> Answer:
        """Prediction, law and measurement in one picture, with how far each is off; also shown under the question.

        `rehearsed` replaces `measured` for numbers of simulated devices (labkit.rehearse). Before you commit a number
        the answer is folded and has no prediction in it; each commit draws it again."""
        law = self.law if law is None else law
        if measured is None and rehearsed is None and law is None:
            raise ValueError("overlay shows a measurement, a law or both beside a prediction, and got neither")
        self.answer = Answer(self, measured, law, title, rehearsed)
        self.answer.update()
        return self.answer

    @contextmanager
    def folded(self) -> Iterator[None]:
        """Whatever the block prints or displays tells the answer: it stands in a fold until a number is committed.

            with guess.folded():
                print(f"{n_messages} messages")

        What it has shown before an error is shown openly, above the error."""
        try:
            with capture_output() as shown:
                yield
        except BaseException:
            shown.show()
            raise
        self.folds.append(Fold(self, shown))
        self.folds[-1].show()

    def static(self) -> Picture:
        """The question, and the prediction if there is one; the answer is shown where it is overlaid."""
        status = (
            f"you predict {value_text(self.value, self.unit)}" if self.committed else f"{NOT_YET}: run this cell first"
        )
        return Picture(headline(self.question) + text(4, 46, cut(status, 100)), 58, f"{self.question} {status}")

    def kept(self) -> dict[str, Any]:
        """The question and its unit, with which a static page can ask it."""
        return {"question": self.question, "unit": self.unit}


class Fold:
    """What tells the answer to a prediction, at one place of the page: folded, until a number is committed."""

    def __init__(self, question: Predict, shown: CapturedIO | None = None):
        self.question, self.shown, self.place = question, shown, uuid4().hex

    def page(self) -> str:
        """What is in the fold, as HTML: printed lines as they are, pictures and tables as they show themselves."""
        assert self.shown
        printed = f'<pre style="margin:0">{escape(self.shown.stdout)}</pre>' if self.shown.stdout else ""
        bundles = [output._repr_mimebundle_()[0] for output in self.shown.outputs]
        return printed + "".join(data.get("text/html") or escape(data.get("text/plain", "")) for data in bundles)

    def kept(self) -> dict[str, Any]:
        """Nothing: a static page folds the whole cell."""
        return {}

    def _repr_html_(self) -> str:
        if self.question.committed:
            return self.page()
        asked = f"{NOT_YET}. Commit a number above, and then look here; or open this to see the answer at once."
        return f'<details class="lk-fold"><summary>{asked}</summary>{self.page()}</details>'

    def __repr__(self) -> str:
        assert self.shown
        plain = (output._repr_mimebundle_()[0].get("text/plain", "") for output in self.shown.outputs)
        return "\n".join(filter(None, (self.shown.stdout.rstrip("\n"), *plain)))

    def show(self) -> None:
        """Show it here, in the page of the cell that runs."""
        self._publish(anew=False)

    def update(self) -> None:
        """Unfold it, or fold it, where it is shown."""
        self._publish(anew=True)

    def _publish(self, anew: bool) -> None:
        data = {"text/html": self._repr_html_(), "text/plain": repr(self)}
        publish_display_data(data, metadata_of(self.kept()), transient={"display_id": self.place}, update=anew)


class Answer(Fold):
    """The answer to a prediction; `picture` is what it shows."""

    def __init__(
        self, question: Predict, measured: float | None, law: float | None, title: str, rehearsed: float | None = None
    ):
        super().__init__(question)
        self.measured, self.law, self.title = measured, law, title
        self.rehearsed, self.place = rehearsed, ""

    @property
    def picture(self) -> Drawing:
        """Law, prediction and measurement; the number that a question begins with is no prediction."""
        guess = self.question.value if self.question.committed else None
        return compare(self.law, guess, self.measured, self.question.unit, self.title, self.rehearsed)

    def kept(self) -> dict[str, Any]:
        """The question that this answers, and the numbers, with which a static page can draw it."""
        numbers = {"law": self.law, "measured": self.measured, "rehearsed": self.rehearsed}
        return {"answers": self.question.question, "unit": self.question.unit, "title": self.title, **numbers}

    def __str__(self) -> str:
        return str(self.picture)

    def __repr__(self) -> str:
        return repr(self.picture)

    def page(self) -> str:
        """The picture as HTML."""
        return self.picture.html()

    def _ipython_display_(self) -> None:
        self.place = self.place or uuid4().hex
        self.show()

    def update(self) -> None:
        """Draw again with the present prediction, under the question and wherever a cell has shown the answer."""
        if self.question.committed:
            self.question.picture.value = str(self.picture)
        if self.place:
            super().update()
