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
"""Below this share an answer is to be looked at again; and how much the report names."""
IN_WORDS = MappingProxyType(
    {"claim": "claim", "reason": "reason", "law": "law", "number": "number", "costs": "trade-off", "limits": "limits"}
)
ENDS = MappingProxyType(
    {"": "so far", "time": "until the time was over", "cards": "until no card was left", "stopped": "until you stopped"}
)


@dataclass(frozen=True)
class Spoken:
    """How one question went: `seconds` until the answer was shown, and the `points` that were reached.

    rating      1 to 5: of a card, from its points; of anything that was rated so; else 0
    formulas    what was typed for a derivation;  after  of a follow-up, the card before it
    typed       the answer to a card, if it was typed;  proposed  the points that were judged by that, as proposed
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
    typed: str = ""
    proposed: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def corrected(self) -> tuple[str, ...]:
        """The points that were judged by what was typed, and that the learner said otherwise."""
        return tuple(point for point, came in self.proposed.items() if self.points.get(point, came) != came)

    @property
    def reached(self) -> int:
        """How many points; of a bare rating: how far above 1."""
        return sum(self.points.values()) if self.points else max(0, self.rating - 1)

    @property
    def of(self) -> int:
        """Out of how many; 0 if it was skipped."""
        return 0 if self.skipped else len(self.points) or 4

    @property
    def share(self) -> float:
        """How much of a whole answer came, from 0 to 1."""
        return self.reached / self.of if self.of else 0.0


class Weak(NamedTuple):
    """A tag that went badly: the share that came of so many questions, cells that show it, and (id, front) of cards."""

    tag: str
    share: float
    questions: int
    cells: tuple[str, ...]
    cards: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Report:
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
        """The mean over all questions; what was skipped counts as nothing."""
        return sum(each.share for each in self.asked) / len(self.asked) if self.asked else 0.0

    @property
    def by_tag(self) -> Mapping[str, tuple[float, int]]:
        """Of each tag: the mean share, and of how many questions; the weakest first."""
        return _by_tag(self.asked)

    @property
    def by_part(self) -> Mapping[str, tuple[int, int]]:
        """Of each point of the rubrics: in how many answers it came, of how many that could have had it."""
        found: dict[str, tuple[int, int]] = dict.fromkeys(POINTS, (0, 0))
        for each in self.asked:
            for point, came in each.points.items():
                reached, of = found.get(point, (0, 0))
                found[point] = (reached + came, of + 1)
        return MappingProxyType({point: counts for point, counts in found.items() if counts[1]})

    @property
    def named(self) -> Mapping[str, str]:
        """The points of `by_part` in words."""
        asks = {point: point for each in self.asked for point in each.points}
        return MappingProxyType({**asks, **POINTS})

    @property
    def judgement(self) -> str:
        """A paragraph, by the numbers."""
        if not self.asked:
            return "No question was answered."
        reached, of = (sum(each) for each in zip(*self.by_part.values(), strict=True)) if self.by_part else (0, 0)
        skipped = sum(each.skipped for each in self.asked)
        said = [
            f"{plural(len(self.asked), 'question')} in {clock_text(self.spent_s)} of {clock_text(self.minutes * 60)}, "
            f"{ENDS[self.ended]}, level {self.level}: {self.share:.0%} of whole answers"
            + (f", {reached} of {of} points" if of else "")
            + (f", {skipped} skipped" if skipped else ""),
            *self._parts(),
            *self._times(),
            *self._judged(),
            *self._tags(),
        ]
        return ". ".join(said) + "."

    def _parts(self) -> list[str]:
        """What is left out most, and what never is; derivations and the design case."""
        out = {part: (of - reached, of) for part, (reached, of) in self.by_part.items() if part in PARTS}
        said = []
        if missed := {part: counts for part, counts in out.items() if counts[0]}:
            part, (times, of) = max(missed.items(), key=lambda each: (each[1][0] / each[1][1], each[1][1]))
            said.append(f"You leave out the {IN_WORDS[part]} in {times} of {of}")
        if whole := [IN_WORDS[part] for part, (times, of) in out.items() if not times and of > 1]:
            said.append(f"Always there: {', '.join(whole)}")
        if laws := [each for each in self.asked if each.kind == DERIVATION]:
            right = sum(each.points.get(FORMULA, False) for each in laws)
            said.append(f"Derivations right: {right} of {len(laws)}")
        said += [f"Design case: {each.reached} of {each.of}" for each in self.asked if each.kind == DESIGN and each.of]
        return said

    def _times(self) -> list[str]:
        answered = [each for each in self.asked if not each.skipped]
        late = [each for each in answered if each.seconds > each.budget_s]
        if not late:
            return ["All within their time"] if answered else []
        worst = max(late, key=lambda each: each.seconds / each.budget_s)
        much = f"{worst.key} took {clock_text(worst.seconds)} of {clock_text(worst.budget_s)}"
        return [f"{len(late)} of {len(answered)} over their time; {much}"]

    def _judged(self) -> list[str]:
        """How many points were judged by what was typed, and which of them the learner has corrected."""
        typed = [answer for answer in self.asked if answer.proposed and answer.points]
        if not typed:
            return []
        judged = sum(len(answer.proposed) for answer in typed)
        changed = [f"{IN_WORDS[point]} of {answer.key}" for answer in typed for point in answer.corrected]
        told = f"{plural(judged, 'point')} of {plural(len(typed), 'answer')} judged by what you typed"
        return [f"{told}, {len(changed)} corrected by you" + f": {', '.join(changed)}" * bool(changed)]

    def _tags(self) -> list[str]:
        tags = self.by_tag
        ends = [tag for tag, (share, _) in tags.items() if share >= GOOD][-1:]
        said = [f"Strongest: {tag}, {tags[tag][0]:.0%} of {plural(tags[tag][1], 'question')}" for tag in ends]
        return said + [f"Weakest: {each.tag}, {each.share:.0%} of {plural(each.questions, 'question')}"
                       for each in self.weak[:1]]  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for json."""
        asked = [{name: getattr(each, name) for name in Spoken.__dataclass_fields__} for each in self.asked]
        plain = [
            {**row, "points": dict(each.points), "tags": list(each.tags), "lab": list(each.lab),
             "formulas": list(each.formulas), "proposed": dict(each.proposed), "corrected": list(each.corrected),
             "share": each.share} for row, each in zip(asked, self.asked, strict=True)
        ]  # fmt: skip
        weak = [{"tag": each.tag, "share": each.share, "questions": each.questions, "cells": list(each.cells),
                 "cards": [id for id, _ in each.cards]} for each in self.weak]  # fmt: skip
        return {
            "minutes": self.minutes, "level": self.level, "topics": list(self.topics), "seed": self.seed,
            "spent_s": self.spent_s, "ended": self.ended, "note": self.note, "share": self.share,
            "judgement": self.judgement, "asked": plain, "weak": weak,
            "by_tag": {tag: list(each) for tag, each in self.by_tag.items()},
            "by_part": {part: list(each) for part, each in self.by_part.items()},
        }  # fmt: skip

    def __repr__(self) -> str:
        look = [f"{each.tag}: {'; '.join([*each.cells, *(id for id, _ in each.cards)])}" for each in self.weak]
        lines = [self.judgement, *(f"look at {each}" for each in look), *filter(None, [self.note])]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(_row(each) for each in self.weak)
        head = "".join(f"<th scope='col' {CELL}>{name}</th>" for name in ("weakest", "came", "cells", "cards"))
        table = f"<table style='border-collapse:collapse'><tr>{head}</tr>{rows}</table>" if rows else ""
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        body = f"<p>{escape(self.judgement)}</p>{spoken(self)}{table}{note}"
        return f"<div style='max-width:860px;line-height:1.4'>{body}</div>"


CELL = "style='text-align:left;vertical-align:top;padding:.15em .7em'"


def weakest(asked: Sequence[Spoken], deck: Deck, level: int) -> tuple[Weak, ...]:
    """The tags of which least came, with cells of the labs that show what was missed, and cards to look at.

    A tag that was asked once tells less than one that was asked often: it counts as nearer to a half. Cards are those
    that were missed, then the ones that these name, not above the level."""
    found, named = [], set[str]()
    known = {card.id: card for card in deck}
    tags = [(tag, share, count) for tag, (share, count) in _by_tag(asked).items() if share < GOOD]
    for tag, share, count in sorted(tags, key=lambda each: (each[1] * each[2] + 1) / (each[2] + 2))[:MOST_WEAK]:
        missed = [each for each in asked if tag in each.tags and each.share < GOOD]
        ids = [each.key for each in missed if each.key in known]
        more = [id for key in ids for id in known[key].next if id in known and known[id].difficulty <= level]
        new = [id for id in dict.fromkeys((*ids, *more)) if id not in named] or ids
        named |= set(new[:MOST_CARDS])
        cards = tuple((id, known[id].said(known[id].front)) for id in new[:MOST_CARDS])
        cells = tuple(dict.fromkeys(cell for each in missed for cell in each.lab))[:MOST_CELLS]
        found.append(Weak(tag, share, count, cells, cards))
    return tuple(found)


def _by_tag(asked: Sequence[Spoken]) -> Mapping[str, tuple[float, int]]:
    shares: dict[str, list[float]] = {}
    for each in asked:
        for tag in each.tags:
            shares.setdefault(tag, []).append(each.share)
    means = {tag: (sum(mine) / len(mine), len(mine)) for tag, mine in shares.items()}
    return MappingProxyType(dict(sorted(means.items(), key=lambda each: each[1])))


def _row(weak: Weak) -> str:
    cards = "<br>".join(f"<code>{escape(id)}</code> {escape(front)}" for id, front in weak.cards)
    where = ", ".join(
        f"<a data-cell='{escape(cell)}' style='white-space:nowrap'>{escape(cell)}</a>" for cell in weak.cells
    )
    came = f"{weak.share:.0%} of {plural(weak.questions, 'question')}"
    cells = (escape(weak.tag), came, where, cards)
    return "<tr>" + "".join(f"<td {CELL}>{cell}</td>" for cell in cells) + "</tr>"
