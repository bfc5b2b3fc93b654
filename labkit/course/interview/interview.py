"""A mock interview: questions drawn by weakness, against the clock; the learner holds each answer against a rubric.

    talk = Interview(the_deck(), minutes=30, level=3, weakness=box.weakness())
    talk.question                       kind, words, budget_s; what it is about: card, derivation or case
    talk.reveal(); talk.rubric          a good answer in parts; its points in words
    talk.rate({"claim": True, ...})     or 1 to 5: the next question, None when it is over
    talk.answer("2*(n-1)/n*N")          for a derivation: the verdict, which counts as its rating
    talk.report()                       time against budget, points by tag and by part, what to look at next

When the time is over, the session ends after the current question. A clock may jump. Time that it goes back does not
count, nor a jump ahead of more than the question's budget and JUMP_S, as after a laptop's sleep; `.note` tells of both.
"""

from __future__ import annotations

import difflib
import random
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from labkit.course.cards.card import Card
from labkit.course.cards.deck import Deck
from labkit.course.interview.interview_questions import DESIGN, TIME, Pool, Question, points_of, rating_of
from labkit.course.interview.interview_report import InterviewReport, Spoken, weakest
from labkit.course.whiteboard.formula_verdict import FormulaVerdict, check

SHORTEST, LONGEST, LEVELS = 5, 120, (1, 2, 3, 4, 5)
DESIGN_FROM_MINUTES, DESIGN_FROM_LEVEL = 25, 3
JUMP_S = 600.0
UNKNOWN: Mapping[str, float] = MappingProxyType({})
"""When nothing is known of a learner, every card is assumed to be one that they cannot answer."""


class Interview:
    """A session, which begins when the object is made. `question` is the current one, and None when it is over."""

    def __init__(
        self,
        deck: Iterable[Card],
        minutes: float = 30,
        level: int = 3,
        weakness: Mapping[str, float] = UNKNOWN,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        topics: Iterable[str] = (),
    ) -> None:
        """`weakness` by card id: how likely the learner is to fail at it; `topics`: tags, () for all.

        ValueError for minutes, levels, topics and weaknesses out of range, and if no card is left to ask."""
        if not SHORTEST <= minutes <= LONGEST:
            raise ValueError(f"an interview has {SHORTEST} to {LONGEST} minutes, got {minutes!r}")
        if level not in LEVELS:
            raise ValueError(f"a level is 1 to {LEVELS[-1]}, as a card's difficulty is, got {level!r}")
        for id, weak in weakness.items():
            if not 0 <= weak <= 1:
                raise ValueError(f"weakness of {id!r}: a probability is 0 to 1, got {weak!r}")
        self.deck = deck if isinstance(deck, Deck) else Deck(tuple(deck))
        self.minutes, self.level, self.weakness = minutes, level, weakness
        self.topics = (topics,) if isinstance(topics, str) else tuple(topics)
        self.seed = random.randrange(2**32) if seed is None else seed
        design = minutes >= DESIGN_FROM_MINUTES and level >= DESIGN_FROM_LEVEL
        self._pool = Pool(self.deck, level, self.topics, weakness, design, self.seed)
        self._clock, self._last = clock, clock()
        self._spent, self._back, self._ahead, self._began = 0.0, 0.0, 0.0, 0.0
        self._shown_at: float | None = None
        self._seen, self._tries = False, tuple[tuple[str, FormulaVerdict], ...]()
        self._design, self._stopped = design, False
        self.asked: tuple[Spoken, ...] = ()
        self.question: Question | None = None
        self._ask(None)

    @property
    def over(self) -> bool:
        """True if the interview is over."""
        return self.question is None

    @property
    def left_s(self) -> float:
        """Seconds that are left of the session; 0 while a question runs beyond its end."""
        self._tick()
        return max(0.0, self.minutes * 60 - self._spent)

    @property
    def used_s(self) -> float:
        """Seconds from the question until now, or until its answer was shown."""
        self._tick()
        return self._shown_at - self._began if self._shown_at is not None else self._spent - self._began

    @property
    def rubric(self) -> Mapping[str, str]:
        """The points of a whole answer to the question, in words; empty when the interview is over."""
        return self.question.rubric if self.question else MappingProxyType({})

    @property
    def rated(self) -> bool:
        """True if the question has its rating already: it is a derivation, and a formula was checked."""
        return bool(self._tries)

    @property
    def note(self) -> str:
        """Remarks on jumps of the clock and on a design case that was left out; "" if there are none."""
        jumps = [f"the clock went back by {_span(self._back)}"] if self._back else []
        jumps += [f"the clock jumped ahead by {_span(self._ahead)}"] if self._ahead else []
        notes = [f"{' and '.join(jumps)}: that is not counted"] if jumps else []
        case_asked = any(question.kind == DESIGN for question in self.asked) or self._pool.case is not None
        if self._design and not case_asked and not (self.question and self.question.kind == DESIGN):
            notes.append("the design case was left out: too little time was left for it")
        return "; ".join(notes)

    def reveal(self) -> Mapping[str, str]:
        """A good answer, part by part, with its figures. The time for the question stops here."""
        asked = self._now()
        self._shown()
        self._seen = True
        return asked.answer()

    def answer(self, formula: str) -> FormulaVerdict:
        """Check a formula against the derivation; after a wrong one, more may follow until the answer is shown.

        NoFormula (a ValueError), with the column, for what is not a formula: it does not count."""
        asked = self._now()
        if asked.derivation is None:
            raise ValueError(f"a {asked.kind} is answered in words: look at .reveal(), then .rate(...)")
        if self._seen:
            raise ValueError("the answer has been shown: .rate() goes on")
        verdict = check(asked.derivation, formula)
        self._tries = (*self._tries, (formula, verdict))
        if verdict.right:
            self._shown()
        return verdict

    def rate(self, points: Mapping[str, bool] | int | None = None) -> Question | None:
        """Rate the answer by the points of `rubric` that it reached, or from 1 to 5; the next question, or None.

        Whether it was within the time is measured, unless `points` says so. A derivation with a checked formula is
        rated by that. ValueError for an unknown point or rating; the question then stays."""
        asked = self._now()
        rating = points_of([verdict.kind for _, verdict in self._tries]) if self._tries else points
        if rating is None and asked.derivation is None:
            raise ValueError(f"tell the points that were reached ({', '.join(asked.rubric)}), or 1 to 5")
        if isinstance(rating, Mapping) or rating is None:
            chosen = dict(rating or {})
            if lost := [point for point in chosen if point not in asked.rubric]:
                near = difflib.get_close_matches(str(lost[0]), asked.rubric, 1)
                mean = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(asked.rubric)}"
                raise ValueError(f"no point of this question is called {lost[0]!r}; {mean}")
            self._shown()
            in_time = {TIME: self.used_s <= asked.budget_s and any(chosen.values())}
            chosen = {**in_time, **chosen}
            reached = {point: bool(chosen.get(point)) for point in asked.rubric}
            return self._ask(self._keep(asked, rating_of(reached) if asked.card else 0, reached))
        if isinstance(rating, bool) or rating not in LEVELS:
            raise ValueError(f"a rating is 1 to {LEVELS[-1]}, got {rating!r}")
        return self._ask(self._keep(asked, int(rating)))

    def skip(self) -> Question | None:
        """Go on without an answer, which counts as nothing reached."""
        self._keep(self._now(), 0, skipped=True)
        return self._ask(None)

    def end(self) -> None:
        """Stop here; the open question does not count. Does nothing when the interview is over."""
        self._tick()
        self._stopped, self.question = self._stopped or not self.over, None

    def report(self) -> InterviewReport:
        """The report on the session so far."""
        self._tick()
        ended = "stopped" if self._stopped else "time" if self.over else ""
        if ended == "time" and self._pool.empty and self._spent < self.minutes * 60:
            ended = "cards"
        session = (self.asked, self.minutes, self.level, self.topics, self.seed, self._spent, ended, self.note)
        return InterviewReport(*session, weakest(self.asked, self.deck, self.level))

    def _now(self) -> Question:
        if self.question is None:
            raise ValueError("the interview is over: look at .report()")
        self._tick()
        return self.question

    def _ask(self, share: float | None) -> Question | None:
        self._tick()
        self._began, self._shown_at, self._seen = self._spent, None, False
        self._tries = ()
        left = self.minutes * 60 - self._spent
        self.question = self._pool.draw(left, share)
        return self.question

    def _shown(self) -> None:
        self._shown_at = self._spent if self._shown_at is None else self._shown_at

    def _keep(
        self, asked: Question, rating: int, points: Mapping[str, bool] = MappingProxyType({}), skipped: bool = False
    ) -> float:
        """Record how the question went. Returns the share of points that was reached."""
        kept = Spoken(asked.kind, asked.key, asked.words, asked.tags, asked.lab, asked.budget_s, self.used_s,
                     MappingProxyType(dict(points)), rating, skipped, tuple(formula for formula, _ in self._tries),
                     asked.after)  # fmt: skip
        self.asked = (*self.asked, kept)
        return kept.share

    def _tick(self) -> None:
        """Add the time since the last call, unless the clock has jumped."""
        now = self._clock()
        gone, self._last = now - self._last, now
        if self.question is None:
            return
        if 0 <= gone <= self.question.budget_s + JUMP_S:
            self._spent += gone
        elif gone < 0:
            self._back -= gone
        else:
            self._ahead += gone


def _span(seconds: float) -> str:
    """A time in words: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.3g} h"
