"""The outcome of a patient of the clinic, in points, and the score card of a shift.

    print(outcome)     the diagnosis: what shows the cause and how, what other suspects would have shown, the repair
    print(card)        points, minutes against par, and which mechanisms are worth another look, with their labs

A patient is worth 100 points. Par is the price in minutes of the one probe that shows the cause, and each minute above
par costs one point. The rest is multiplied by a percentage that depends on the evidence for the named cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from labkit.course.clinic.case_file import Patient

FULL = 100
"""Points for a patient who is diagnosed at par; each minute above it costs one."""
SHOWN, EXCLUDED, GUESSED, GAVE_UP = "shown by its probe", "by exclusion", "a guess", "given up"
PERCENT: MappingProxyType[str, int] = MappingProxyType({SHOWN: 100, EXCLUDED: 75, GUESSED: 50, GAVE_UP: 0})
"""Percentage of the remaining points, by the evidence for the named cause."""


@dataclass(frozen=True)
class Outcome:
    """The diagnosis and the points of one patient, shown after the cause was named.

    `how` is one of SHOWN, EXCLUDED, GUESSED and GAVE_UP, `minutes` those spent, `par` the minutes of the one probe
    that shows the cause, `struck` the causes that were named wrongly, `saw` what that one probe saw."""

    case: Patient
    how: str
    minutes: int
    par: int
    struck: tuple[str, ...]
    saw: str

    @property
    def points(self) -> int:
        """Of 100, one less for each minute above par; of the rest the percentage that `how` is worth."""
        return max(0, FULL - max(0, self.minutes - self.par)) * PERCENT[self.how] // 100

    @property
    def first_try(self) -> bool:
        """True if the first cause that was named was the right one."""
        return self.how != GAVE_UP and not self.struck

    @property
    def words(self) -> str:
        """The course of the examination, in one or two sentences."""
        probe = f"the {self.case.test} ({self.par} minutes)"
        verdict = {
            SHOWN: f"Right, and you had ordered what shows it: {probe}.",
            EXCLUDED: f"Right, by exclusion: you had ruled out every other suspect. Not ordered was {probe}: it shows "
            "the cause itself.",
            GUESSED: f"Right, but a guess: you had not ordered {probe}, which shows it.",
            GAVE_UP: f"You gave up. What shows it is {probe}.",
        }[self.how]
        spent = f"{self.minutes} minutes were spent; par is {self.par}. {self.points} of {FULL} points."
        return f"{verdict} {spent}"

    def __str__(self) -> str:
        case = self.case
        others = (f"    {rival.cause}: the {rival.test} would show: {rival.would_show}" for rival in case.differential)
        return "\n".join(
            [
                f"{case.name}: {case.cause}",
                self.words,
                f"{case.test}: {case.shows}",
                f"    it saw: {self.saw}",
                "if it were another suspect:",
                *others,
                f"repair: {case.repair} (lab {case.lab})",
                case.diff,
            ]
        )


@dataclass(frozen=True)
class ScoreCard:
    """The result of a shift: outcomes in the order of the diagnoses; `waiting` are the names of the other patients."""

    outcomes: tuple[Outcome, ...]
    waiting: tuple[str, ...]

    @property
    def points(self) -> int:
        """All points; each diagnosed patient can bring 100."""
        return sum(outcome.points for outcome in self.outcomes)

    @property
    def minutes(self) -> int:
        """All minutes that were spent on diagnosed patients."""
        return sum(outcome.minutes for outcome in self.outcomes)

    @property
    def par(self) -> int:
        """The minutes that the deciding probes alone would have cost."""
        return sum(outcome.par for outcome in self.outcomes)

    @property
    def first_tries(self) -> int:
        """The number of patients whose cause was named at the first try."""
        return sum(outcome.first_try for outcome in self.outcomes)

    @property
    def guesses(self) -> int:
        """The number of causes that were named right without evidence."""
        return sum(outcome.how == GUESSED for outcome in self.outcomes)

    @property
    def again(self) -> tuple[tuple[str, str], ...]:
        """(cause, lab) of patients that were guessed, given up or misjudged at first: worth another look."""
        weak = (outcome for outcome in self.outcomes if outcome.how in (GUESSED, GAVE_UP) or outcome.struck)
        return tuple((outcome.case.cause, outcome.case.lab) for outcome in weak)

    @property
    def words(self) -> str:
        """The sums, in a sentence."""
        if not self.outcomes:
            return "nobody is diagnosed yet"
        count = len(self.outcomes)
        return (
            f"{self.points} of {FULL * count} points; {self.minutes} minutes, par is {self.par}; "
            f"{self.first_tries} of {count} named at the first try; guesses without evidence: {self.guesses}"
        )

    def __str__(self) -> str:
        rows = [
            f"{outcome.case.name:6} {outcome.case.cause:35} {outcome.minutes:4} min, par {outcome.par:2}  "
            f"{outcome.how:18} {outcome.points:4}"
            for outcome in self.outcomes
        ]
        advice = [f"look again at: {cause} (lab {lab})" for cause, lab in self.again]
        left = [f"still waiting: {', '.join(self.waiting)}"] if self.waiting else []
        return "\n".join([self.words, *rows, *advice, *left])
