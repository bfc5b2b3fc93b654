"""The mock interview of 45 minutes in a notebook: a clock for each phase, points to tick, follow-ups, and a report."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from html import escape

import ipywidgets as widgets

from labkit.course.cards.card_faces import formulas
from labkit.course.interview.interview_clock import SessionClock
from labkit.course.interview.mock_interview import FollowUp, MockInterview, mend_question
from labkit.course.interview.mock_report import MockLog
from labkit.course.interview.mock_script import BREAKS, the_script
from labkit.course.interview.what_breaks_panel import FractureQuestion
from labkit.course.topics.design_cases import CASES, case as case_of
from labkit.course.widgets.explorer import wide
from labkit.course.widgets.linked import Linked
from labkit.course.widgets.twin import Twin
from labkit.view.svg import Picture, headline, text

LINE = 20


class MockInterviewPanel(Twin, widgets.VBox):
    """Choose a case and start; say your answer aloud, show the points, tick what you said, answer the follow-ups.

    Tab goes from control to control, space ticks, Enter presses. `.session` is the running interview, None before the
    start; `.boxes` are the points to tick by their names; `.asked` is the open follow-up or change, None if there is
    none."""

    def __init__(
        self,
        history: MockLog | None = None,
        make: Callable[..., MockInterview] = MockInterview,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`history` keeps the reports (None: in the user's data folder); `make` makes a session of (case, without=names
        of changes)."""
        self.history = history if history is not None else MockLog()
        self.make, self.now = make, now
        self.session: MockInterview | None = None
        self.boxes: dict[str, widgets.Checkbox] = {}
        self.asked: FollowUp | FractureQuestion | None = None
        self.working = dict[str, threading.Thread]()
        names = [(design.title, design.name) for design in CASES]
        self.case = widgets.Dropdown(
            options=names, description="case", style={"description_width": "60px"}, layout=wide()
        )
        self.case.observe(lambda _: self.prepare(), "value")
        self.go = _button("start", "the clock of the first phase runs from now", lambda: self.start(self.case.value))
        self.proposed = widgets.HTML(layout=wide())
        self.repeat = _button("second try", "another case of the same level, with other changes", self.second_try)
        self.clock, self.asking, self.message = SessionClock(), widgets.HTML(layout=wide()), widgets.HTML()
        self.clock.on_msg(lambda *_: self.tell_time())
        self.notes = widgets.Textarea(
            placeholder="notes and sums for yourself; nobody reads them", rows=6, layout=wide()
        )  # fmt: skip
        self.show = _button("show the points", "say your answer first", self.reveal)
        self.room = widgets.VBox()
        self.onward = _button("next", "keep these ticks, and go on", self.next)
        self.report = Linked()
        self.first = widgets.VBox([widgets.HTML(_opening()), self.case, self.go, self.proposed, self.repeat])
        self.page = widgets.VBox([self.clock, self.asking, self.notes, self.show, self.room, self.onward])
        self.last = widgets.VBox([self.report])
        super().__init__([self.message, self.first, self.page, self.last])
        self._turn(self.first)
        self._propose()
        self.prepare()

    def prepare(self) -> threading.Thread:
        """Let the planner work the chosen case out while its question is not asked yet: a large one takes seconds, and
        the case keeps what was found. The thread only computes; `start` waits until it has."""
        name = self.case.value
        if name not in self.working:
            self.working[name] = threading.Thread(target=lambda: case_of(name).found, daemon=True)
            self.working[name].start()
        return self.working[name]

    def start(self, case: str, without: tuple[str, ...] = ()) -> None:
        """Begin an interview, as soon as the planner has worked the case out."""
        self.message.value = "<i>the planner works the case out ...</i>"
        if case in self.working:  # one search, not two beside each other
            self.working[case].join()
        try:
            self.session = self.make(case, without=without)
        except ValueError as error:
            self.message.value = escape(str(error))
            return
        self.message.value = ""
        self._begin()

    def second_try(self) -> None:
        """Begin the second try that the history proposes."""
        try:
            proposal = self.history.second_try()
        except (OSError, ValueError) as error:
            self.message.value = escape(str(error))
            return
        self.start(proposal.case, proposal.without)

    def reveal(self) -> None:
        """Show the points of a whole answer to tick; in the phase of changes, the first change."""
        if self.show.disabled:
            return
        session, self.show.disabled = self._running(), True
        if session.phase is not None and session.phase.name == BREAKS:
            self._ask_change(0)
            return
        points = session.reveal()
        self.boxes = {name: _box(name) for name in points}
        rows = (_beside(box, points[name]) for name, box in self.boxes.items())
        self.room.children = (widgets.HTML("<b>What did you say? Tick it.</b>"), *rows)
        self._open(self.onward)
        next(iter(self.boxes.values())).focus()

    def next(self) -> None:
        """Keep the ticks, and go on to the next follow-up, change or phase."""
        if self.onward.disabled:
            return
        session, came = self._running(), any(box.value for box in self.boxes.values())
        place = session.place
        if isinstance(self.asked, FractureQuestion):
            number = session.fractures.index(self.asked.fracture)
            session.mended(number, came)
            if session.place == place:
                self._ask_change(number + 1)
                return
        elif self.asked is not None:
            session.follow(self.asked.key, came)
        else:
            session.tick({name: box.value for name, box in self.boxes.items()})
        if session.place != place:
            self._begin()
        else:
            self._ask_follow_up(session.follow_ups[0])

    def tell_time(self) -> None:
        """Send the session's time to the browser's clock."""
        session = self.session
        if session is None or session.phase is None:
            return
        with self.clock.hold_sync():
            self.clock.left_s, self.clock.used_s = session.left_s, session.used_s
            self.clock.budget_s = session.phase.budget_s
            self.clock.beat += 1

    def static(self) -> Picture:
        """The phases with their minutes, for an export; the points are not in it."""
        words = "A mock interview of a design problem"
        lines = [f"{phase.minutes:g} minutes: {phase.title}" for phase in the_script()]
        drawn = [text(4, 42 + LINE * place, line) for place, line in enumerate(lines)]
        return Picture(headline(words) + "".join(drawn), 54 + LINE * len(lines), "; ".join([words, *lines]))

    def _running(self) -> MockInterview:
        assert self.session
        return self.session

    def _begin(self) -> None:
        """Show the next phase, or the report."""
        session = self._running()
        self.boxes, self.asked, self.notes.value = {}, None, ""
        phase = session.phase
        if phase is None:
            self._finish(session)
            self.room.children = ()
            return
        head = f"{session.place + 1} of {len(session.phases)} · {phase.title} · {phase.minutes:g} min"
        plan = f"<p>Your plan is the planner's: <code>{escape(str(session.fractures[0].old))}</code></p>"
        shown = plan if phase.name == BREAKS else ""
        self.asking.value = f"<p>{head}</p><p><b>{escape(session.ask)}</b></p>{shown}"
        self.room.children = ()
        self.show.description = "ask me" if phase.name == BREAKS else "show the points"
        self.show.disabled = False
        self._close(self.onward)
        self._turn(self.page)
        self.tell_time()
        self.notes.focus()

    def _ask_follow_up(self, question: FollowUp) -> None:
        self.asked, self.boxes = question, {}
        answer = widgets.HTML(layout=wide())
        button = _button("show the answer", "say yours first", lambda: self._answered(question, answer, button))
        kind = "A hint" if question.key.startswith("missed") else "Deeper"
        asking = widgets.HTML(f"<p>{kind}: <b>{formulas(question.ask)}</b></p>", layout=wide())
        self.room.children = (asking, button, answer)
        self._close(self.onward)
        button.focus()

    def _answered(self, question: FollowUp, answer: widgets.HTML, button: widgets.Button) -> None:
        if button.disabled:
            return
        button.disabled, answer.value = True, f"<p>{formulas(question.answer)}</p>"
        self.boxes = {question.key: _box("I had said that")}
        self.room.children = (*self.room.children, *self.boxes.values())
        self._open(self.onward)
        self.boxes[question.key].focus()

    def _ask_change(self, number: int) -> None:
        session = self._running()
        fracture = session.fractures[number]
        self.boxes = {}
        asked = FractureQuestion(
            fracture,
            session.seed,
            lambda _: session.choose(number, asked.menu.value),
            lambda: self._mended(number),
            lambda right: mend_question(fracture, right),
        )
        self.asked, self.room.children = asked, (asked,)
        self._close(self.onward)
        asked.menu.focus()

    def _mended(self, number: int) -> None:
        self.boxes = {f"mend {number}": _box("My repair is the planner's, or it fits as well and I said what it costs")}
        self.room.children = (*self.room.children, *self.boxes.values())
        self._open(self.onward)

    def _finish(self, session: MockInterview) -> None:
        """Show the report, and keep it."""
        report = session.report()
        self.history.keep(report)
        self.report.value = f"{report._repr_html_()}<p>{self._proposal()[0]}</p>"
        self.message.value = escape(self.history.note)
        self._turn(self.last)

    def _propose(self) -> None:
        """Offer the second try where there was a first."""
        self.proposed.value, possible = self._proposal()
        self.repeat.layout.display = "" if possible else "none"

    def _proposal(self) -> tuple[str, bool]:
        """When to try again, or why nothing is proposed, as HTML; and whether there is a second try."""
        try:
            if not self.history.reports():
                return "", False
            return escape(self.history.second_try().words(self.now())), True
        except (OSError, ValueError) as error:  # the interview goes on whatever the file does
            return escape(str(error)), False

    def _open(self, button: widgets.Button) -> None:
        button.disabled, button.layout.display = False, ""

    def _close(self, button: widgets.Button) -> None:
        button.disabled, button.layout.display = True, "none"

    def _turn(self, page: widgets.Widget) -> None:
        """Show one of the three pages; all of them stay in place, since a control that is replaced loses the focus."""
        for candidate in (self.first, self.page, self.last):
            candidate.layout.display = "" if candidate is page else "none"


def _opening() -> str:
    minutes = sum(phase.minutes for phase in the_script())
    phases = ", ".join(f"{phase.title.lower()} {phase.minutes:g}" for phase in the_script())
    return (
        f"<b>A mock interview of {minutes:g} minutes</b> about one design problem: {phases}. Say every answer aloud "
        "before you look; you tick yourself what you said."
    )


def _box(words: str) -> widgets.Checkbox:
    return widgets.Checkbox(description=words, indent=False, layout={"width": "auto"})


def _beside(box: widgets.Checkbox, words: str) -> widgets.HBox:
    """A box with a text beside it, which may take several lines, as the words of a box cannot."""
    box.layout = {"width": "120px", "flex": "0 0 auto"}
    text_beside = widgets.HTML(formulas(words), layout={"flex": "1 1 auto", "min_width": "0"})
    return widgets.HBox([box, text_beside], layout=wide())


def _button(words: str, tooltip: str, act: Callable[[], None]) -> widgets.Button:
    button = widgets.Button(description=words, tooltip=tooltip, button_style="primary")
    button.on_click(lambda _: act())
    return button
