"""Differential diagnosis: which cause gives which symptom, and the measurement that tells them apart.

    cause             stops   out of    too    loss       learns       ranks
                      for ..  memory    slow   explodes   too little   disagree
    uneven batches    [is]
      autopsy: a rank waits in all_reduce for ranks that have finished
    a slow rank       [like]            [is]
      clock: all wait for a rank but one, which computes

"is": a program with this cause has this symptom. "like": with this symptom it is among the suspects, and the test has
to rule it out. The table is read from a column: a symptom, its suspects, under each what separates it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Protocol

from labkit.view.svg import PALETTE, WIDTH, Picture, box, headline, line, text

CAUSE, COLUMN, ROW, TOP = 252.0, 88.0, 37.0, 66.0
IS, LIKE = PALETTE[1], PALETTE[0]


class Rival(Protocol):
    """Another cause of the same complaint."""

    @property
    def cause(self) -> str:
        """Its name."""

    @property
    def test(self) -> str:
        """What tells it apart."""

    @property
    def would_show(self) -> str:
        """What that test would show."""


class Patient(Protocol):
    """A broken program, as the ward knows it; `labkit.course.clinic.clinic.Case` is one."""

    @property
    def name(self) -> str:
        """Whose it is."""

    @property
    def complaint(self) -> str:
        """What its owner has seen."""

    @property
    def symptom(self) -> str:
        """The complaint in a few words."""

    @property
    def cause(self) -> str:
        """What it is."""

    @property
    def test(self) -> str:
        """The test that shows it."""

    @property
    def shows(self) -> str:
        """How."""

    @property
    def repair(self) -> str:
        """What mends it."""

    @property
    def diff(self) -> str:
        """What the repair changes, line by line."""

    @property
    def lab(self) -> str:
        """Where its mechanism is taught."""

    @property
    def suspects(self) -> tuple[str, ...]:
        """All causes that the complaint allows."""

    @property
    def differential(self) -> Sequence[Rival]:
        """Those that it is not."""


def diagnosis(cases: Iterable[Patient], symptom: str = "", title: str = "") -> Picture:
    """The table of all causes; with `symptom`, its column alone decides which rows are there.

    ValueError for no cases, and for a symptom that none has."""
    every = list(cases)
    symptoms = tuple(dict.fromkeys(each.symptom for each in every))
    if not every or (symptom and symptom not in symptoms):
        raise ValueError(f"no case has the symptom {symptom!r}; there are {', '.join(symptoms) or 'no cases'}")
    marks = _marks(every)
    rows = [each for each in every if not symptom or symptom in marks[each.cause]]
    rows.sort(key=lambda each: (symptoms.index(each.symptom), each.cause))
    title = title or (
        f"{symptom}: {len(rows)} suspects" if symptom else f"{len(rows)} causes, {len(symptoms)} symptoms"
    )
    body = [headline(title)]
    for k, name in enumerate(symptoms):
        for j, words in enumerate(textwrap.wrap(name, 11)):
            body.append(text(CAUSE + COLUMN * (k + 0.5), 40 + 15 * j, words, "middle", 12, name == symptom))
    for number, each in enumerate(rows):
        y = TOP + number * ROW
        body += [line(4, y - 1, WIDTH - 4, y - 1, width=0.3), text(4, y + 14, each.cause, bold=True)]
        body.append(text(16, y + 30, f"{each.test}: {each.shows} · lab {each.lab}", size=11))
        for k, name in enumerate(symptoms):
            if word := marks[each.cause].get(name):
                hover = f"{each.cause}: {name}" if word == "is" else f"{each.cause}: a suspect where a job {name}"
                body.append(box(CAUSE + COLUMN * k + 22, y + 2, 44, 15, IS if word == "is" else LIKE, word, hover))
    told = "; ".join(f"{each.cause}: {', '.join(marks[each.cause])}, seen in {each.test}" for each in rows)
    return Picture("".join(body), TOP + ROW * len(rows) + 6, f"{title}: {told}")


def _marks(cases: Sequence[Patient]) -> dict[str, dict[str, str]]:
    """cause -> symptom -> "is" or "like"."""
    marks: dict[str, dict[str, str]] = {each.cause: {each.symptom: "is"} for each in cases}
    for each in cases:
        for rival in each.differential:
            marks.setdefault(rival.cause, {}).setdefault(each.symptom, "like")
    return marks
