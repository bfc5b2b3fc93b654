"""A mock interview of 45 minutes about one design case: phases against the clock, and follow-ups that depend on ticks.

    talk = MockInterview("eight", seed=7)
    talk.phase.title, talk.ask           the phase, and what the interviewer says
    talk.reveal()                        the points of a whole answer in words: say yours first
    talk.tick({"devices": True})         what you said; the follow-ups that this leads to
    talk.follow("deeper devices", True)  whether you had the answer; after the last one the next phase comes
    talk.fractures                       in the phase "breaks": three changes; talk.choose(0, "memory") is judged
    talk.report()                        points by phase and by topic, and what mends the weakest topics

Nobody reads an answer: the learner ticks what was said. Follow-ups come from a table: of a missed point a
question that leads to it, of one that was reached a question that goes deeper. A phase asks one of each if it can,
otherwise two of one kind; so every interview has equally many points. What is reached by help counts half.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType

from labkit.course.interview.interview import JUMP_S
from labkit.course.interview.mock_figures import figures
from labkit.course.interview.mock_report import MockReport, PhaseScore, ScoredPoint
from labkit.course.interview.mock_script import BREAKS, FIGURE, InterviewPhase, level_of, the_script
from labkit.course.interview.what_breaks import (
    BUBBLE,
    COMPUTE,
    KINDS,
    LAYOUT,
    MEMORY,
    NOTHING,
    ONCE,
    Fracture,
    drawn,
)
from labkit.course.topics.design_cases import case as case_of

FOLLOW_UPS = 2
"""The follow-up questions of a phase."""
BY_HELP = 0.5
"""What the answer to a follow-up counts that leads to a missed point; a deeper one counts 1."""
DEEPER, MISSED, WHAT, MEND = "deeper", "missed", "what", "mend"
TOPICS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        LAYOUT: ("3d",), MEMORY: ("memory",), COMPUTE: ("arithmetic",), ONCE: ("large-batch",),
        BUBBLE: ("pipeline",), NOTHING: ("scaling",),
        "tp": ("tensor-parallel",), "pp": ("pipeline",), "dp": ("data-parallel",), "cp": ("long-context",),
        "ep": ("experts",),
    }
)  # fmt: skip
"""The topic that mends a wrong answer to what breaks first."""
MEND_ASKS: Mapping[str, str] = MappingProxyType(
    {
        LAYOUT: "Which numbers have to divide which? Give a plan for what is there now.",
        MEMORY: "Which bytes are the most at that moment? Name the cheapest choice that takes them away.",
        COMPUTE: "Why do the same flops take longer? Give a plan under which they take less.",
        ONCE: "Why does it not shrink with the batch? Give a plan under which fewer device-seconds go there.",
        BUBBLE: "Which two numbers set the bubble? Change one of them.",
        NOTHING: "Why does it not matter here? And is there a better plan now?",
    }
)
"""The follow-up to what breaks first, by what it is; for wires see `mend_question`."""


@dataclass(frozen=True)
class FollowUp:
    """A follow-up question: its key, `missed links` or `deeper links`, and what a good answer says."""

    key: str
    ask: str
    answer: str
    topics: tuple[str, ...]
    worth: float


class MockInterview:
    """A session, which begins when the object is made. `phase` is the current one, None when it is over."""

    def __init__(
        self,
        case: str = "eight",
        seed: int | None = None,
        without: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`without`: names of changes that are not asked for in the phase "breaks".

        ValueError for an unknown case and an unknown change."""
        self.case, self.level = case_of(case), level_of(case)
        self.seed = random.randrange(2**32) if seed is None else seed
        self.figures = figures(self.case)
        self.fractures: tuple[Fracture, ...] = drawn(self.case, self.seed, without)
        self.phases, self.place = the_script(), 0
        self.follow_ups: tuple[FollowUp, ...] = ()
        self.scores = list[PhaseScore]()
        self._points, self._chosen, self._revealed = list[ScoredPoint](), dict[int, bool](), False
        self._uid = uuid.uuid4().hex
        self._clock, self._now, self._last, self._spent = clock, now, clock(), 0.0

    @property
    def phase(self) -> InterviewPhase | None:
        """The current phase; None when the interview is over."""
        return self.phases[self.place] if self.place < len(self.phases) else None

    @property
    def ask(self) -> str:
        """The opening question of the current phase, with the planner's figures of this case filled in."""
        return self.filled(self._running().ask)

    @property
    def used_s(self) -> float:
        """Seconds of the current phase until now. Time that the clock goes back does not count, nor a jump ahead."""
        now = self._clock()
        gone, self._last = now - self._last, now
        if self.phase is not None and 0 <= gone <= self.phase.budget_s + JUMP_S:
            self._spent += gone
        return self._spent

    @property
    def left_s(self) -> float:
        """Seconds that are left of all phases, if those to come take their budget; 0 beyond the end of the last one."""
        used = self.used_s
        ahead = sum(phase.budget_s for phase in self.phases[self.place + 1 :])
        return ahead + (max(0.0, self.phase.budget_s - used) if self.phase else 0.0)

    def filled(self, text: str) -> str:
        """A text of the script with the figures of this case."""
        return FIGURE.sub(lambda match: self.figures[match[1]], text)

    def reveal(self) -> Mapping[str, str]:
        """The points of a whole answer, in words. The phase "breaks" has none: `choose` shows them one by one."""
        self._revealed = True
        return MappingProxyType({point.name: self.filled(point.words) for point in self._running().points})

    def tick(self, points: Mapping[str, bool]) -> tuple[FollowUp, ...]:
        """Tick what was said, and get the follow-ups. ValueError for an unknown point, before `reveal`, or twice."""
        phase = self._running()
        if phase.name == BREAKS:
            raise ValueError("what breaks is judged by the planner: choose(number, kind), then mended(number, came)")
        if not self._revealed:
            raise ValueError("say your answer first, then reveal() shows the points to tick")
        if self._points:
            raise ValueError("the points of this phase are ticked already: follow() its follow-ups")
        names = [point.name for point in phase.points]
        if lost := [name for name in points if name not in names]:
            raise ValueError(f"no point of this phase is called {lost[0]!r}; there are {', '.join(names)}")
        reached = {name: bool(points.get(name)) for name in names}
        self._points = [
            ScoredPoint(point.name, self.filled(point.words), point.topics, float(reached[point.name]))
            for point in phase.points
        ]
        self.follow_ups = self._chosen_follow_ups(phase, reached)
        return self.follow_ups

    def follow(self, key: str, came: bool) -> InterviewPhase | None:
        """Say whether the answer to a follow-up came; after the last one the next phase begins, which is returned."""
        asked = {question.key: question for question in self.follow_ups}
        if key not in asked:
            left = ", ".join(asked) or "none"
            raise ValueError(f"no follow-up is called {key!r}; there are {left}")
        question = asked.pop(key)
        self.follow_ups = tuple(asked.values())
        self._points.append(ScoredPoint(key, question.ask, question.topics, question.worth * bool(came)))
        return self.phase if self.follow_ups else self._onward()

    def choose(self, number: int, kind: str) -> bool:
        """Answer what breaks first in one of `fractures`; True if the planner says so, too. The first answer counts."""
        fracture = self._fracture(number)
        if kind not in KINDS:
            raise ValueError(f"no answer is called {kind!r}; there are {', '.join(KINDS)}")
        if number in self._chosen:
            raise ValueError(f"change {number} is answered already: mended({number}, True or False) comes next")
        right = self._chosen[number] = kind == fracture.kind
        point = f"{WHAT} {number + 1}"
        self._points.append(ScoredPoint(point, fracture.question, TOPICS[fracture.kind], float(right)))
        return right

    def mended(self, number: int, came: bool) -> InterviewPhase | None:
        """Say whether your mend of a change does what the planner's does; after the last one the next phase begins."""
        fracture, point = self._fracture(number), f"{MEND} {number + 1}"
        if number not in self._chosen:
            raise ValueError(f"choose({number}, kind) comes first: what breaks, before how it is mended")
        if point in [scored.name for scored in self._points]:
            raise ValueError(f"the repair of change {number} is ticked already")
        words = mend_question(fracture, self._chosen[number])
        topics = (*TOPICS[fracture.kind], "system-design")
        self._points.append(ScoredPoint(point, words, topics, float(came)))
        return self._onward() if len(self._points) == 2 * len(self.fractures) else self.phase

    def report(self) -> MockReport:
        """The report on the phases that are over."""
        changes = tuple(fracture.change.name for fracture in self.fractures)
        return MockReport(
            uid=self._uid, at=self._now(), case=self.case.name, level=self.level, seed=self.seed, changes=changes,
            phases=tuple(self.scores),
        )  # fmt: skip

    def _chosen_follow_ups(self, phase: InterviewPhase, reached: Mapping[str, bool]) -> tuple[FollowUp, ...]:
        """One that leads to a missed point and one that goes deeper; if there is none of a kind, two of the other."""
        order = random.Random(f"{self.seed} {phase.name}")
        points = order.sample(phase.points, len(phase.points))
        asked = [
            FollowUp(f"{MISSED} {point.name}", self.filled(point.missed.ask), self.filled(point.missed.answer),
                     point.topics, BY_HELP)
            if not reached[point.name] else
            FollowUp(f"{DEEPER} {point.name}", self.filled(point.deeper.ask), self.filled(point.deeper.answer),
                     point.topics, 1.0)
            for point in points
        ]  # fmt: skip
        lead = [question for question in asked if question.worth == BY_HELP]
        deep = [question for question in asked if question.worth != BY_HELP]
        chosen = [*lead[:1], *deep[:1]] if lead and deep else asked
        return tuple(chosen[:FOLLOW_UPS])

    def _fracture(self, number: int) -> Fracture:
        phase = self._running()
        if phase.name != BREAKS:
            raise ValueError(f"this phase is {phase.name!r}: what breaks is asked in {BREAKS!r}")
        if number not in range(len(self.fractures)):
            raise ValueError(f"the changes are 0 to {len(self.fractures) - 1}, got {number!r}")
        return self.fractures[number]

    def _running(self) -> InterviewPhase:
        if self.phase is None:
            raise ValueError("the interview is over: look at .report()")
        return self.phase

    def _onward(self) -> InterviewPhase | None:
        phase = self._running()
        self.scores.append(PhaseScore(phase.name, phase.title, phase.budget_s, self.used_s, tuple(self._points)))
        self.place, self.follow_ups, self._revealed, self._spent = self.place + 1, (), False, 0.0
        self._points, self._chosen = [], {}
        return self.phase


def mend_question(fracture: Fracture, right: bool) -> str:
    """The follow-up to a change: after a right choice it asks for the mend, after a wrong one first for the reason."""
    kind = fracture.kind
    wire = f"Which choice sends fewer bytes along {kind}, or along {kind} inside a node? What does it cost?"
    asked = MEND_ASKS.get(kind, wire)
    return f"{asked} Say it aloud." if right else f"Say first in your own words why it is so. {asked}"
