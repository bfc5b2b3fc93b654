"""A quiz of the audited claims: true, false, or "depends", and then on what.

    quiz = Quiz(10, topic="ZeRO", seed=7)       draws claims, equally many of each answer if there are enough
    quiz.question                                number, claim, four conditions to choose from; None when it is over
    quiz.answer("false")                         an Outcome: right, points, and the Result with its proof
    quiz.answer("depends", 2)                    it depends, on the second of the conditions
    quiz.score, quiz.of, quiz.labs()             points, out of how many, and cells of labs on what was missed

The truth is the audit's verdict (finding.py): "holds" is true, "wrong" is false, "holds with conditions" and "depends"
depend. Claims that the audit could not decide are not asked. Every question offers conditions, also from other claims,
so they do not give the answer away. "depends" with a wrong condition earns half a point.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from labkit.course.cards.deck import the_deck
from labkit.course.claims.audit import Claim, Result, audit, choose, kept
from labkit.course.claims.finding import CONDITIONS, DEPENDS, HOLDS, WRONG
from labkit.course.numbers import natural

TRUE, FALSE, DEPENDING = "true", "false", "depends"
ANSWERS = (TRUE, FALSE, DEPENDING)
MEANS: Mapping[str, str] = MappingProxyType({HOLDS: TRUE, WRONG: FALSE, CONDITIONS: DEPENDING, DEPENDS: DEPENDING})
"""The right answer for each verdict of the audit; verdicts without an answer are not asked."""
OFFERED = 4
"""The number of conditions to choose from."""
POINTS: Mapping[float, str] = MappingProxyType(
    {1.0: "Right", 0.5: "Half right, it depends on something else", 0.0: "No"}
)
"""What is said of an answer with so many points, before the truth is told."""


@dataclass(frozen=True)
class Question:
    """A claim to judge, with the conditions to choose from. `right` is the number of its own condition, from 1, or 0 if
    it has none; `stored` is its result in the last audit."""

    number: int
    conditions: tuple[str, ...]
    right: int
    stored: Result

    @property
    def claim(self) -> Claim:
        """The row of the claim."""
        return self.stored.claim

    @property
    def truth(self) -> str:
        """The right answer, one of ANSWERS."""
        return MEANS[self.claim.verdict]


@dataclass(frozen=True)
class Outcome:
    """An answer, its points (0, 0.5 or 1), and the result that proves the truth. `condition` counts from 1, 0: none."""

    question: Question
    answer: str
    condition: int
    points: float
    proof: Result

    @property
    def sentence(self) -> str:
        """What is said of the answer: `No: it is true where ...`."""
        return f"{POINTS[self.points]}: {truth_of(self.question.stored)}."


def truth_of(result: Result) -> str:
    """The truth about a claim that is asked, in words: `it is false`, or `it is true where ...`."""
    condition = condition_of(result)
    return f"it is true where {condition}" if condition else f"it is {MEANS[result.claim.verdict]}"


def cells_on(ids: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """For each of these claims, the cells of labs on it: those named by the cards that its proof supports.

    Claims without a cell are left out."""
    wanted = set(ids)
    cells_of: dict[str, dict[str, None]] = {}
    for card in the_deck() if wanted else ():
        wrong = card.wrong.claims if card.wrong else ()
        for id in wanted & {*card.proofs, *wrong}:
            cells_of.setdefault(id, {}).update(dict.fromkeys(card.lab))
    return {id: tuple(cells) for id in sorted(cells_of, key=natural) if (cells := cells_of[id])}


def judge(question: Question, answer: str, condition: int = 0) -> float:
    """The points of an answer. ValueError for an unknown answer, and for a number without a condition."""
    if answer not in ANSWERS:
        raise ValueError(f"answer {', '.join(ANSWERS[:-1])} or {ANSWERS[-1]}, got {answer!r}")
    if answer == DEPENDING and condition not in range(1, len(question.conditions) + 1):
        raise ValueError(f"say on what it depends, 1 to {len(question.conditions)}, got {condition!r}")
    if answer != question.truth:
        return 0.0
    return 0.5 if answer == DEPENDING and condition != question.right else 1.0


def condition_of(result: Result) -> str:
    """The condition of a claim that depends: its premise, or the settings in which it holds; "" for other claims."""
    if MEANS.get(result.claim.verdict) != DEPENDING:
        return ""
    return result.finding.premise or "; ".join(setting.name for setting in result.finding.settings if setting.holds)


def draw(count: int, topic: str = "", seed: int = 0) -> tuple[Question, ...]:
    """`count` questions, or as many as there are on the topic; the same for the same seed.

    ValueError for an unknown topic, with the nearest, and for a count below 1."""
    if count < 1:
        raise ValueError(f"a quiz has 1 question or more, got {count!r}")
    chosen = {claim.id for claim in choose((), topic)}
    stored = [result for result in kept().results if result.claim.verdict in MEANS]
    numbers = random.Random(seed)
    on_topic = [result for result in stored if result.claim.id in chosen]
    piles = {answer: [result for result in on_topic if MEANS[result.claim.verdict] == answer] for answer in ANSWERS}
    for pile in piles.values():
        numbers.shuffle(pile)
    turns = numbers.sample(ANSWERS, len(ANSWERS))  # decides who gets one more if the count is no multiple of three
    drawn = list[Result]()
    while len(drawn) < count and any(piles.values()):
        drawn += [piles[answer].pop() for answer in turns if piles[answer]]
    drawn = drawn[:count]
    if not drawn:
        raise ValueError(f"the audit has shown nothing on {topic!r}: choose another topic")
    numbers.shuffle(drawn)
    return tuple(_question(number, result, stored, numbers) for number, result in enumerate(drawn, 1))


class Quiz:
    """A round of questions. `question` is the current one, `outcomes` are those of the answered ones."""

    def __init__(self, count: int = 10, topic: str = "", seed: int | None = None, prove: bool = False) -> None:
        """`prove`: run the proof of each claim when it is answered, and do not quote the last audit."""
        self.topic, self.seed = topic, random.randrange(2**32) if seed is None else seed
        self.questions = draw(count, topic, self.seed)
        self.outcomes: tuple[Outcome, ...] = ()
        self._prove: Callable[[Question], Result] = _proved if prove else _stored

    @property
    def question(self) -> Question | None:
        """The current question; None when the quiz is over."""
        return self.questions[len(self.outcomes)] if len(self.outcomes) < len(self.questions) else None

    @property
    def score(self) -> float:
        """Points so far."""
        return sum(outcome.points for outcome in self.outcomes)

    @property
    def of(self) -> int:
        """The points that could have been reached so far."""
        return len(self.outcomes)

    def answer(self, answer: str, condition: int = 0) -> Outcome:
        """Judge an answer, and go on. ValueError for an invalid one (the question stays), and when the quiz is over."""
        asked = self.question
        if asked is None:
            raise ValueError("the quiz is over: look at .score and .outcomes")
        points = judge(asked, answer, condition)
        condition = condition if answer == DEPENDING else 0
        outcome = Outcome(asked, answer, condition, points, self._prove(asked))
        self.outcomes = (*self.outcomes, outcome)
        return outcome

    def labs(self) -> dict[str, tuple[str, ...]]:
        """For each missed claim, the cells of labs on it."""
        return cells_on(outcome.question.claim.id for outcome in self.outcomes if outcome.points < 1)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for json."""
        asked = [{"id": outcome.question.claim.id, "topic": outcome.question.claim.topic,
                  "claim": outcome.question.claim.claim, "answer": outcome.answer,
                  "condition": _named(outcome.question, outcome.condition), "truth": outcome.question.truth,
                  "right_condition": _named(outcome.question, outcome.question.right), "points": outcome.points,
                  "verdict": outcome.proof.finding.verdict} for outcome in self.outcomes]  # fmt: skip
        labs = {id: list(cells) for id, cells in self.labs().items()}
        return {"seed": self.seed, "topic": self.topic, "questions": len(self.questions), "score": self.score,
                "of": self.of, "asked": asked, "labs": labs}  # fmt: skip


def _question(number: int, result: Result, stored: Sequence[Result], numbers: random.Random) -> Question:
    """A question with conditions: its own if it has one, then those of its topic, then others."""
    condition = condition_of(result)
    others = [other for other in stored if condition_of(other) not in ("", condition)]
    numbers.shuffle(others)
    others.sort(
        key=lambda other: other.claim.topic != result.claim.topic
    )  # those of the topic are harder to tell apart
    offered = list(dict.fromkeys([*([condition] if condition else []), *map(condition_of, others)]))[:OFFERED]
    numbers.shuffle(offered)
    return Question(number, tuple(offered), offered.index(condition) + 1 if condition else 0, result)


def _named(question: Question, condition: int) -> str:
    return question.conditions[condition - 1] if condition else ""


def _stored(question: Question) -> Result:
    return question.stored


def _proved(question: Question) -> Result:
    return next(audit([question.claim.id]))
