"""Three pictures for the clinic: a patient under examination, a patient with the diagnosis, and the score card.

    Mia: loss explodes                                   35 minutes
    "Since gradients are accumulated, the loss explodes ..."
    [gradients] 0.weight 4.7 long; 0.bias 1.1 long; ...
    [reference] first loss 0.72 (in one process 0.72) ...; first gradient 8 times as long
    ---------------------------------------------------------------
    Suspects: accumulation without normalisation · ranks differ by seed
    Repaired in vain: fp16 overflow (40 minutes)

The first picture shows only what the learner has seen. Nothing in it, nor in its text for screen readers, depends on
which of the suspects is the cause.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from html import escape

from labkit.course.clinic.case_file import Patient
from labkit.course.clinic.outcome import Outcome, ScoreCard
from labkit.view.svg import PALETTE, WIDTH, Picture, box, headline, line, text

PROBE, PROOF, VAIN = PALETTE[0], PALETTE[1], PALETTE[6]
ADDED, REMOVED = PALETTE[2], PALETTE[6]
LEFT, ROW = 110.0, 24.0
BAR, FULL = 304.0, 190.0
"""Where the bars of the score card begin, and how long the longest is."""


def bedside(
    case: Patient, seen: Mapping[str, str], suspects: Sequence[str], struck: Sequence[str], minutes: int
) -> Picture:
    """A patient under examination: the complaint, what the ordered probes saw, the remaining suspects, the minutes."""
    body = [headline(f"{case.name}: {case.symptom}"), text(WIDTH - 4, 20, _minutes(minutes), "end", bold=True)]
    y = _lines(body, f"“{case.complaint}”", 42, 4, 104)
    for probe, sign in seen.items():
        body.append(box(4, y, 96, 20, PROBE, probe))
        y = _lines(body, sign or "it cannot tell: the job does not come so far", y + 14, LEFT, 112, 12) - 4
    y += 6 * bool(seen)
    if not seen:
        body.append(text(4, y + 8, "No probe has been ordered.", size=12))
        y += 22
    body.append(line(4, y, WIDTH - 4, y, width=0.5))
    y = _lines(body, f"Suspects: {' · '.join(suspects)}", y + 18, 4, 112, 12)
    if struck:
        y = _lines(body, f"Repaired in vain: {' · '.join(struck)}", y, 4, 112, 12)
    observations = [f"{probe}: {sign}" for probe, sign in seen.items()] or ["no probe ordered"]
    in_vain = f" Repaired in vain: {', '.join(struck)}." if struck else ""
    return Picture(
        "".join(body),
        y,
        f"{case.name}: {case.symptom}. {case.complaint} {_minutes(minutes)}. {'; '.join(observations)}. "
        f"Suspects: {', '.join(suspects)}.{in_vain}",
    )


def diagnosed(outcome: Outcome) -> Picture:
    """The diagnosis: what shows the cause, what the other suspects would have shown, and the repair as a diff."""
    case = outcome.case
    points = f"{outcome.points} points"
    body = [headline(f"{case.name}: {case.cause}"), text(WIDTH - 4, 20, points, "end", 15, bold=True)]
    y = _lines(body, outcome.words, 42, 4, 114) + 4
    body.append(box(4, y, 96, 20, PROOF, case.test))
    y = _lines(body, f"shows it: {case.shows}", y + 14, LEFT, 92, bold=True)
    y = _lines(body, f"It saw: {outcome.saw}", y, LEFT, 112, 12) + 8
    body.append(text(4, y, "If it were another of the suspects", bold=True))
    y += 8
    for rival in case.differential:
        body.append(box(4, y, 96, 20, PROBE, rival.test))
        vain = " (repaired in vain)" * (rival.cause in outcome.struck)
        y = _lines(body, f"{rival.cause}{vain}: it would show: {rival.would_show}", y + 14, LEFT, 112, 12) - 6
    y = _lines(body, f"Repair: {case.repair}", y + 22, 4, 104, bold=True)
    for words in case.diff.splitlines():
        y = _changed(body, words, y)
    rivals = "; ".join(f"{rival.cause}: {rival.test} would show: {rival.would_show}" for rival in case.differential)
    label = (
        f"{case.name}: {case.cause}. {outcome.words} {case.test}: {case.shows}. It saw: {outcome.saw}. "
        f"Otherwise: {rivals}. Repair: {case.repair} (lab {case.lab})"
    )
    return Picture("".join(body), y + 4, label)


def score_card(card: ScoreCard) -> Picture:
    """Each diagnosed patient with minutes as a bar, par as a mark, evidence and points; then what to repeat."""
    title, sums = "Score card", card.words[:1].upper() + card.words[1:] + "."
    body = [headline(title)]
    y = _lines(body, sums, 42, 4, 108)
    longest = max((max(outcome.minutes, outcome.par) for outcome in card.outcomes), default=1)
    for outcome in card.outcomes:
        body += _row(outcome, y, FULL / longest)
        y += ROW
    if card.again:
        body.append(text(4, y + 18, "Worth another look", bold=True))
        y += 38
        for cause, lab in card.again:
            body.append(text(16, y, f"{cause}: lab {lab}", size=12))
            y += 17
    if card.waiting:
        y = _lines(body, f"Still waiting: {', '.join(card.waiting)}", y + 14, 4, 112, 12)
    rows = [
        f"{outcome.case.name}: {outcome.case.cause}, {_against(outcome)}, {outcome.how}, {outcome.points}"
        for outcome in card.outcomes
    ]
    advice = [f"look again at {cause} (lab {lab})" for cause, lab in card.again]
    waits = [f"still waiting: {', '.join(card.waiting)}"] if card.waiting else []
    return Picture("".join(body), y + 4, "; ".join([f"{title}: {card.words}", *rows, *advice, *waits]))


def _row(outcome: Outcome, y: float, per_minute: float) -> list[str]:
    case, mark = outcome.case, BAR + outcome.par * per_minute
    fill = VAIN if outcome.minutes > outcome.par or not outcome.points else ADDED
    return [
        text(4, y + 13, case.name, size=12),
        text(60, y + 13, case.cause, size=12),
        box(BAR, y, max(2.0, outcome.minutes * per_minute), 17, fill, "", f"{case.name}: {_against(outcome)}"),
        line(mark, y - 2, mark, y + 19, width=2),
        text(BAR + FULL + 8, y + 13, _against(outcome), size=12),
        text(638, y + 13, outcome.how, size=12),
        text(WIDTH - 4, y + 13, outcome.points, "end", 12, bold=True),
    ]


def _changed(body: list[str], words: str, y: float) -> float:
    """Draw one line of a diff, with a tint that suits light and dark pages; its first sign says the same."""
    fill = {"+": ADDED, "-": REMOVED}.get(words[:1])
    if fill:
        body.append(f'<rect x="4" y="{y - 12:g}" width="{WIDTH - 8}" height="16" fill="{fill}" fill-opacity="0.25"/>')
    spaced = escape(words.replace(" ", "\N{NO-BREAK SPACE}"))  # SVG draws several spaces as one
    body.append(f'<text x="8" y="{y:g}" font-size="11" font-family="ui-monospace,monospace">{spaced}</text>')
    return y + 16


def _lines(body: list[str], words: str, y: float, x: float, length: int, size: float = 13, bold: bool = False) -> float:
    """Draw words in lines of at most `length` letters, the first at y. Returns the y of the next line."""
    for row in textwrap.wrap(words, length):
        body.append(text(x, y, row, size=size, bold=bold))
        y += 18 if size >= 13 else 16
    return y + 4


def _minutes(count: int) -> str:
    return f"{count} minutes"


def _against(outcome: Outcome) -> str:
    return f"{outcome.minutes} min, par {outcome.par}"
