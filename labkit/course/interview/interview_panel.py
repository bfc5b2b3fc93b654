"""A mock interview in a notebook: a clock in the browser, questions, answers, points to tick, and a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

import ipywidgets as widgets

from labkit.course.cards.card_faces import back, formulas, front
from labkit.course.interview.interview import Interview
from labkit.course.interview.interview_clock import SessionClock
from labkit.course.interview.interview_picture import clock_text, spoken
from labkit.course.topics.planner_panel import PlannerPanel
from labkit.course.whiteboard.derivation import Derivation
from labkit.course.whiteboard.whiteboard import Whiteboard
from labkit.course.widgets.linked import Linked
from labkit.course.widgets.twin import Twin
from labkit.view.svg import Picture, headline, text

MINUTES = (5, 10, 15, 20, 30, 45, 60, 90, 120)
LEVELS = (("1  first steps", 1), ("2  easy", 2), ("3  what one should know", 3), ("4  hard", 4), ("5  very hard", 5))
KINDS = (("follow-up", "Follow-up"), ("derivation", "Derive this on the whiteboard"), ("design", "System design"))
LINES = "style='line-height:1.4'"
NOTES = "notes for yourself; the answer is said aloud"


class InterviewPanel(Twin, widgets.VBox):
    """Choose minutes, level and topics and start; say your answer, show a good one, tick what you said, go on.
    A formula is checked, a design case brings the planner, and at the end there is the report.

    Tab goes from control to control, space ticks, Enter presses. `.session` is the running session, None before the
    start, `.points` are the boxes to tick by their names, `.noted` the notes as (question, words)."""

    def __init__(
        self,
        interview: Interview | Callable[[float, int, tuple[str, ...]], Interview],
        planner: Callable[[str], widgets.Widget] | None = None,
        on_rate: Callable[[str, int], object] | None = None,
        topics: Iterable[str] = (),
    ) -> None:
        """`interview` is a session, or makes one of (minutes, level, topics); `topics` are those to choose from.

        `planner` makes a widget for the name of a case (None: PlannerPanel); `on_rate` is called with each card's id
        and its rating from 1 to 5."""
        self.make = interview if callable(interview) else None
        self.session: Interview | None = None
        self.planner, self.on_rate = planner or PlannerPanel, on_rate
        self.noted: list[tuple[str, str]] = []
        self.points: dict[str, widgets.Checkbox] = {}
        self.board: widgets.Widget | None = None
        wide = {"style": {"description_width": "70px"}, "layout": {"width": "auto", "max_width": "340px"}}
        self.minutes = widgets.Dropdown(options=MINUTES, value=30, description="minutes", **wide)
        self.level = widgets.Dropdown(options=LEVELS, value=3, description="level", **wide)
        self.topics = widgets.SelectMultiple(options=tuple(topics), description="topics", rows=8, **wide)
        self.go = _button("start", "the clock runs from now", self.start, "primary")
        self.clock, self.asking, self.room = SessionClock(), widgets.HTML(), widgets.VBox()
        self.clock.on_msg(lambda *_: self.tell_time())
        self.notes = widgets.Textarea(placeholder=NOTES, rows=4, layout={"width": "auto", "max_width": "720px"})
        self.show_answer = _button("show the answer", "your time for this question ends", self.show, "primary")
        self.pass_over = _button("skip", "go on without an answer", self.skip)
        self.stop = _button("end", "stop here, and see the report", self.end)
        self.answer, self.ticks = Linked(), widgets.VBox()
        self.onward = _button("next", "keep these points, and go on", self.next, "primary")
        self.message, self.report = widgets.HTML(), Linked()
        self.restart_button = _button("again", "another interview", self.restart)
        topics_too = (self.topics,) if self.topics.options else ()
        opening = widgets.HTML("<b>Mock interview.</b> Topics: none chosen means all; with Ctrl several.")
        self.first = widgets.VBox([opening, self.minutes, self.level, *topics_too, self.go])
        buttons = widgets.HBox([self.show_answer, self.pass_over, self.stop])
        self.page = widgets.VBox(
            [self.clock, self.asking, self.room, self.notes, buttons, self.answer, self.ticks, self.onward]
        )
        self.last = widgets.VBox([self.report, self.restart_button])
        super().__init__([self.message, self.first, self.page, self.last])
        self._turn(self.first)
        if not callable(interview):
            self.session = interview
            self._ask()

    def start(self) -> None:
        """Begin, with the chosen settings. If they make no session, the panel shows the reason."""
        assert self.make
        try:
            self.session = self.make(self.minutes.value, self.level.value, tuple(self.topics.value))
        except (OSError, ValueError) as error:
            self.message.value = escape(str(error))
            return
        self.noted.clear()
        self._ask(focus=True)

    def show(self) -> None:
        """Show a good answer; the time for the question stops here."""
        if self.show_answer.disabled:
            return
        session = self._running()
        asked = session.question
        assert asked
        parts = session.reveal()
        if asked.card is not None:
            self.answer.value = f"<div {LINES}>{back(asked.card)}</div>"
        else:
            rows = "".join(f"<dt><b>{escape(name)}</b></dt><dd>{formulas(words)}</dd>" for name, words in parts.items())
            self.answer.value = f"<dl {LINES}>{rows}</dl>"
        late = session.used_s > asked.budget_s
        for point, words in session.rubric.items() if not session.rated else ():
            box = widgets.Checkbox(description=words, indent=False, layout={"width": "auto"})
            if point == "time":  # it is measured, so the learner cannot tick it
                box.value, box.disabled = not late, True
            self.points[point] = box
        heading = "Your formula is the rating." if session.rated else "What did you say? Tick it."
        self.ticks.children = (widgets.HTML(f"<b>{heading}</b>"), *self.points.values())
        if isinstance(self.board, Whiteboard):
            self.board.field.disabled = True
        elif isinstance(self.board, widgets.Accordion):
            self.board.selected_index = 0
        self._reveal(True)
        self.tell_time()
        next((box for box in self.points.values() if not box.disabled), self.onward).focus()

    def next(self) -> None:
        """Keep the points, and go on. Ignored while no answer is shown: that is a second press on the same button."""
        if not self.show_answer.disabled:
            return
        session = self._running()
        points = {name: box.value for name, box in self.points.items() if not box.disabled}
        self._note()
        session.rate(None if session.rated else points)
        kept, failed = session.asked[-1], ""
        if self.on_rate and kept.rating:  # only a card's points make a rating
            try:
                self.on_rate(kept.key, kept.rating)
            except (OSError, ValueError) as error:  # the interview goes on whatever the box of cards does
                failed = f"this rating was not kept: {error}"
        self._ask(failed, focus=True)

    def skip(self) -> None:
        """Go on without an answer."""
        self._note()
        self._running().skip()
        self._ask(focus=True)

    def end(self) -> None:
        """Stop, and show the report."""
        self._note()
        self._running().end()
        self._ask()

    def restart(self) -> None:
        """Go back to the page with the settings."""
        self.session = None
        self._turn(self.first)
        self.go.focus()

    def tell_time(self) -> None:
        """Send the session's time to the browser's clock."""
        session = self.session
        if session is None or session.question is None:
            return
        with self.clock.hold_sync():
            self.clock.left_s, self.clock.used_s = session.left_s, session.used_s
            self.clock.budget_s = session.question.budget_s
            self.clock.shown = self.show_answer.disabled
            self.clock.beat += 1

    def static(self) -> Picture:
        """The report so far, for an export; before the start, a line about the panel."""
        if self.session is not None and self.session.asked:
            return spoken(self.session.report())
        words = "A mock interview: questions against a clock, a rubric, a report"
        return Picture(headline(words) + text(4, 42, "It starts in JupyterLab."), 54, words)

    def _running(self) -> Interview:
        assert self.session
        return self.session

    def _note(self) -> None:
        asked = self._running().question
        if asked is not None and self.notes.value.strip():
            self.noted.append((asked.words, self.notes.value.strip()))

    def _turn(self, page: widgets.Widget) -> None:
        """Show one of the three pages. All of them stay in place, since a control that is replaced loses the focus."""
        for candidate in (self.first, self.page, self.last):
            candidate.layout.display = "" if candidate is page else "none"

    def _reveal(self, shown: bool) -> None:
        """Show the upper buttons before the answer, and the boxes to tick after it."""
        self.show_answer.disabled = self.pass_over.disabled = shown
        for widget in (self.answer, self.ticks, self.onward):
            widget.layout.display = "" if shown else "none"

    def _ask(self, failed: str = "", focus: bool = False) -> None:
        """Show the next question, or the report. The focus moves only after the learner has pressed something."""
        session = self._running()
        asked, number = session.question, len(session.asked) + 1
        self.message.value = escape("; ".join(filter(None, (failed, session.note))))
        if asked is None:
            self._finish(session, focus)
            return
        self.notes.value, self.answer.value, self.ticks.children, self.board = "", "", (), None
        self.points = {}
        words = front(asked.card) if asked.card is not None else escape(asked.words)
        words = f"<b>{words}</b>" * (asked.derivation is None)  # the whiteboard says its own
        kind = dict(KINDS).get(asked.kind, "Question")
        self.asking.value = f"<p>{number} · {kind} · {clock_text(asked.budget_s)} min</p>{words}"
        if asked.derivation is not None:
            self.board = self._whiteboard(asked.derivation)
        elif asked.case is not None:
            planner = self.planner(asked.case.name)
            self.board = widgets.Accordion([planner], titles=("the planner, with this case loaded",))
        self.room.children = (self.board,) if self.board is not None else ()
        self._turn(self.page)
        self._reveal(False)
        self.tell_time()
        if focus:
            (self.board.field if isinstance(self.board, Whiteboard) else self.notes).focus()

    def _whiteboard(self, asked: Derivation) -> Whiteboard:
        """A whiteboard for this question, which does not show its answer; each formula goes to the session."""
        board = Whiteboard(asked.name, [asked.name])
        board.children = (board.asking, board.field, board.reading, board.along, board.message, board.shown)
        board.field.observe(lambda change: self._formula(board, change["new"].strip()), "value")
        return board

    def _formula(self, board: Whiteboard, formula: str) -> None:
        if board is not self.board or board.verdict is None or self.show_answer.disabled:
            return  # not a formula, which the board has said; or the question is over
        if self._running().answer(formula).right:
            self.show()

    def _finish(self, session: Interview, focus: bool) -> None:
        self.room.children, self.board = (), None
        noted = "".join(f"<dt><b>{escape(asked)}</b></dt><dd>{escape(words)}</dd>" for asked, words in self.noted)
        notes = f"<details><summary>your answers and notes</summary><dl {LINES}>{noted}</dl></details>" if noted else ""
        self.report.value = f"{session.report()._repr_html_()}{notes}"
        self.restart_button.layout.display = "" if self.make else "none"
        self._turn(self.last)
        if focus and self.make:
            self.restart_button.focus()


def _button(words: str, tooltip: str, act: Callable[[], None], style: str = "") -> widgets.Button:
    button = widgets.Button(description=words, tooltip=tooltip, button_style=style)
    button.on_click(lambda _: act())
    return button
