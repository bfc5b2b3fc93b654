"""What breaks first, as a panel: one number of a design case is changed; choose of four answers, the planner judges.

FractureQuestion is one question, which the mock interview asks, too; WhatBreaksPanel has menus for case and change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from html import escape

import ipywidgets as widgets

from labkit.course.interview.what_breaks import CHANGES, KINDS, Fracture, choices, what_breaks
from labkit.course.topics.design_cases import CASES
from labkit.course.widgets.explorer import wide
from labkit.course.widgets.twin import Twin
from labkit.view.svg import Picture, headline, text

LINE = 20


class FractureQuestion(widgets.VBox):
    """One change: choose what breaks, press answer, say the repair aloud, and look at the planner's.

    Tab goes from control to control, arrows choose, Enter presses. `.fracture` is what is asked, `.offered` the four
    kinds, `.right` None until an answer was given. No text of the answer is in the page before."""

    def __init__(
        self,
        fracture: Fracture,
        seed: int = 0,
        on_answer: Callable[[bool], object] | None = None,
        on_mend: Callable[[], object] | None = None,
        mend_question: Callable[[bool], str] = lambda _: "How do you repair it? Say it aloud.",
    ) -> None:
        """`on_answer` is called with whether the choice was right, `on_mend` when the planner's mend is shown;
        `mend_question` gives the follow-up question, for a right choice and for a wrong one."""
        self.fracture, self.offered = fracture, choices(fracture, seed)
        self.on_answer, self.on_mend, self.mend_question = on_answer, on_mend, mend_question
        self.right: bool | None = None
        self.searching = threading.Thread(target=lambda: fracture.mend, daemon=True)
        self.asking = widgets.HTML(f"<b>{escape(fracture.question)}</b>")
        options = [(KINDS[kind], kind) for kind in self.offered]
        self.menu = widgets.RadioButtons(options=options, value=None, layout=wide())
        self.go = widgets.Button(description="answer", tooltip="the planner judges your choice", button_style="primary")
        self.verdict = widgets.HTML(layout=wide())
        self.show_mend = widgets.Button(
            description="show the repair", tooltip="the planner's best plan after the change"
        )
        self.mended = widgets.HTML(layout=wide())
        self.go.on_click(lambda _: self.answer())
        self.show_mend.on_click(lambda _: self.mend())
        self.show_mend.layout.display = "none"
        super().__init__([self.asking, self.menu, self.go, self.verdict, self.show_mend, self.mended])

    def answer(self) -> None:
        """Judge the choice; the first one counts."""
        if self.right is not None:
            return
        if self.menu.value is None:
            self.verdict.value = "Choose one of the four first."
            return
        self.right = self.menu.value == self.fracture.kind
        self.menu.disabled = self.go.disabled = True
        self.searching.start()  # while the learner says a mend aloud
        head = "Right" if self.right else f"No: {KINDS[self.fracture.kind]}"
        words = f"<b>{escape(head)}.</b> {escape(self.fracture.words)}"
        self.verdict.value = f"<p>{words}</p><p>{escape(self.mend_question(self.right))}</p>"
        self.show_mend.layout.display = ""
        if self.on_answer:
            self.on_answer(self.right)
        self.show_mend.focus()

    def mend(self) -> None:
        """Show the planner's mend. The search began with the answer, and takes from a second to half a minute."""
        if self.right is None or self.show_mend.disabled:
            return
        self.show_mend.disabled, self.mended.value = True, "<i>the planner is searching ...</i>"
        self.searching.join()
        self.mended.value = f"<p>{escape(self.fracture.mend_words)}</p>"
        if self.on_mend:
            self.on_mend()


class WhatBreaksPanel(Twin, widgets.VBox):
    """Menus for a case and for the number that is changed; below them the question. `.asked` is the question."""

    def __init__(self, case: str = "eight", seed: int = 0) -> None:
        """ValueError for an unknown case."""
        self.seed = seed
        names = [(design.title, design.name) for design in CASES]
        first = what_breaks(case, CHANGES[0])
        looks = {"style": {"description_width": "60px"}, "layout": wide()}
        self.case = widgets.Dropdown(options=names, value=first.case.name, description="case", **looks)
        self.change = widgets.Dropdown(options=[change.name for change in CHANGES], description="change", **looks)
        self.story, self.room = widgets.HTML(layout=wide()), widgets.VBox()
        self.asked = FractureQuestion(first, seed)
        super().__init__([self.case, self.change, self.story, self.room])
        self._ask(first)
        for menu in (self.case, self.change):
            menu.observe(lambda _: self._ask(what_breaks(self.case.value, self.change.value)), "value")

    def static(self) -> Picture:
        """The question and its four answers, for an export; which one is right is not in it."""
        fracture = self.asked.fracture
        lines = [f"Your plan: {fracture.old}", fracture.question, *(KINDS[kind] for kind in self.asked.offered)]
        words = "What breaks first?"
        drawn = [text(4, 42 + LINE * place, line) for place, line in enumerate(lines)]
        return Picture(headline(words) + "".join(drawn), 54 + LINE * len(lines), "; ".join([words, *lines]))

    def _ask(self, fracture: Fracture) -> None:
        question, plan = escape(fracture.case.question), escape(f"{fracture.old}")
        self.story.value = f"<p>{question}</p><p>The planner's best plan: <code>{plan}</code></p>"
        self.asked = FractureQuestion(fracture, self.seed)
        self.room.children = (self.asked,)
