"""Differential diagnosis: which cause gives which symptom, and the measurement that tells them apart.

    cause             stops   out of    too    loss       learns       ranks
                      for ..  memory    slow   explodes   too little   disagree
    uneven batches    [is]
      autopsy: a rank waits in all_reduce for ranks that have finished
    a slow rank       [like]            [is]
      clock: all wait for a rank but one, which computes

"is": a program with this cause has this symptom. "like": with this symptom it is among the suspects, and the test has
to rule it out. Read the table by column: a symptom, its suspects, and under each the test that separates it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from labkit.course.clinic.case_file import Patient
from labkit.view.svg import PALETTE, WIDTH, Picture, box, headline, line, text

CAUSE, COLUMN, ROW, TOP = 252.0, 88.0, 37.0, 66.0
IS, LIKE = PALETTE[1], PALETTE[0]


def diagnosis(cases: Iterable[Patient], symptom: str = "", title: str = "") -> Picture:
    """The table of all causes; with `symptom`, only the causes that may lie behind it.

    ValueError for no cases, and for a symptom that no case has."""
    patients = list(cases)
    symptoms = tuple(dict.fromkeys(patient.symptom for patient in patients))
    if not patients or (symptom and symptom not in symptoms):
        raise ValueError(f"no case has the symptom {symptom!r}; there are {', '.join(symptoms) or 'no cases'}")
    marks = _marks(patients)
    rows = [patient for patient in patients if not symptom or symptom in marks[patient.cause]]
    rows.sort(key=lambda patient: (symptoms.index(patient.symptom), patient.cause))
    title = title or (
        f"{symptom}: {len(rows)} suspects" if symptom else f"{len(rows)} causes, {len(symptoms)} symptoms"
    )
    body = [headline(title)]
    for column, name in enumerate(symptoms):
        for line_number, words in enumerate(textwrap.wrap(name, 11)):
            body.append(
                text(CAUSE + COLUMN * (column + 0.5), 40 + 15 * line_number, words, "middle", 12, name == symptom)
            )
    for number, patient in enumerate(rows):
        y = TOP + number * ROW
        body += [line(4, y - 1, WIDTH - 4, y - 1, width=0.3), text(4, y + 14, patient.cause, bold=True)]
        body.append(text(16, y + 30, f"{patient.test}: {patient.shows} · lab {patient.lab}", size=11))
        for column, name in enumerate(symptoms):
            if word := marks[patient.cause].get(name):
                hover = f"{patient.cause}: {name}" if word == "is" else f"{patient.cause}: a suspect where a job {name}"
                body.append(box(CAUSE + COLUMN * column + 22, y + 2, 44, 15, IS if word == "is" else LIKE, word, hover))
    summary = "; ".join(f"{row.cause}: {', '.join(marks[row.cause])}, seen in {row.test}" for row in rows)
    return Picture("".join(body), TOP + ROW * len(rows) + 6, f"{title}: {summary}")


def _marks(cases: Sequence[Patient]) -> dict[str, dict[str, str]]:
    """The table as nested dicts: cause -> symptom -> "is" or "like"."""
    marks: dict[str, dict[str, str]] = {case.cause: {case.symptom: "is"} for case in cases}
    for case in cases:
        for rival in case.differential:
            marks.setdefault(rival.cause, {}).setdefault(case.symptom, "like")
    return marks
