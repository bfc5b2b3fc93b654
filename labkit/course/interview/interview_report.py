"""The report of a mock interview: time against budget, points by tag and by part, and what to look at next.

report.asked             how each question went        report.share       of all that was asked, from 0 to 1
report.by_tag            {tag: (share, questions)}     report.by_part     {point: (reached, of)}
report.weak              the weakest tags, with cells of the labs and cards
report.judgement         all that in a paragraph       report.as_dict()   as plain data, for json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from types import MappingProxyType
from typing import Any, NamedTuple

from labkit.course.cards.card import PARTS
from labkit.course.cards.deck import Deck
from labkit.course.interview.interview_picture import clock_text, spoken
from labkit.course.interview.interview_questions import DERIVATION, DESIGN, FORMULA, POINTS
from labkit.view.units import plural

GOOD, MOST_WEAK, MOST_CELLS, MOST_CARDS = 0.75, 3, 4, 4
"""Below this share an answer counts as weak; and how many weak tags, cells and cards the report names."""
IN_WORDS = MappingProxyType(
    {"claim": "claim", "reason": "reason", "law": "law", "number": "number", "costs": "trade-off", "limits": "limits"}
)
ENDS = MappingProxyType(
    {"": "so far", "time": "until the time was over", "cards": "until no card was left", "stopped": "until you stopped"}
)


@dataclass(frozen=True)
class Spoken:
    """One question as it went: `seconds` until the answer was shown; `points` are True where they were reached.

    rating      1 to 5: for a card from its points, for others if they were rated so; else 0
    formulas    what was typed for a derivation;  after  the card that a follow-up follows
    """

    kind: str
    key: str
    words: str
    tags: tuple[str, ...]
    lab: tuple[str, ...]
    budget_s: float
    seconds: float
    points: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))
    rating: int = 0
    skipped: bool = False
    formulas: tuple[str, ...] = ()
    after: str = ""

    @property
    def reached(self) -> int:
        """The number of points that were reached; for a bare rating, the rating minus 1."""
        return sum(self.points.values()) if self.points else max(0, self.rating - 1)

    @property
    def of(self) -> int:
        """The number of points that could be reached: 4 for a bare rating, 0 if the question was skipped."""
        return 0 if self.skipped else len(self.points) or 4

    @property
    def share(self) -> float:
        """The share of the points that was reached, from 0 to 1."""
        return self.reached / self.of if self.of else 0.0


class Weak(NamedTuple):
    """A tag that went badly: its share over so many questions, cells of labs on it, and cards as (id, front)."""

    tag: str
    share: float
    questions: int
    cells: tuple[str, ...]
    cards: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class InterviewReport:
    """A session as it went; `ended` is "time", "cards" (none was left), "stopped", or "" while it goes on."""

    asked: tuple[Spoken, ...]
    minutes: float
    level: int
    topics: tuple[str, ...]
    seed: int
    spent_s: float
    ended: str
    note: str
    weak: tuple[Weak, ...]

    @property
    def share(self) -> float:
        """The mean share over all questions; a skipped one counts as 0."""
        return sum(question.share for question in self.asked) / len(self.asked) if self.asked else 0.0

    @property
    def by_tag(self) -> Mapping[str, tuple[float, int]]:
        """For each tag its mean share and the number of questions, the weakest first."""
        return _by_tag(self.asked)

    @property
    def by_part(self) -> Mapping[str, tuple[int, int]]:
        """For each point of the rubrics: in how many answers it was reached, and out of how many."""
        counts_by_point: dict[str, tuple[int, int]] = dict.fromkeys(POINTS, (0, 0))
        for question in self.asked:
            for point, success in question.points.items():
                reached, of = counts_by_point.get(point, (0, 0))
                counts_by_point[point] = (reached + success, of + 1)
        return MappingProxyType({point: counts for point, counts in counts_by_point.items() if counts[1]})

    @property
    def named(self) -> Mapping[str, str]:
        """The points of `by_part` in words."""
        asks = {point: point for question in self.asked for point in question.points}
        return MappingProxyType({**asks, **POINTS})

    @property
    def judgement(self) -> str:
        """The result in a paragraph."""
        if not self.asked:
            return "No question was answered."
        reached, of = (sum(counts) for counts in zip(*self.by_part.values(), strict=True)) if self.by_part else (0, 0)
        skipped = sum(question.skipped for question in self.asked)
        sentences = [
            f"{plural(len(self.asked), 'question')} in {clock_text(self.spent_s)} of {clock_text(self.minutes * 60)}, "
            f"{ENDS[self.ended]}, level {self.level}: {self.share:.0%} of whole answers"
            + (f", {reached} of {of} points" if of else "")
            + (f", {skipped} skipped" if skipped else ""),
            *self._parts(),
            *self._times(),
            *self._tags(),
        ]
        return ". ".join(sentences) + "."

    def _parts(self) -> list[str]:
        """Sentences on the part that answers lack most, the parts that they all have, derivations and design case."""
        out = {part: (of - reached, of) for part, (reached, of) in self.by_part.items() if part in PARTS}
        sentences = []
        if missed := {part: counts for part, counts in out.items() if counts[0]}:
            part, (times, of) = max(missed.items(), key=lambda item: (item[1][0] / item[1][1], item[1][1]))
            sentences.append(f"You leave out the {IN_WORDS[part]} in {times} of {of}")
        if parts := [IN_WORDS[part] for part, (times, of) in out.items() if not times and of > 1]:
            sentences.append(f"Always there: {', '.join(parts)}")
        if laws := [question for question in self.asked if question.kind == DERIVATION]:
            right = sum(law.points.get(FORMULA, False) for law in laws)
            sentences.append(f"Derivations right: {right} of {len(laws)}")
        sentences += [
            f"Design case: {question.reached} of {question.of}"
            for question in self.asked
            if question.kind == DESIGN and question.of
        ]
        return sentences

    def _times(self) -> list[str]:
        answered = [question for question in self.asked if not question.skipped]
        late = [question for question in answered if question.seconds > question.budget_s]
        if not late:
            return ["All within their time"] if answered else []
        worst = max(late, key=lambda question: question.seconds / question.budget_s)
        much = f"{worst.key} took {clock_text(worst.seconds)} of {clock_text(worst.budget_s)}"
        return [f"{len(late)} of {len(answered)} over their time; {much}"]

    def _tags(self) -> list[str]:
        tags = self.by_tag
        ends = [tag for tag, (share, _) in tags.items() if share >= GOOD][-1:]
        sentences = [f"Strongest: {tag}, {tags[tag][0]:.0%} of {plural(tags[tag][1], 'question')}" for tag in ends]
        return sentences + [f"Weakest: {weak.tag}, {weak.share:.0%} of {plural(weak.questions, 'question')}"
                       for weak in self.weak[:1]]  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for json."""
        asked = [{name: getattr(question, name) for name in Spoken.__dataclass_fields__} for question in self.asked]
        plain = [
            {**row, "points": dict(answer.points), "tags": list(answer.tags), "lab": list(answer.lab),
             "formulas": list(answer.formulas), "share": answer.share}
            for row, answer in zip(asked, self.asked, strict=True)
        ]  # fmt: skip
        weak = [{"tag": weak.tag, "share": weak.share, "questions": weak.questions, "cells": list(weak.cells),
                 "cards": [id for id, _ in weak.cards]} for weak in self.weak]  # fmt: skip
        return {
            "minutes": self.minutes, "level": self.level, "topics": list(self.topics), "seed": self.seed,
            "spent_s": self.spent_s, "ended": self.ended, "note": self.note, "share": self.share,
            "judgement": self.judgement, "asked": plain, "weak": weak,
            "by_tag": {tag: list(numbers) for tag, numbers in self.by_tag.items()},
            "by_part": {part: list(numbers) for part, numbers in self.by_part.items()},
        }  # fmt: skip

    def __repr__(self) -> str:
        look = [f"{weak.tag}: {'; '.join([*weak.cells, *(id for id, _ in weak.cards)])}" for weak in self.weak]
        lines = [self.judgement, *(f"look at {line}" for line in look), *filter(None, [self.note])]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(_row(weak) for weak in self.weak)
        head = "".join(f"<th scope='col' {CELL}>{name}</th>" for name in ("weakest", "came", "cells", "cards"))
        table = f"<table style='border-collapse:collapse'><tr>{head}</tr>{rows}</table>" if rows else ""
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        body = f"<p>{escape(self.judgement)}</p>{spoken(self)}{table}{note}"
        return f"<div style='max-width:860px;line-height:1.4'>{body}</div>"


CELL = "style='text-align:left;vertical-align:top;padding:.15em .7em'"


def weakest(asked: Sequence[Spoken], deck: Deck, level: int) -> tuple[Weak, ...]:
    """The tags with the lowest shares, with cells of the labs that show what was missed, and cards to look at.

    A tag that was asked once says less than one that was asked often, so it is ranked nearer to a half. The cards are
    those that were missed, then those that they name, not above the level."""
    weak_tags, named = [], set[str]()
    known = {card.id: card for card in deck}
    tags = [(tag, share, count) for tag, (share, count) in _by_tag(asked).items() if share < GOOD]
    for tag, share, count in sorted(tags, key=lambda entry: (entry[1] * entry[2] + 1) / (entry[2] + 2))[:MOST_WEAK]:
        missed = [question for question in asked if tag in question.tags and question.share < GOOD]
        ids = [question.key for question in missed if question.key in known]
        follow_ups = [id for key in ids for id in known[key].next if id in known and known[id].difficulty <= level]
        new = [id for id in dict.fromkeys((*ids, *follow_ups)) if id not in named] or ids
        named |= set(new[:MOST_CARDS])
        cards = tuple((id, known[id].as_sentence(known[id].front)) for id in new[:MOST_CARDS])
        cells = tuple(dict.fromkeys(cell for question in missed for cell in question.lab))[:MOST_CELLS]
        weak_tags.append(Weak(tag, share, count, cells, cards))
    return tuple(weak_tags)


def _by_tag(asked: Sequence[Spoken]) -> Mapping[str, tuple[float, int]]:
    shares: dict[str, list[float]] = {}
    for question in asked:
        for tag in question.tags:
            shares.setdefault(tag, []).append(question.share)
    means = {tag: (sum(values) / len(values), len(values)) for tag, values in shares.items()}
    return MappingProxyType(dict(sorted(means.items(), key=lambda item: item[1])))


def _row(weak: Weak) -> str:
    cards = "<br>".join(f"<code>{escape(id)}</code> {escape(front)}" for id, front in weak.cards)
    where = ", ".join(
        f"<a data-cell='{escape(cell)}' style='white-space:nowrap'>{escape(cell)}</a>" for cell in weak.cells
    )
    score = f"{weak.share:.0%} of {plural(weak.questions, 'question')}"
    cells = (escape(weak.tag), score, where, cards)
    return "<tr>" + "".join(f"<td {CELL}>{cell}</td>" for cell in cells) + "</tr>"
