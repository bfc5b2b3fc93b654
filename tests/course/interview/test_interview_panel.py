"""The panel of the mock interview, clicked through as a learner would, with a clock that goes when it is told to."""

from __future__ import annotations

import re
from html import unescape

import ipywidgets as widgets
import pytest

from labkit.course.cards.deck import Deck, the_deck
from labkit.course.interview.interview import Interview
from labkit.course.interview.interview_clock import SessionClock
from labkit.course.interview.interview_panel import InterviewPanel
from labkit.course.topics.planner_panel import PlannerPanel
from labkit.course.whiteboard.whiteboard import Whiteboard
from labkit.course.widgets.linked import Linked
from tests.view import page

SMALL = Deck(tuple(card for card in the_deck() if card.difficulty <= 3)[:60])


class Clock:
    """Goes when it is told to."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


class Room:
    """A panel over a small deck, what it has told the box of cards, and its clock."""

    def __init__(self, deck: Deck = SMALL, seed: int = 1, **more: object) -> None:
        self.clock, self.rated, self.planned = Clock(), list[tuple[str, int]](), list[str]()
        self.panel = InterviewPanel(
            lambda minutes, level, topics: Interview(
                deck, minutes, level, seed=seed, clock=self.clock, topics=topics, **more
            ),
            self.plan,
            lambda id, rating: self.rated.append((id, rating)),
            deck.tags(),
        )

    def plan(self, case: str) -> widgets.Widget:
        self.planned.append(case)
        return widgets.HTML(case)

    @property
    def asked(self):
        return self.panel.session.question

    def start(self, minutes: int = 30, level: int = 3, topics: tuple[str, ...] = ()) -> InterviewPanel:
        self.panel.minutes.value, self.panel.level.value, self.panel.topics.value = minutes, level, topics
        self.panel.go.click()
        return self.panel

    def until(self, kind: str) -> InterviewPanel:
        """Skip up to a question of this kind; new rooms until there is one."""
        for seed in range(60):
            self.__init__(seed=seed)
            self.start()
            while self.asked and self.asked.kind != kind:
                self.clock.now += 60
                self.panel.pass_over.click()
            if self.asked:
                return self.panel
        raise AssertionError(f"no {kind} is asked")


def seen(widget: widgets.Widget) -> list[widgets.Widget]:
    """All widgets that are shown, in the order of Tab."""
    if getattr(widget, "layout", None) is not None and widget.layout.display == "none":
        return []
    return [widget, *(each for child in getattr(widget, "children", ()) for each in seen(child))]


def words(panel: InterviewPanel) -> str:
    """What there is to read."""
    told = (each for each in seen(panel) if isinstance(each, (widgets.HTML, Linked)))
    return " ".join(unescape(re.sub("<[^>]+>", " ", each.value)) for each in told)


def controls(panel: InterviewPanel) -> list[str]:
    """What Tab comes by."""
    kinds = (widgets.Button, widgets.Checkbox, widgets.Text, widgets.Textarea, widgets.Dropdown, widgets.SelectMultiple)
    found = [each for each in seen(panel) if isinstance(each, kinds) and not each.disabled]
    return [each.description or type(each).__name__ for each in found]


def test_a_whole_session_is_clicked_through_from_start_to_report():
    """Would catch a page that stays, an answer before it is asked for, points that are lost, and no report."""
    room = Room()
    assert controls(room.panel) == ["minutes", "level", "topics", "start"]
    panel = room.start(minutes=30, level=3)
    kinds, expected = [], []
    while room.asked:
        asked = room.asked
        kinds.append(asked.kind)
        assert asked.words.split()[0] in words(panel)
        assert panel.answer.value == ""
        assert "show the answer" in controls(panel)
        assert "next" not in controls(panel)
        room.clock.now += 60
        panel.notes.value = f"note {len(kinds)}"
        panel.show_answer.click()
        assert len(panel.answer.value) > 40
        assert panel.notes.value == f"note {len(kinds)}"
        assert controls(panel)[-1] == "next"
        assert panel.points["time"].value if "time" in panel.points else True
        for name in list(panel.points)[:2]:
            panel.points[name].value = True
        expected.append([name for name, box in panel.points.items() if box.value])
        panel.onward.click()
    report = panel.session.report()
    assert [[name for name, came in each.points.items() if came] for each in report.asked] == expected
    assert {"card", "follow-up", "design"} <= set(kinds)
    assert [id for id, _ in room.rated] == [each.key for each in report.asked if each.kind in ("card", "follow-up")]
    assert all(1 <= rating <= 5 for _, rating in room.rated)
    assert report.judgement in words(panel)
    assert "note 1" in words(panel)
    assert controls(panel) == ["again"]
    page.check(panel.static())
    panel.restart_button.click()
    assert controls(panel)[-1] == "start"


def test_a_card_that_is_pressed_twice_is_not_two_cards():
    """Would catch a double click that rates the next question, unseen, as a bad answer."""
    room = Room()
    panel = room.start()
    panel.show_answer.click()
    panel.points["claim"].value = True
    panel.show_answer.click()
    assert panel.points["claim"].value
    panel.onward.click()
    panel.onward.click()
    assert len(panel.session.asked) == len(room.rated) == 1


def test_a_design_case_brings_the_planner_folded_until_the_answer_is_shown():
    """Would catch a planner of another case, one that gives the answer away, and asks that cannot be ticked."""
    room = Room()
    panel = room.until("design")
    assert room.planned == [room.asked.case.name]
    assert panel.board.selected_index is None
    assert room.asked.case.question in words(panel)
    room.clock.now += 600
    panel.show_answer.click()
    assert panel.board.selected_index == 0
    assert [box.description for box in panel.points.values()] == list(room.asked.case.asks)
    told = list(room.rated)
    panel.onward.click()
    assert room.rated == told  # a case is no card


def test_without_a_planner_of_ones_own_the_case_is_loaded_into_labkits():
    """Would catch a panel whose default is not there."""
    room = Room()
    room.until("design")
    case = room.asked.case.name
    panel = InterviewPanel(room.panel.session)
    (planner,) = panel.board.children
    assert isinstance(planner, PlannerPanel)
    assert planner.case.name == case


def test_a_formula_goes_to_the_session_and_a_right_one_shows_the_answer():
    """Would catch a whiteboard whose verdict counts for nothing, and one that shows the answer before."""
    room = Room()
    panel = room.until("derivation")
    board = panel.board
    assert isinstance(board, Whiteboard)
    assert words(panel).count(room.asked.words) == 1
    assert controls(panel)[:2] == ["formula", "over"]
    answer = room.asked.derivation.answer
    board.field.value = "2*("
    assert "column" in words(panel)
    assert not panel.session.rated
    board.field.value = f"3*({answer})"
    assert "Right up to a factor" in words(panel)
    assert not panel.show_answer.disabled
    board.field.value = answer
    assert board.field.disabled
    assert answer in words(panel)
    assert panel.points == {}
    panel.onward.click()
    kept = panel.session.asked[-1]
    assert kept.formulas == (f"3*({answer})", answer)
    assert (kept.points["formula"], kept.points["first"]) == (True, False)
    assert kept.key not in dict(room.rated)


def test_a_derivation_on_paper_is_ticked():
    """Would catch a learner without a keyboard for formulas who cannot go on."""
    room = Room()
    panel = room.until("derivation")
    panel.show_answer.click()
    assert room.asked.derivation.answer in words(panel)
    panel.points["formula"].value = True
    panel.onward.click()
    assert panel.session.asked[-1].points["formula"]


def test_the_clock_is_set_for_every_question_and_stands_when_the_answer_is_shown():
    """Would catch a browser that counts on from the question before, and a kernel that is asked and does not answer."""
    room = Room()
    panel = room.start(minutes=10)
    clock = panel.clock
    assert (clock.left_s, clock.used_s, clock.budget_s, clock.shown) == (600, 0, 120, False)
    assert clock.beat > 0  # at 0 the browser shows nothing
    room.clock.now += 45
    before = clock.beat
    clock._handle_custom_msg({"ask": "now"}, [])
    assert (clock.left_s, clock.used_s, clock.beat) == (555, 45, before + 1)
    room.clock.now += 100
    panel.show_answer.click()
    assert (clock.used_s, clock.shown) == (145, True)
    assert not panel.points["time"].value
    room.clock.now += 30
    panel.onward.click()
    assert (clock.left_s, clock.used_s, clock.shown) == (425, 0, False)


def test_the_clock_ticks_in_the_browser_offline_and_is_told_to_readers_of_screens():
    """Would catch a clock that needs the kernel for each second, leaves a timer behind, or loads from elsewhere."""
    script, style = str(SessionClock._esm), str(SessionClock._css)
    assert not re.search(r"https?:|\bimport\b|@import|url\(", script + style)
    for needed in ("setInterval", "clearInterval", "model.off", "removeEventListener", 'role", "timer"', "aria-live"):
        assert needed in script
    assert "#fff" not in style
    assert "currentColor" in style


def test_time_that_is_over_does_not_cut_off_the_question():
    """Would catch an answer that is lost at the end."""
    room = Room()
    panel = room.start(minutes=5)
    for _ in range(8):
        room.clock.now += 60
        panel.tell_time()
    assert panel.clock.left_s == 0
    panel.show_answer.click()
    panel.points["claim"].value = True
    panel.onward.click()
    assert len(panel.session.asked) == 1
    assert "until the time was over" in words(panel)


def test_stopping_shows_the_report_of_what_was_answered():
    """Would catch a stop that counts the open question, or ends in nothing."""
    room = Room()
    panel = room.start()
    panel.stop.click()
    assert "No question was answered" in words(panel)
    panel.restart_button.click()
    room.start()
    panel.show_answer.click()
    panel.onward.click()
    panel.stop.click()
    assert "1 question in" in words(panel)


def test_topics_without_a_card_of_the_level_are_told_and_the_start_stays():
    """Would catch a traceback where a choice makes no session."""
    hard = Deck(tuple(card for card in the_deck() if card.difficulty > 3))
    room = Room(hard)
    panel = room.start(level=1)
    assert "no card is of level 1 or below: the easiest is of level 4" in words(panel)
    assert controls(panel)[-1] == "start"
    room.start(level=5, topics=(next(iter(hard.tags())),))
    assert next(iter(hard.tags())) in room.asked.tags
    assert "the easiest" not in words(panel)


def test_a_rating_that_cannot_be_kept_is_told_and_the_interview_goes_on():
    """Would catch a locked file that ends an interview."""

    def full(id: str, rating: int) -> None:
        raise OSError("the disk is full")

    panel = InterviewPanel(Interview(SMALL, seed=1, clock=Clock()), on_rate=full)
    panel.show_answer.click()
    panel.onward.click()
    assert "this rating was not kept: the disk is full" in words(panel)
    assert len(panel.session.asked) == 1
    assert not panel.show_answer.disabled


def test_what_happens_to_the_clock_is_told():
    """Would catch a night that is taken away without a word."""
    room = Room()
    panel = room.start()
    room.clock.now += 9 * 3600
    panel.pass_over.click()
    assert "the clock jumped ahead by 9 h: that is not counted" in words(panel)


def test_a_session_that_is_given_is_asked_at_once_and_there_is_no_other():
    """Would catch a start button for a session that runs, and one that begins again."""
    clock = Clock()
    panel = InterviewPanel(Interview(SMALL, minutes=5, seed=2, clock=clock))
    assert controls(panel) == ["Textarea", "show the answer", "skip", "end"]
    panel.stop.click()
    assert controls(panel) == []


def test_every_stage_leaves_a_picture_where_no_widgets_run():
    """Would catch an export with an empty place."""
    room = Room()
    page.check(room.panel.static())
    panel = room.start()
    page.check(panel.static())
    panel.show_answer.click()
    panel.onward.click()
    page.check(panel.static())
    assert "1 question" in panel.static().label


@pytest.mark.parametrize("words_", ["<script>alert(1)</script>", "a < b & c"])
def test_notes_are_words_and_no_html(words_):
    """Would catch a note that runs as a program in the report."""
    room = Room()
    panel = room.start()
    panel.notes.value = words_
    panel.stop.click()
    assert words_ not in panel.report.value
    assert words_.replace("<", "").split()[0].strip(">")[:3] in panel.report.value
