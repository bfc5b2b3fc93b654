"""Questions and answers of a stored run, so that a page without a kernel can ask, wait and answer.

A question keeps its words and its unit in the metadata of its output, an answer the question's words and its numbers
(`Predict.kept` and `Answer.kept` in labkit/course/widgets/predict.py). `groups` finds the pairs. Questions are named
after their cells.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from labkit.plan.breakdown import MEASURED, REHEARSED
from labkit.plan.typed import SCALES, example
from labkit.view.units import apart, value_text


@dataclass(frozen=True)
class Question:
    """A question on a page: the name of its cell, its words, its unit."""

    name: str
    words: str
    unit: str

    @property
    def scales(self) -> str:
        """The units that may follow a number, and their factors, as JSON; `{}` if none but its own may."""
        return json.dumps(dict(SCALES.get(self.unit, {})))

    @property
    def example(self) -> str:
        """Numbers that may be typed, in words."""
        return example(self.unit)


@dataclass(frozen=True)
class Bar:
    """A row of an answer: whose number it is, the number in words, and its part of the longest bar in percent."""

    name: str
    words: str
    percent: float


@dataclass(frozen=True)
class Answered:
    """An answer on a page: the question that it answers, and the numbers beside which a prediction is shown.

    `seen` was measured or rehearsed, as `origin` says; None if there is no such number, as for `law`."""

    question: Question
    title: str
    law: float | None
    seen: float | None
    origin: str

    @property
    def numbers(self) -> str:
        """The numbers as JSON, for the script that draws a prediction beside them."""
        base = "the rehearsal" if self.origin == REHEARSED else "the measurement"
        return json.dumps({"law": self.law, "seen": self.seen, "base": base, "unit": self.question.unit})

    @property
    def law_bar(self) -> Bar | None:
        """The row of the law, with its distance from what was seen."""
        if self.law is None:
            return None
        far = "" if self.seen is None else f" ({apart(self.law, self.seen, self.origin)})"
        return Bar("law", value_text(self.law, self.question.unit) + far, self._percent(self.law))

    @property
    def seen_bar(self) -> Bar | None:
        """The row of what was measured or rehearsed."""
        if self.seen is None:
            return None
        return Bar(self.origin, value_text(self.seen, self.question.unit), self._percent(self.seen))

    def _percent(self, value: float) -> float:
        longest = max(abs(number) for number in (self.law, self.seen) if number is not None)
        return round(100 * abs(value) / longest, 2) if longest else 0.0


@dataclass(frozen=True)
class Cell:
    """A cell on a page.

    question  what it asks, in place of its first widget
    answers   what it answers
    waits     names of the questions that were asked above it and are answered below: what it shows may tell their
              answers, and is folded until all of them have a number
    """

    source: Any
    question: Question | None = None
    answers: tuple[Answered, ...] = ()
    waits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Cells that are folded together until the questions named in `waits` have a number; not at all if there are none.

    An answer is folded with what follows from it: all cells until the next heading, question or answer."""

    cells: list[Cell]
    waits: tuple[str, ...] = ()


def groups(cells: Any) -> list[Group]:
    """The cells of a page, in groups. ValueError if an answer has no question above it, or one is asked twice."""
    asked: dict[str, tuple[int, Question]] = {}
    answers: dict[int, list[Answered]] = {}
    for place, cell in enumerate(cells):
        for kept in _kept(cell):
            words = kept.get("question", kept.get("answers"))
            if ("question" in kept) == (words in asked):
                what = "asks again" if words in asked else "answers what no cell above it asks"
                raise ValueError(f"cell {cell.id} {what}: {words!r}")
            if "question" in kept:
                asked[words] = place, Question(cell.id, words, kept["unit"])
            else:
                answers.setdefault(place, []).append(_answered(asked[words][1], kept))
    questions = dict(asked.values())
    spans = [
        (asked[answer.question.words][0], place, answer.question.name)
        for place, some in answers.items()
        for answer in some
    ]
    made = [Group([])]
    for place, cell in enumerate(cells):
        waits = dict.fromkeys(name for first, last, name in spans if first < place < last)
        one = Cell(cell, questions.get(place), tuple(answers.get(place, ())), tuple(waits))
        if one.answers:
            made.append(Group([], tuple(dict.fromkeys(answer.question.name for answer in one.answers))))
        elif made[-1].waits and (one.question is not None or _has_heading(cell)):
            made.append(Group([]))
        made[-1].cells.append(one)
    return [group for group in made if group.cells]


def _has_heading(cell: Any) -> bool:
    return cell.cell_type == "markdown" and re.search(r"^#+ ", cell.source, re.MULTILINE) is not None


def _kept(cell: Any) -> list[Any]:
    """What Predict keeps in the outputs of a cell."""
    stored = (output.get("metadata", {}).get("labkit", {}) for output in cell.get("outputs", ()))
    return [kept for kept in stored if "question" in kept or "answers" in kept]


def _answered(question: Question, kept: Any) -> Answered:
    origin = MEASURED if kept["rehearsed"] is None else REHEARSED
    seen = kept["measured"] if kept["rehearsed"] is None else kept["rehearsed"]
    return Answered(question, kept["title"], kept["law"], seen, origin)
