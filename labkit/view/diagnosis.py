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
from collections.abc import Iterable, Mapping, Sequence
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
    """A broken program, as the ward knows it; `labkit.lab.clinic.Case` is one."""

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


def bedside(case: Patient, taken: Mapping[str, str], verdict: str = "") -> Picture:
    """A patient: the complaint, what the tests that were taken saw, the suspects, and what is said of the one named."""
    body, y = [headline(f"{case.name}: {case.symptom}")], 42.0
    for words in textwrap.wrap(f"“{case.complaint}”", 104):
        body.append(text(4, y, words))
        y += 18
    for test, said in taken.items():
        body.append(box(4, y, 96, 20, LIKE, test))
        for words in textwrap.wrap(said or "this test cannot be taken: the job does not come so far", 100)[:5]:
            body.append(text(110, y + 14, words, size=12))
            y += 16
        y += 12
    if not taken:
        body.append(text(4, y + 10, "No test has been taken.", size=12))
        y += 24
    body.append(line(4, y, WIDTH - 4, y, width=0.5))
    y += 18
    for words in textwrap.wrap(f"Suspects: {', '.join(case.suspects)}", 112):
        body.append(text(4, y, words, size=12))
        y += 17
    for k, words in enumerate(textwrap.wrap(verdict, 104)):
        body.append(text(4, y + 6 + 18 * k, words, bold=True))
    y += 6 + 18 * len(textwrap.wrap(verdict, 104))
    seen = "; ".join(f"{test}: {said}" for test, said in taken.items()) or "no test taken"
    return Picture("".join(body), y + 4, f"{case.name}: {case.symptom}. {case.complaint} {seen}. {verdict}".strip())


def opinion(case: Patient, named: str, taken: Mapping[str, str]) -> str:
    """Why a cause that somebody names fits, or does not, or is a guess so far. ValueError if it is no suspect."""
    if named not in case.suspects:
        raise ValueError(f"{named!r} is no suspect here; there are {', '.join(case.suspects)}")
    if named == case.cause:
        if case.test not in taken:
            return f"A guess so far: no test that you took shows “{named}”."
        return f"It fits. {case.test}: {case.shows}. Repair: {case.repair} (lab {case.lab})."
    rival = next(each for each in case.differential if each.cause == named)
    if rival.test not in taken:
        return f"It does not fit: {rival.test} would show: {rival.would_show}. You have not looked."
    return f"It does not fit: {rival.test} would show: {rival.would_show}. It shows something else."


def _marks(cases: Sequence[Patient]) -> dict[str, dict[str, str]]:
    """cause -> symptom -> "is" or "like"."""
    marks: dict[str, dict[str, str]] = {each.cause: {each.symptom: "is"} for each in cases}
    for each in cases:
        for rival in each.differential:
            marks.setdefault(rival.cause, {}).setdefault(each.symptom, "like")
    return marks
