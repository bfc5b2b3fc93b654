"""Compares a formula with the truth: right; right up to a factor; right in one limit only; the wrong unit; or wrong.

numbers    both are computed at random points, the truth by the planner's own function, to find where they differ
units      a wrong formula may also have the wrong unit
algebra    finds a constant factor, a missing term, and what both tend to
people     formulas that are often given, and what they really describe
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType

from labkit.course.whiteboard import algebra
from labkit.course.whiteboard.derivation import Derivation
from labkit.course.whiteboard.dimension import NoUnit, unit, unit_text
from labkit.course.whiteboard.formula import Formula

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "right": "Right",
        "factor": "Right up to a factor",
        "limit": "Right in one limit only",
        "unit": "The wrong unit",
        "wrong": "Not yet",
    }
)
POINTS, FAR = 24, 10**9
"""The number of random points; and a number that stands for infinity."""


@dataclass(frozen=True)
class FormulaVerdict:
    """The result of the comparison. `kind` is one of KINDS; `reasons` are sentences. If the formula
    differs: `at` are values of the symbols, `value` and `truth` the two results there."""

    kind: str
    reasons: tuple[str, ...]
    at: Mapping[str, float] = field(default_factory=dict)
    value: float = math.nan
    truth: float = math.nan

    @property
    def right(self) -> bool:
        """True if the formula is right."""
        return self.kind == "right"

    def __str__(self) -> str:
        return f"{KINDS[self.kind]}. " + " ".join(self.reasons)


def check(asked: Derivation, text: str, seed: int = 0) -> FormulaVerdict:
    """Compare a typed formula with the truth. NoFormula, with the column, if it is invalid."""
    formula = asked.read(text)
    draws = asked.draws(POINTS, seed)
    pairs = [(formula.number(values), float(asked.law(values))) for values in draws]
    parts = [place for place, (value, truth) in enumerate(pairs) if not _close(value, truth, asked.tolerance)]
    if not parts:
        proved = algebra.same(formula, asked.formula) and formula.text != asked.answer
        way = "and algebra says the same of all values" if proved else f"at {POINTS} random points"
        return FormulaVerdict("right", (f"As {asked.source} has it, {way}; lab {asked.lab} measures it.",))
    place = min(parts, key=lambda index: (_close(*pairs[index], 0.01), _easy(draws[index])))  # prefer clear differences
    kind, why = _kind(asked, formula, pairs, draws[place])
    return FormulaVerdict(kind, (_where(asked, draws[place], *pairs[place]), *why), draws[place], *pairs[place])


def _kind(
    asked: Derivation, formula: Formula, pairs: Sequence[tuple[float, float]], at: Mapping[str, float]
) -> tuple[str, list[str]]:
    """The kind of verdict on a formula that differs from the truth, and the sentences that say why."""
    known = next((f"That is {mistake.why}." for mistake in asked.wrong if _equal(asked, formula, mistake.formula)), "")
    people = [known] if known else []
    try:
        own_unit = unit(formula, asked.units)
    except NoUnit as error:
        return "unit", [f"{str(error)[0].upper()}{str(error)[1:]}.", *people]
    wanted = unit(asked.formula, asked.units)
    if own_unit != wanted:
        units = f"By its symbols it is in {unit_text(own_unit)}, and the answer in {unit_text(wanted)}."
        return "unit", [units, *people]
    ratio = _constant_ratio(pairs, asked.tolerance)
    if ratio is not None:
        return "factor", [f"It is {_times(ratio, asked.tolerance)} the truth everywhere.", *people]
    term = algebra.missing(formula, asked.formula)
    lacking = [f"What lacks is one term: {term}."] if term else []
    ends = [(symbol, FAR, f"{symbol} -> oo") for symbol in asked.grows]
    ends += [(symbol, 1, f"{symbol} = 1") for symbol in asked.at_one]
    good, sentences = list[bool](), list[str]()
    for symbol, value, words in ends:
        same, sentence = _at_end(asked, formula, {**at, symbol: value}, symbol, value == FAR)
        good.append(same)
        sentences.append(f"For {words} {sentence}.")
    kind = "limit" if any(good) and not all(good) else "wrong"
    return kind, [*people, *lacking, *sentences]


def _at_end(
    asked: Derivation, formula: Formula, at: Mapping[str, float], symbol: str, endless: bool
) -> tuple[bool, str]:
    """True if both formulas agree in this limit, and a sentence about it."""
    exact = {name: Fraction(value) for name, value in at.items()}
    result, truth = formula.number(exact), asked.formula.number(exact)
    same = _close(result, truth, 1e-6 if endless else asked.tolerance)
    if math.isnan(result):
        return False, "yours has no value"
    tends = (algebra.tends_to(formula, symbol), algebra.tends_to(asked.formula, symbol)) if endless else ("", "")
    if all(tends):
        both = "both have no end" if tends[1] == "no end" else f"both tend to {tends[1]}"
        if tends[0] != tends[1]:
            parts = [f"has {word}" if word == "no end" else f"tends to {word}" for word in tends]
            return False, f"yours {parts[0]}, the truth {parts[1]}"
        return same, both if same or not truth else f"{both}, and yours is {_times(result / truth)} the truth"
    if same:
        return True, "both agree"
    if endless:
        return False, f"yours is {_times(result / truth)} the truth, at 10^9" if truth else "the truth is 0, yours not"
    return False, f"yours is {_number(result)}, the truth {_number(truth)}"


def _where(asked: Derivation, at: Mapping[str, float], result: float, truth: float) -> str:
    values = ", ".join(f"{name} = {_number(value)}" for name, value in at.items())
    unit_said = f" {asked.unit}" if asked.unit else ""
    has = "has no value" if math.isnan(result) else f"gives {_number(result)}{unit_said}"
    return f"At {values} yours {has}, the truth is {_number(truth)}{unit_said}."


def _equal(asked: Derivation, formula: Formula, other: str) -> bool:
    """True if the formula equals this known one at random points."""
    known = asked.read(other)
    draws = asked.draws(POINTS, seed=1)
    return all(_close(formula.number(values), known.number(values), 1e-9) for values in draws)


def _constant_ratio(pairs: Sequence[tuple[float, float]], tolerance: float) -> float | None:
    """value / truth, if that is the same at all points; None if not, or if there is no such number."""
    ratios = [value / truth for value, truth in pairs if truth and math.isfinite(value)]
    zeros = all(_close(value, truth, tolerance) for value, truth in pairs if not truth)
    if not zeros or len(ratios) < sum(truth != 0 for _, truth in pairs) or not ratios or not ratios[0]:
        return None
    return ratios[0] if all(_close(ratio, ratios[0], max(2 * tolerance, 1e-9)) for ratio in ratios) else None


def _times(ratio: float, tolerance: float = 1e-9) -> str:
    """A factor in words: `2 times`, `1/2 of`, `0.318 times`."""
    if not math.isfinite(ratio):
        return "more than any number of"
    exact = Fraction(ratio).limit_denominator(100)
    if exact and abs(float(exact) / ratio - 1) <= tolerance:
        if exact.denominator == 1:
            return f"{exact.numerator:,} times"
        return f"{exact.numerator:,}/{exact.denominator:,} of" if exact < 1 else f"{exact} times"
    return f"{ratio:.3g} times"


def _easy(values: Mapping[str, float]) -> float:
    """The size of the numbers: small ones are easier to check by hand."""
    return sum(math.log10(abs(value) + 1) for value in values.values())


def _number(value: float) -> str:
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.5g}"


def _close(a: float, b: float, tolerance: float) -> bool:
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-300)
