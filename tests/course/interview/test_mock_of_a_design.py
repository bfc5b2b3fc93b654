"""The mock interview of 45 minutes: script, follow-ups, report and second try, with a clock that is told to go."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from html import unescape

import pytest

from labkit.course.cards.card import FORMULA, NAME
from labkit.course.cards.deck import the_deck
from labkit.course.exercises.catalogue import folders
from labkit.course.interview.mock_figures import figures
from labkit.course.interview.mock_interview import BY_HELP, FOLLOW_UPS, TOPICS, MockInterview, mend_question
from labkit.course.interview.mock_panel import MockInterviewPanel
from labkit.course.interview.mock_report import MockLog, MockReport, PhaseScore, ScoredPoint, mend_of, practised
from labkit.course.interview.mock_script import BREAKS, FIGURE, FILE, LEVELS, level_of, other, read_script, the_script
from labkit.course.interview.what_breaks import CHANGES, KINDS, NOTHING
from labkit.course.interview.what_breaks_panel import FractureQuestion
from labkit.course.numbers import number_of
from labkit.course.topics.design_cases import AUDIO, CASES, EIGHT, case

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)


class Clock:
    """Goes when it is told to."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


def session(name: str = "eight", seed: int = 3, **more: object) -> MockInterview:
    return MockInterview(name, seed, clock=Clock(), now=lambda: NOON, **more)


def play(talk: MockInterview, ticks: Callable[[str], bool], came: bool = True) -> MockReport:
    """The whole interview: `ticks` says of each point, by its name, whether it was said."""
    while talk.phase is not None:
        if talk.phase.name == BREAKS:
            for number, fracture in enumerate(talk.fractures):
                wrong = next(kind for kind in KINDS if kind != fracture.kind)
                talk.choose(number, fracture.kind if ticks(f"what {number + 1}") else wrong)
                talk.mended(number, ticks(f"mend {number + 1}"))
            continue
        for question in talk.tick({name: ticks(name) for name in talk.reveal()}):
            talk.follow(question.key, came)
    return talk.report()


def words_of(widget) -> str:
    """All text that a widget and those in it show now."""
    own = [str(getattr(widget, name, "")) for name in ("value", "description", "options")]
    return unescape(" ".join([*own, *(words_of(child) for child in getattr(widget, "children", ()))]))


def texts() -> list[str]:
    return [
        text
        for phase in the_script()
        for text in (
            phase.ask,
            *(
                text
                for point in phase.points
                for text in (
                    point.words,
                    point.missed.ask,
                    point.missed.answer,
                    point.deeper.ask,
                    point.deeper.answer,
                )
            ),
        )
    ]


def test_the_phases_fill_45_minutes():
    """Would catch a phase that is missing, or minutes that do not add up."""
    assert [phase.minutes for phase in the_script()] == [5, 10, 15, 10, 5]


def test_the_script_types_no_number_and_names_figures_and_topics_that_are_there():
    """Would catch a number that is right for one case alone, and a topic that no card mends."""
    for text in texts():
        assert not any(letter.isdigit() for letter in NAME.sub("", FIGURE.sub("", FORMULA.sub("", text)))), text
    names = {name for text in texts() for name in FIGURE.findall(text)}
    for design in (EIGHT, AUDIO):
        assert names <= set(figures(design))
    topics = {topic for phase in the_script() for point in phase.points for topic in point.topics}
    assert topics | {topic for row in TOPICS.values() for topic in row} <= set(the_deck().tags())
    assert set(TOPICS) == set(KINDS)
    assert all(len(point.topics) == 1 for phase in the_script() for point in phase.points)  # one miss, one weak topic


def test_figures_are_the_planners():
    """Would catch a figure of another plan than the first, and of another case."""
    for design in (EIGHT, AUDIO):
        best, known = design.found[0], figures(design)
        assert known["step"] == f"{best.step_s:.3g} s"
        assert known["held"] == f"{best.memory.total / 1e9:.1f} GB"
        assert known["state"] == f"{16 * best.shape.n_params / 1e9:.1f} GB"
        assert f"dp={best.layout.dp}" in known["axes"]


@pytest.mark.parametrize(
    "name", ["eight", "audio", *(pytest.param(name, marks=pytest.mark.slow) for name in ("seventy", "512"))]
)
def test_a_level_is_the_number_of_axes_of_the_planners_plan(name):
    """Would catch a second try that is easier or harder than the first."""
    layout = case(name).found[0].layout
    axes = [axis for axis in ("dp", "pp", "cp", "tp", "ep") if getattr(layout, axis) > 1]
    assert level_of(name) == len(axes)
    assert other(name) != name
    assert level_of(other(name)) == level_of(name)
    assert set(LEVELS) == {design.name for design in CASES}


def test_follow_ups_depend_on_what_was_ticked():
    """Would catch a follow-up that helps with what was said, or goes deeper where nothing was said."""
    nothing, everything, half = session(), session(), session()
    names = list(nothing.reveal())
    everything.reveal(), half.reveal()
    by_none = nothing.tick({})
    by_all = everything.tick(dict.fromkeys(names, True))
    by_half = half.tick({names[0]: True, names[1]: True})
    assert {question.key.split()[0] for question in by_none} == {"missed"}
    assert {question.key.split()[0] for question in by_all} == {"deeper"}
    assert [question.key.split()[0] for question in by_half] == ["missed", "deeper"]
    assert by_half[0].key.split()[1] not in names[:2]
    assert by_half[1].key.split()[1] in names[:2]
    assert len(by_none) == len(by_all) == len(by_half) == FOLLOW_UPS
    points = {point.name: point for point in the_script()[0].points}
    for question in (*by_none, *by_all):
        kind, name = question.key.split()
        assert question.ask == nothing.filled(getattr(points[name], kind).ask)
        assert question.answer == nothing.filled(getattr(points[name], kind).answer)


@pytest.mark.parametrize("place", range(4))
def test_a_phase_asks_one_question_of_each_kind_where_it_can(place):
    """Would catch two helps in a row for one that missed all but one point, or the other way round."""
    for seed in range(5):
        one, but_one = session(seed=seed), session(seed=seed)
        names = list(one.reveal())
        but_one.reveal()
        by_one = one.tick({names[place]: True})
        by_all_but_one = but_one.tick({name: name != names[place] for name in names})
        assert [question.key.split()[0] for question in by_one] == ["missed", "deeper"]
        assert [question.key.split()[0] for question in by_all_but_one] == ["missed", "deeper"]
        assert by_one[1].key == f"deeper {names[place]}"
        assert by_all_but_one[0].key == f"missed {names[place]}"


def test_the_question_after_a_change_depends_on_the_choice():
    """Would catch one and the same follow-up for a right and a wrong choice."""
    fracture = session().fractures[0]
    assert mend_question(fracture, True) != mend_question(fracture, False)


def test_help_counts_half():
    """Would catch points that a learner gets for being helped, as if they had come alone."""
    none, every = play(session(), lambda _: False), play(session(), lambda _: True)
    n_helped = FOLLOW_UPS * (len(the_script()) - 1)
    assert sum(phase.reached for phase in none.phases) == BY_HELP * n_helped
    assert every.share == 1.0
    assert not every.mends
    assert play(session(), lambda _: False, came=False).share == 0.0


def test_a_phase_has_its_own_clock():
    """Would catch time that counts for two phases, a laptop's sleep, and a clock that goes back."""
    talk = session()
    clock = talk._clock
    clock.now += 60
    assert talk.used_s == 60
    clock.now -= 3600
    assert talk.used_s == 60
    clock.now += 10 * 3600
    assert talk.used_s == 60
    for question in talk.tick(dict.fromkeys(talk.reveal(), True)):
        clock.now += 150
        talk.follow(question.key, True)
    assert talk.scores[0].seconds == 360
    assert talk.used_s == 0
    assert talk.left_s == 40 * 60
    assert "'Clarify' took 6:00 of 5:00" in talk.report().judgement


def test_the_report_names_the_three_weakest_topics_and_what_mends_them():
    """Would catch the strongest topics, and cards, cells or exercises of another topic."""

    def scored(topic: str, *reached: float) -> list[ScoredPoint]:
        return [ScoredPoint(f"{topic} {place}", "said it", (topic,), value) for place, value in enumerate(reached)]

    points = [
        *scored("memory", 1, 1, 1), *scored("zero", 0, 0, 0), *scored("pipeline", 0, 0.5),
        *scored("precision", 1, 0, 0), *scored("scaling", 1, 1, 0), *scored("faults", 1),
    ]  # fmt: skip
    report = MockReport(
        uid="x" * 32, at=NOON, case="eight", level=1, seed=0, changes=(),
        phases=(PhaseScore("one", "One", 60, 60, tuple(points)),),
    )  # fmt: skip
    assert [mend.topic for mend in report.mends] == ["zero", "pipeline", "precision"]
    deck = the_deck()
    for mend in report.mends:
        assert mend.cards
        assert all(mend.topic in deck[id].tags for id, _ in mend.cards)
        named = {cell for card in deck.of({mend.topic}) for cell in card.lab}
        assert set(mend.cells) <= named
        assert {number_of(cell) for cell in mend.cells} <= set(mend.labs)
        assert set(mend.exercises) <= dict(folders()).keys()
        assert mend.topic in str(report)
    assert report.mends[0].labs[0] == "07"  # the lab of ZeRO-1 and 2
    assert report.mends[0].exercises == practised()["zero"]
    assert {key.split(".")[0] for key in report.mends[2].exercises} <= set(
        report.mends[2].labs
    )  # of no topic asked for
    with pytest.raises(ValueError, match="no card"):
        mend_of("cooking", deck)


def test_each_topic_that_is_asked_for_has_exercises_of_its_own():
    """A bug: lab 14b has none, so that who could not design a plan was sent to ZeRO-3's. Would catch a topic without a
    line, an exercise that is gone, and a line for a topic that nobody asks for."""
    asked = {topic for phase in the_script() for point in phase.points for topic in point.topics}
    asked |= {topic for topics in TOPICS.values() for topic in topics}
    assert practised().keys() == asked
    for topic, keys in practised().items():
        assert len(set(keys)) == len(keys) > 0, topic
        assert set(keys) <= dict(folders()).keys(), topic


def test_the_table_of_a_report_names_what_was_missed_and_folds_its_words():
    """Would catch paragraphs in a column of a table, and a point that came with help told as missed."""
    points = (
        ScoredPoint("links", "asked for both links: 450 GB/s", ("communication",), 0.0),
        ScoredPoint("missed links", "Does it matter?", ("communication",), 0.5),
        ScoredPoint("what 2", "Half of the devices?", ("memory",), 0.0),
        ScoredPoint("batch", "asked for the batch", ("large-batch",), 1.0),
    )
    report = MockReport(
        uid="x" * 32, at=NOON, case="eight", level=1, seed=0, changes=(),
        phases=(PhaseScore("one", "One", 60, 60, points), PhaseScore("two", "Two", 60, 60, points[3:])),
    )  # fmt: skip
    shown = report._repr_html_()
    assert "<summary>links, change 2; with help: hint on links</summary>" in shown
    assert "450 GB/s" in shown.split("</summary>")[1]
    assert "asked for the batch" not in shown
    assert shown.count("<details>") == 1


def test_the_planner_works_while_the_opening_is_read(monkeypatch, tmp_path):
    """Would catch seconds that pass between start and the first question of a large case."""
    searched = []
    monkeypatch.setattr("labkit.course.topics.design_cases.plans", lambda *sizes, **_: searched.append(sizes) or ())
    for design in CASES:
        monkeypatch.delitem(vars(design), "found", raising=False)
    panel = MockInterviewPanel(MockLog(tmp_path / "log"))
    panel.case.value = "512"
    panel.prepare().join()
    assert case("512").shape in {sizes[0] for sizes in searched}
    for design in CASES:
        vars(design).pop("found", None)


def test_a_second_try_is_other_but_equal(tmp_path):
    """Would catch a second try with the same case, with a change that was asked, or with other numbers of points."""
    log = MockLog(tmp_path / "interviews.sqlite3")
    with pytest.raises(ValueError, match="no mock interview yet"):
        log.second_try()
    first = play(session("eight"), lambda name: len(name) % 2 == 0)
    log.keep(first)
    proposal = log.second_try()
    assert proposal.case == "audio"
    assert proposal.due == NOON + timedelta(days=7)
    assert "in 7 days, on 2026-12-07" in proposal.words(NOON)
    assert "Second try now" in proposal.words(NOON + timedelta(days=8))
    second = play(session(proposal.case, 4, without=proposal.without), lambda _: True)
    assert second.level == first.level
    assert not set(second.changes) & set(first.changes)
    count = [(phase.name, phase.budget_s, len(phase.points)) for phase in first.phases]
    assert count == [(phase.name, phase.budget_s, len(phase.points)) for phase in second.phases]


def test_the_number_of_points_does_not_depend_on_the_ticks():
    """Would catch an interview in which one that said nothing is asked less."""
    counts = {
        tuple(len(phase.points) for phase in play(session(), ticks).phases)
        for ticks in (lambda _: True, lambda _: False, lambda name: name < "m")
    }
    assert len(counts) == 1


def test_reports_are_kept_and_read_again(tmp_path):
    """Would catch a report that comes back otherwise, and one that is kept twice."""
    path = tmp_path / "interviews.sqlite3"
    report = play(session(), lambda name: name > "m")
    for _ in range(2):
        MockLog(path).keep(report)
    assert MockLog(path).reports() == [report]
    with pytest.raises(ValueError, match="nothing to keep"):
        MockLog(path).keep(session().report())


def test_what_is_said_out_of_turn_is_a_value_error():
    """Would catch ticks before the answer was said, and points that count twice."""
    talk = session()
    with pytest.raises(ValueError, match="say your answer first"):
        talk.tick({})
    talk.reveal()
    with pytest.raises(ValueError, match="no point of this phase is called 'device'"):
        talk.tick({"device": True})
    with pytest.raises(ValueError, match="this phase is 'clarify'"):
        talk.choose(0, "memory")
    asked = talk.tick({})
    with pytest.raises(ValueError, match="ticked already"):
        talk.tick({})
    with pytest.raises(ValueError, match="no follow-up is called 'deeper'"):
        talk.follow("deeper", True)
    for question in asked:
        talk.follow(question.key, True)
    while talk.phase.name != BREAKS:
        for question in talk.tick(dict.fromkeys(talk.reveal(), True)):
            talk.follow(question.key, True)
    with pytest.raises(ValueError, match="judged by the planner"):
        talk.tick({})
    with pytest.raises(ValueError, match="comes first"):
        talk.mended(0, True)
    with pytest.raises(ValueError, match="no answer is called 'heat'"):
        talk.choose(0, "heat")
    with pytest.raises(ValueError, match="the changes are 0 to 2"):
        talk.choose(3, "memory")
    talk.choose(0, NOTHING)
    with pytest.raises(ValueError, match="answered already"):
        talk.choose(0, "memory")
    talk.mended(0, True)
    with pytest.raises(ValueError, match="ticked already"):
        talk.mended(0, True)
    with pytest.raises(ValueError, match="no case 'nine'"):
        session("nine")
    with pytest.raises(ValueError, match="no change is called"):
        session(without=["colour"])
    with pytest.raises(ValueError, match="cannot be drawn"):
        session(without=[change.name for change in CHANGES])


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("name: links", "name: devices", "'devices' is the name of two"),
        ("name: breaks", "name: last", "one phase is called 'breaks'"),
        ("    - name: devices\n      words:", "    - name: devices\n      word:", "line 18, field points.0.word"),
    ],
)
def test_a_mistake_in_a_script_is_told(old, new, told):
    """Would catch a script that is wrong and asks nonsense."""
    text = FILE.read_text(encoding="utf-8")
    assert old in text
    with pytest.raises(ValueError, match=told):
        read_script(text.replace(old, new, 1), "mine.yaml")


class TestPanel:
    """The panel, clicked through as a learner would."""

    @pytest.fixture
    def log(self, tmp_path) -> MockLog:
        return MockLog(tmp_path / "interviews.sqlite3")

    def panel(self, log: MockLog) -> MockInterviewPanel:
        make = functools.partial(MockInterview, seed=3, clock=Clock(), now=lambda: NOON)
        return MockInterviewPanel(log, make, lambda: NOON)

    def onward(self, panel: MockInterviewPanel) -> None:
        """Press what can be pressed next; tick the first point of each list."""
        if not panel.show.disabled:
            panel.show.click()
        elif not panel.onward.disabled:
            next(iter(panel.boxes.values())).value = True
            panel.onward.click()
        elif isinstance(panel.asked, FractureQuestion):
            panel.asked.menu.value = panel.asked.fracture.kind
            panel.asked.go.click()
            panel.asked.show_mend.click()
        else:
            panel.room.children[1].click()

    def test_no_answer_is_in_the_page_before_it_is_asked_for(self, log):
        """Would catch points, answers or verdicts that stand in the page too early."""
        panel = self.panel(log)
        panel.go.click()
        seen = list[str]()
        while panel.session.phase is not None:
            session, phase = panel.session, panel.session.phase
            page = words_of(panel)
            if not panel.show.disabled:
                seen.append(phase.name)
                for point in phase.points:
                    assert session.filled(point.words) not in page
            if isinstance(panel.asked, FractureQuestion) and panel.asked.right is None:
                assert panel.asked.fracture.words not in page
            elif panel.asked is not None and panel.onward.disabled:
                answer = getattr(panel.asked, "answer", None)
                assert not isinstance(answer, str) or answer not in page
            self.onward(panel)
        assert seen == [phase.name for phase in the_script()]
        told = [panel.session.filled(point.words) for phase in the_script() for point in phase.points]
        assert not [words for words in told if words in panel.static().label]

    def test_the_report_is_shown_and_kept_and_a_second_try_offered(self, log):
        """Would catch a report that is lost, and a second try before the first."""
        panel = self.panel(log)
        assert panel.repeat.layout.display == "none"
        panel.go.click()
        while panel.session.phase is not None:
            self.onward(panel)
        report = panel.session.report()
        assert log.reports() == [report]
        assert report.judgement in unescape(panel.report.value)
        assert "in 7 days" in panel.report.value
        later = self.panel(log)
        assert later.repeat.layout.display == ""
        later.repeat.click()
        assert later.session.case.name == "audio"
        changes = {fracture.change.name for fracture in later.session.fractures}
        assert not changes & set(report.changes)

    def test_ticks_reach_the_session(self, log):
        """Would catch boxes whose ticks are dropped, and a `next` that counts twice."""
        panel = self.panel(log)
        panel.onward.click()  # nothing to keep yet
        panel.go.click()
        panel.show.click()
        assert list(panel.boxes) == [point.name for point in the_script()[0].points]
        told = words_of(panel)
        for point in the_script()[0].points:
            assert panel.session.filled(point.words) in told
        panel.boxes["links"].value = True
        panel.onward.click()
        reached = {point.name: point.reached for point in panel.session._points}
        assert reached == {"devices": 0.0, "links": 1.0, "batch": 0.0, "goal": 0.0}
        assert panel.asked.key.startswith("missed")
        assert panel.onward.disabled
        answer = panel.asked.answer
        panel.room.children[1].click()
        assert unescape(panel.room.children[2].value) == f"<p>{answer}</p>"
        panel.boxes[panel.asked.key].value = True
        panel.onward.click()
        assert panel.session._points[-1].reached == BY_HELP

    def test_a_file_that_cannot_be_read_does_not_stop_the_interview(self, log, monkeypatch):
        """Would catch a report that is lost because somebody else holds the file."""

        def held() -> list[MockReport]:
            raise OSError("the file is held by another notebook")

        panel = self.panel(log)
        panel.go.click()
        monkeypatch.setattr(log, "reports", held)
        while panel.session.phase is not None:
            self.onward(panel)
        assert panel.session.report().judgement in unescape(panel.report.value)
        assert "held by another notebook" in panel.report.value
        assert "held by another notebook" in self.panel(log).proposed.value
