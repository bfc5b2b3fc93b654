"""The questions of a mock interview: what each asks, what a whole answer contains, and which comes next.

    card          a card of the deck                             2 min     its parts, claim first, within the time
    follow-up     a card that another one names as its next      2 min     the same
    derivation    "derive this on the whiteboard"                3 min     the formula is checked, and is its rating
    design        a case for the planner                        12 min     what a good answer says, in order

Cards are drawn without replacement. A card's weight depends on how likely the learner is to fail at it, how near it is
to the session's level, and how often its tags have been asked already.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from labkit.course.cards.card import PARTS, Card
from labkit.course.cards.deck import Deck
from labkit.course.topics.design_cases import CASES, DesignCase
from labkit.course.whiteboard.derivation import Derivation
from labkit.course.whiteboard.derivations import DERIVATIONS
from labkit.plan.search.explain import explain

CARD, FOLLOW_UP, DERIVATION, DESIGN = "card", "follow-up", "derivation", "design"
BUDGET_S = MappingProxyType({CARD: 120.0, FOLLOW_UP: 120.0, DERIVATION: 180.0, DESIGN: 720.0})
"""The time for each kind. With less time left in the session, a question is asked if ENOUGH of its budget remains."""
ENOUGH = MappingProxyType({CARD: 0.75, FOLLOW_UP: 0.75, DERIVATION: 0.75, DESIGN: 0.5})
TIME, UNIT, LIMIT, FORMULA, FIRST = "time", "unit", "limit", "formula", "first"
POINTS = MappingProxyType(
    {
        "claim": "the claim, and it came first",
        "reason": "why it is so",
        "law": "the law, every symbol named",
        "number": "a number, and what it is computed from",
        "costs": "what it costs",
        "limits": "where it stops being true",
        UNIT: "formula: the unit is right",
        LIMIT: "formula: right up to a factor, or in a limit",
        FORMULA: "formula: right everywhere",
        FIRST: "formula: right at the first try",
        TIME: "said within the time",
    }
)
"""Every point of a rubric in words; a design case has points of its own."""
LEAST, EASIER, DERIVED, MOST_IN_A_ROW = 0.03, 0.6, 0.2, 2
"""The least weight of a card, the factor for each level below the session's, how likely a derivation is, and how many
follow-ups may come in a row."""


@dataclass(frozen=True)
class Question:
    """One question: one of `card`, `derivation` and `case` is its subject, and the other two are None.

    after    the card that a follow-up follows;  key    the card's id, or the name of derivation or case
    """

    kind: str
    key: str
    words: str
    budget_s: float
    tags: tuple[str, ...]
    lab: tuple[str, ...] = ()
    card: Card | None = None
    derivation: Derivation | None = None
    case: DesignCase | None = None
    after: str = ""

    @property
    def rubric(self) -> Mapping[str, str]:
        """The points of a whole answer, each in words."""
        if self.case:
            return MappingProxyType({_short(ask): ask for ask in self.case.asks})
        has = self.card.parts() if self.card else dict.fromkeys((UNIT, LIMIT, FORMULA, FIRST))
        return MappingProxyType({point: words for point, words in POINTS.items() if point in has or point == TIME})

    def answer(self) -> Mapping[str, str]:
        """A good answer, part by part, with its figures."""
        if self.card:
            return MappingProxyType(self.card.parts())
        if self.derivation:
            of = f" {self.derivation.unit}" * bool(self.derivation.unit)
            shown = f"as {self.derivation.source} has it; lab {self.derivation.lab} measures it"
            return MappingProxyType({"law": f"`{self.derivation.answer}`{of}", "lab": shown})
        assert self.case
        paragraphs = re.split(r"\n(?=\d )", explain(self.case.found))
        return MappingProxyType(
            {_short(ask): _plain(words) for ask, words in zip(self.case.asks, paragraphs, strict=False)}
        )


class Pool:
    """The questions that a session may ask, and those it has asked: `draw` gives the next, and none twice.

    ValueError for a topic that no card has, and if no card of the topics is at or below the level."""

    def __init__(
        self, deck: Deck, level: int, topics: Sequence[str], weakness: Mapping[str, float], design: bool, seed: int
    ) -> None:
        """`topics` are tags, at least one of which a card must have; `design`: a design case comes at the end."""
        for topic in topics:
            deck.of({topic})  # raises, and names the nearest tag, if no card has this one
        chosen = [card for card in deck if not topics or set(topics) & set(card.tags)]
        self.cards = {card.id: card for card in chosen if card.difficulty <= level}
        if not self.cards:
            of_topics = f" with a tag of {', '.join(topics)}" if topics else ""
            easiest = min((card.difficulty for card in chosen), default=0)
            mend = f"the easiest is of level {easiest}" if easiest else "the deck is empty"
            raise ValueError(f"no card{of_topics} is of level {level} or below: {mend}")
        self.level, self.weakness, self.numbers = level, weakness, random.Random(seed)
        self.case = self.numbers.choice(CASES) if design else None
        self.asked: dict[str, Question] = {}
        self._derivable = [derivation for derivation in DERIVATIONS if self._naming(derivation)]

    def draw(self, left_s: float, share: float | None) -> Question | None:
        """The next question, or None if no time is left; `share` of the last rubric was reached, None if skipped.

        The design case comes last. Its time is reserved until then, and it is dropped when too little remains."""
        if self.case and left_s < BUDGET_S[DESIGN] * ENOUGH[DESIGN]:
            self.case = None
        room = left_s - (BUDGET_S[DESIGN] if self.case else 0.0)
        question = self._follow_up(room, share) or self._derivation(room) or self._card(room)
        if question is None and self.case:
            case, self.case = self.case, None
            question = Question(
                DESIGN, case.name, case.question, BUDGET_S[DESIGN], ("system-design",), ("14b",), case=case
            )
            room = left_s
        if question:
            question = replace(question, budget_s=min(question.budget_s, room))
            self.asked[question.key] = question
        return question

    @property
    def empty(self) -> bool:
        """True if every card has been asked."""
        return all(id in self.asked for id in self.cards)

    def _follow_up(self, room: float, share: float | None) -> Question | None:
        """A card that follows the last one: likelier after a good answer, and few in a row, so that topics vary."""
        last = next(reversed(self.asked.values()), None)
        row = [question.kind for question in self.asked.values()][-MOST_IN_A_ROW:]
        if share is None or last is None or last.card is None or row == [FOLLOW_UP] * MOST_IN_A_ROW:
            return None
        if not _fits(FOLLOW_UP, room) or self.numbers.random() > 0.1 + 0.5 * share:
            return None
        left = [self.cards[id] for id in last.card.next if id in self.cards and id not in self.asked]
        return replace(self._of(self._one(left)), kind=FOLLOW_UP, after=last.key) if left else None

    def _derivation(self, room: float) -> Question | None:
        """A derivation whose law no card of this session has shown."""
        if not self.asked or not _fits(DERIVATION, room) or self.numbers.random() > DERIVED:
            return None
        shown = {question.card.derive for question in self.asked.values() if question.card}
        left = [item for item in self._derivable if item.name not in shown and item.name not in self.asked]
        if not left:
            return None
        weights = [max(self._weight(card) for card in self._naming(item)) for item in left]
        chosen = self.numbers.choices(left, weights)[0]
        tags = dict.fromkeys(tag for card in self._naming(chosen) for tag in card.tags)
        return Question(DERIVATION, chosen.name, chosen.question, BUDGET_S[DERIVATION], tuple(tags), (chosen.lab,),
                        derivation=chosen)  # fmt: skip

    def _card(self, room: float) -> Question | None:
        left = [card for id, card in self.cards.items() if id not in self.asked]
        return self._of(self._one(left)) if left and _fits(CARD, room) else None

    def _one(self, cards: Sequence[Card]) -> Card:
        return self.numbers.choices(cards, [self._weight(card) for card in cards])[0]

    def _weight(self, card: Card) -> float:
        often = Counter(tag for question in self.asked.values() for tag in question.tags)
        worn = 1 + sum(often[tag] for tag in card.tags) / len(card.tags)
        return max(LEAST, self.weakness.get(card.id, 1.0)) * EASIER ** (self.level - card.difficulty) / worn

    def _naming(self, derivation: Derivation) -> list[Card]:
        """The cards that ask for this derivation; they decide its level and its tags."""
        return [card for card in self.cards.values() if card.derive == derivation.name]

    def _of(self, card: Card) -> Question:
        return Question(CARD, card.id, card.as_sentence(card.front), BUDGET_S[CARD], card.tags, card.lab, card)


def rating_of(points: Mapping[str, bool]) -> int:
    """A rating from 1 to 5 from the parts that were reached; without its claim a card gets 2 at most."""
    parts = [reached for point, reached in points.items() if point in PARTS]
    rating = 1 + round(4 * sum(parts) / len(parts)) if parts else 1
    return rating if points.get("claim") else min(2, rating)


def points_of(kinds: Sequence[str]) -> Mapping[str, bool]:
    """The points of a derivation, from the verdicts on its formulas (`kinds`, in order)."""
    return {
        UNIT: any(kind != "unit" for kind in kinds),
        LIMIT: any(kind in ("right", "factor", "limit") for kind in kinds),
        FORMULA: "right" in kinds,
        FIRST: kinds[0] == "right",
    }


def _fits(kind: str, room: float) -> bool:
    return room >= BUDGET_S[kind] * ENOUGH[kind]


def _short(ask: str) -> str:
    """The first words: `bytes over each link` of `bytes over each link, and whether they hide`."""
    return re.split(r"[:,]", ask)[0]


def _plain(words: str) -> str:
    """A paragraph of `explain` without its number and name."""
    return " ".join(re.sub(r"^\d \w+", "", words).split())
