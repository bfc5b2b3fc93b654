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

from collections.abc import Mapping, Sequence
from html import escape

from labkit.course.clinic.case_file import Patient
from labkit.course.clinic.outcome import Outcome, ScoreCard
from labkit.view.panels import Column, Panel, below, beside, page, paragraph, phrase, rule, table, tile
from labkit.view.svg import PALETTE, WIDTH, Picture, box, line

PROBE, PROOF, VAIN = PALETTE[0], PALETTE[1], PALETTE[6]
ADDED, REMOVED = PALETTE[2], PALETTE[6]
FULL = 190.0
"""The width of the longest bar of the score card."""


def bedside(
    case: Patient, seen: Mapping[str, str], suspects: Sequence[str], struck: Sequence[str], minutes: int
) -> Picture:
    """A patient under examination: the complaint, what the ordered probes saw, the remaining suspects, the minutes."""
    answers = [
        _beside_probe(probe, PROBE, paragraph(sign or "it cannot tell: the job does not come so far", 686, 12))
        for probe, sign in seen.items()
    ]
    vain = [paragraph(f"Repaired in vain: {' · '.join(struck)}", size=12)] if struck else []
    observations = [f"{probe}: {sign}" for probe, sign in seen.items()] or ["no probe ordered"]
    in_vain = f" Repaired in vain: {', '.join(struck)}." if struck else ""
    return page(
        f"{case.name}: {case.symptom}",
        paragraph(f"“{case.complaint}”"),
        *(answers or [phrase("No probe has been ordered.", 12)]),
        rule(stroke=0.5),
        below(paragraph(f"Suspects: {' · '.join(suspects)}", size=12), *vain, gap=4),
        aside=_minutes(minutes),
        gap=6,
        label=f"{case.name}: {case.symptom}. {case.complaint} {_minutes(minutes)}. {'; '.join(observations)}. "
        f"Suspects: {', '.join(suspects)}.{in_vain}",
    )


def diagnosed(outcome: Outcome) -> Picture:
    """The diagnosis: what shows the cause, what the other suspects would have shown, and the repair as a diff."""
    case = outcome.case
    shown = paragraph(f"shows it: {case.shows}", 686, bold=True)
    proof = below(shown, paragraph(f"It saw: {outcome.saw}", 686, 12), gap=4)
    rivals = []
    for rival in case.differential:
        vain = " (repaired in vain)" * (rival.cause in outcome.struck)
        words = f"{rival.cause}{vain}: it would show: {rival.would_show}"
        rivals.append(_beside_probe(rival.test, PROBE, paragraph(words, 686, 12)))
    others = "; ".join(f"{rival.cause}: {rival.test} would show: {rival.would_show}" for rival in case.differential)
    return page(
        f"{case.name}: {case.cause}",
        paragraph(outcome.words),
        _beside_probe(case.test, PROOF, proof),
        below(phrase("If it were another of the suspects", bold=True), *rivals, gap=4),
        below(paragraph(f"Repair: {case.repair}", bold=True), *map(_changed, case.diff.splitlines())),
        aside=f"{outcome.points} points",
        label=f"{case.name}: {case.cause}. {outcome.words} {case.test}: {case.shows}. It saw: {outcome.saw}. "
        f"Otherwise: {others}. Repair: {case.repair} (lab {case.lab})",
    )


def score_card(card: ScoreCard) -> Picture:
    """Each diagnosed patient with minutes as a bar, par as a mark, evidence and points; then what to repeat."""
    title, sums = "Score card", card.words[:1].upper() + card.words[1:] + "."
    longest = max((max(outcome.minutes, outcome.par) for outcome in card.outcomes), default=1)
    parts = [paragraph(sums)]
    if card.outcomes:
        columns = [Column(width=48), Column(width=236), Column(width=FULL), Column(), Column(), Column(anchor="end")]
        rows = (_row(outcome, FULL / longest) for outcome in card.outcomes)
        parts.append(table(columns, rows, 12, gap=8, lead=3, width=WIDTH - 8))
    if card.again:
        advice_lines = (phrase(f"{cause}: lab {lab}", 12) for cause, lab in card.again)
        parts.append(below(phrase("Worth another look", bold=True), below(*advice_lines).padded(left=12)))
    if card.waiting:
        parts.append(paragraph(f"Still waiting: {', '.join(card.waiting)}", size=12))
    facts = [
        f"{outcome.case.name}: {outcome.case.cause}, {_against(outcome)}, {outcome.how}, {outcome.points}"
        for outcome in card.outcomes
    ]
    advice = [f"look again at {cause} (lab {lab})" for cause, lab in card.again]
    waits = [f"still waiting: {', '.join(card.waiting)}"] if card.waiting else []
    return page(title, *parts, label="; ".join([f"{title}: {card.words}", *facts, *advice, *waits]))


def _row(outcome: Outcome, per_minute: float) -> tuple[str | Panel, ...]:
    points = phrase(outcome.points, 12, bold=True, anchor="end")
    return outcome.case.name, outcome.case.cause, _bar(outcome, per_minute), _against(outcome), outcome.how, points


def _bar(outcome: Outcome, per_minute: float) -> Panel:
    """The minutes of a patient as a bar, and its par as a mark across."""
    wide, par = max(2.0, outcome.minutes * per_minute), outcome.par * per_minute
    fill = VAIN if outcome.minutes > outcome.par or not outcome.points else ADDED
    hover = f"{outcome.case.name}: {_against(outcome)}"
    return Panel(
        FULL, 21.0, lambda x, y: box(x, y + 2, wide, 17, fill, "", hover) + line(x + par, y, x + par, y + 21, width=2)
    )


def _beside_probe(probe: str, fill: str, words: Panel) -> Panel:
    """The name of a probe in a box of this colour, and beside it what it shows."""
    return beside(tile(96, 20, fill, probe), words.padded(top=2), gap=10, top=True)


def _changed(words: str) -> Panel:
    """One line of a diff, with a tint that suits light and dark pages; its first sign says the same."""
    fill = {"+": ADDED, "-": REMOVED}.get(words[:1], "none")
    spaced = escape(words.replace(" ", "\N{NO-BREAK SPACE}"))  # SVG draws several spaces as one
    return Panel(WIDTH - 8, 16, lambda x, y: (
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH - 8}" height="16" fill="{fill}" fill-opacity="0.25"/>'
        f'<text x="{x + 4:g}" y="{y + 12:g}" font-size="11" font-family="ui-monospace,monospace">{spaced}</text>'
    ))  # fmt: skip


def _minutes(count: int) -> str:
    return f"{count} minutes"


def _against(outcome: Outcome) -> str:
    return f"{outcome.minutes} min, par {outcome.par}"
