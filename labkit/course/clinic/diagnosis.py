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

from collections.abc import Iterable, Sequence

from labkit.course.clinic.case_file import Patient
from labkit.view.panels import Panel, below, beside, page, paragraph, phrase, rule, space, tile
from labkit.view.svg import PALETTE, Picture

CAUSE, COLUMN = 248.0, 88.0
"""The widths of the column of causes and of a symptom's."""
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
    heads = [paragraph(name, COLUMN, 12, name == symptom, anchor="middle") for name in symptoms]
    parts = [beside(space(CAUSE, 0), *heads, top=True)]
    for patient in rows:
        words = marks[patient.cause]
        cells = (_mark(patient.cause, name, words.get(name, "")) for name in symptoms)
        parts.append(below(
            rule(stroke=0.3),
            beside(phrase(patient.cause, bold=True, width=CAUSE), *cells),
            phrase(f"{patient.test}: {patient.shows} · lab {patient.lab}", 11).padded(left=12),
        ))  # fmt: skip
    summary = "; ".join(f"{row.cause}: {', '.join(marks[row.cause])}, seen in {row.test}" for row in rows)
    return page(title, below(*parts, gap=2), label=f"{title}: {summary}")


def _mark(cause: str, symptom: str, word: str) -> Panel:
    """The cell of a cause and a symptom; `word` is "is", "like" or nothing."""
    if not word:
        return space(COLUMN, 0)
    hover = f"{cause}: {symptom}" if word == "is" else f"{cause}: a suspect where a job {symptom}"
    return tile(COLUMN - 44, 15, IS if word == "is" else LIKE, word, hover).padded(left=22, right=22)


def _marks(cases: Sequence[Patient]) -> dict[str, dict[str, str]]:
    """The table as nested dicts: cause -> symptom -> "is" or "like"."""
    marks: dict[str, dict[str, str]] = {case.cause: {case.symptom: "is"} for case in cases}
    for case in cases:
        for rival in case.differential:
            marks.setdefault(rival.cause, {}).setdefault(case.symptom, "like")
    return marks
