"""Derive it on a whiteboard: choose a question, type a formula, and see where it first differs from the truth."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import ipywidgets as widgets

from labkit.course.whiteboard.algebra import latex
from labkit.course.whiteboard.derivation import Derivation
from labkit.course.whiteboard.derivations import DERIVATIONS, derivation
from labkit.course.whiteboard.formula_verdict import KINDS, FormulaVerdict, check
from labkit.course.whiteboard.whiteboard_picture import question, whiteboard
from labkit.course.widgets.explorer import Explorer
from labkit.view.svg import Drawing


class Whiteboard(Explorer):
    """A menu of derivations, a field for a formula (Enter), a menu of symbols to draw over, and the answer on demand.

    `.verdict` is that of the last formula, None before there is one; `.derived` are the names of those solved. For an
    invalid formula the reason is shown with its column, and `.picture` stays the last valid picture. ValueError for a
    name that no derivation has."""

    def __init__(self, first: str = "bubble", names: Iterable[str] | None = None) -> None:
        """`first` is the derivation to begin with, `names` are those of the menu (None: all)."""
        chosen = [entry.name for entry in DERIVATIONS] if names is None else [derivation(name).name for name in names]
        self.asked: Derivation = derivation(first)
        self.verdict: FormulaVerdict | None = None
        self.derived: frozenset[str] = frozenset()
        wide = {"layout": {"width": "auto", "max_width": "500px"}, "style": {"description_width": "90px"}}
        self.choice = widgets.Dropdown(
            options=list(dict.fromkeys([first, *chosen])), value=first, description="derive", **wide
        )
        self.asking, self.reading = widgets.HTML(), widgets.HTMLMath()
        self.field = widgets.Text("", description="formula", placeholder="2*(n-1)/n*N, then Enter", **wide)
        self.field.continuous_update = False
        self.along = widgets.Dropdown(options=self.asked.names, value=self.asked.along, description="over", **wide)
        self.reveal = widgets.Checkbox(False, description="show the answer")
        rows = [self.choice, self.asking, self.field, self.reading, self.along, self.reveal]
        super().__init__(rows, [self.choice, self.field, self.along, self.reveal])

    def drawn(self) -> Drawing:
        """The picture for the present controls. ValueError, with the column, for an invalid formula."""
        if self.choice.value != self.asked.name:
            self.asked, self.field.value, self.reveal.value = derivation(self.choice.value), "", False
        if self.along.options != self.asked.names:
            self.along.options, self.along.value = self.asked.names, self.asked.along
        asked, typed = self.asked, self.field.value.strip()
        names = ", ".join(f"<b>{symbol.name}</b> {escape(symbol.means)}" for symbol in asked.symbols)
        self.asking.value = f"<b>{escape(asked.question)}</b><br>{names}"
        answer = (
            f"<b>{escape(asked.answer)}</b> · as {asked.source} has it · lab {asked.lab}" if self.reveal.value else ""
        )
        self.reading.value, self.verdict = "", None
        self.note = answer
        if not typed:
            return question(asked)
        formula, self.verdict = asked.read(typed), check(asked, typed)
        self.reading.value = f"read as ${latex(formula)}$"
        self.derived |= {asked.name} if self.verdict.right else set()
        head, count = KINDS[self.verdict.kind], f"{len(self.derived)} of {len(self.choice.options)} derived"
        lines = "<br>".join(map(escape, self.verdict.reasons))
        self.note = f"<b>{head}</b> · {count}<br>{lines}" + f"<br>{answer}" * bool(answer)
        return whiteboard(asked, formula, self.along.value, self.verdict.at or asked.draws(1)[0])
