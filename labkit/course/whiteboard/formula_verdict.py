"""A formula against the truth: right; right up to a factor; right in one limit and wrong in another; the wrong unit.

numbers    both at random points, the truth by the planner's own function: the first point where they part
units      of what is wrong: is it even in the right ones?
algebra    a constant factor, a term that is missing, where both tend to
people     a formula that is known to be given, and what that one is in truth
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
"""Random points; and a number that stands for "without end"."""


@dataclass(frozen=True)
class Verdict:
    """`kind` is one of KINDS; `said` are its reasons, a sentence each. Where the formula differs: `at` the values of
    the symbols, `mine` and `truth` there."""

    kind: str
    said: tuple[str, ...]
    at: Mapping[str, float] = field(default_factory=dict)
    mine: float = math.nan
    truth: float = math.nan

    @property
    def right(self) -> bool:
        """Whether nothing is wrong."""
        return self.kind == "right"

    def __str__(self) -> str:
        return f"{KINDS[self.kind]}. " + " ".join(self.said)


def check(asked: Derivation, said: str, seed: int = 0) -> Verdict:
    """Hold what was typed against the truth. NoFormula, with the column, for what is no formula."""
    formula = asked.read(said)
    draws = asked.draws(POINTS, seed)
    pairs = [(formula.number(values), float(asked.law(values))) for values in draws]
    parts = [k for k, (mine, truth) in enumerate(pairs) if not _close(mine, truth, asked.tolerance)]
    if not parts:
        proved = algebra.same(formula, asked.formula) and formula.text != asked.answer
        way = "and algebra says the same of all values" if proved else f"at {POINTS} random points"
        return Verdict("right", (f"As {asked.source} has it, {way}; lab {asked.lab} measures it.",))
    k = min(parts, key=lambda each: (_close(*pairs[each], 0.01), _easy(draws[each])))  # seen in the first digits
    kind, why = _kind(asked, formula, pairs, draws[k])
    return Verdict(kind, (_where(asked, draws[k], *pairs[k]), *why), draws[k], *pairs[k])


def _kind(
    asked: Derivation, formula: Formula, pairs: Sequence[tuple[float, float]], at: Mapping[str, float]
) -> tuple[str, list[str]]:
    """What is wrong with it, and the sentences that say so."""
    known = next((f"That is {each.why}." for each in asked.wrong if _equal(asked, formula, each.formula)), "")
    people = [known] if known else []
    try:
        here = unit(formula, asked.units)
    except NoUnit as error:
        return "unit", [f"{str(error)[0].upper()}{str(error)[1:]}.", *people]
    wanted = unit(asked.formula, asked.units)
    if here != wanted:
        told = f"By its symbols it is in {unit_text(here)}, and the answer in {unit_text(wanted)}."
        return "unit", [told, *people]
    ratio = _constant_ratio(pairs, asked.tolerance)
    if ratio is not None:
        return "factor", [f"It is {_times(ratio, asked.tolerance)} the truth everywhere.", *people]
    term = algebra.missing(formula, asked.formula)
    more = [f"What lacks is one term: {term}."] if term else []
    ends = [(symbol, FAR, f"{symbol} -> oo") for symbol in asked.grows]
    ends += [(symbol, 1, f"{symbol} = 1") for symbol in asked.at_one]
    good, sentences = list[bool](), list[str]()
    for symbol, value, words in ends:
        same, sentence = _at_end(asked, formula, {**at, symbol: value}, symbol, value == FAR)
        good.append(same)
        sentences.append(f"For {words} {sentence}.")
    kind = "limit" if any(good) and not all(good) else "wrong"
    return kind, [*people, *more, *sentences]


def _at_end(
    asked: Derivation, formula: Formula, at: Mapping[str, float], symbol: str, endless: bool
) -> tuple[bool, str]:
    """Whether both agree at this end, and the words for it."""
    exact = {name: Fraction(value) for name, value in at.items()}
    mine, truth = formula.number(exact), asked.formula.number(exact)
    same = _close(mine, truth, 1e-6 if endless else asked.tolerance)
    if math.isnan(mine):
        return False, "yours has no value"
    tends = (algebra.tends_to(formula, symbol), algebra.tends_to(asked.formula, symbol)) if endless else ("", "")
    if all(tends):
        both = "both have no end" if tends[1] == "no end" else f"both tend to {tends[1]}"
        if tends[0] != tends[1]:
            each = [f"has {word}" if word == "no end" else f"tends to {word}" for word in tends]
            return False, f"yours {each[0]}, the truth {each[1]}"
        return same, both if same or not truth else f"{both}, and yours is {_times(mine / truth)} the truth"
    if same:
        return True, "both agree"
    if endless:
        return False, f"yours is {_times(mine / truth)} the truth, at 10^9" if truth else "the truth is 0, yours not"
    return False, f"yours is {_number(mine)}, the truth {_number(truth)}"


def _where(asked: Derivation, at: Mapping[str, float], mine: float, truth: float) -> str:
    values = ", ".join(f"{name} = {_number(value)}" for name, value in at.items())
    unit_said = f" {asked.unit}" if asked.unit else ""
    has = "has no value" if math.isnan(mine) else f"gives {_number(mine)}{unit_said}"
    return f"At {values} yours {has}, the truth is {_number(truth)}{unit_said}."


def _equal(asked: Derivation, formula: Formula, other: str) -> bool:
    """Whether a formula is this known one, by numbers."""
    known = asked.read(other)
    draws = asked.draws(POINTS, seed=1)
    return all(_close(formula.number(values), known.number(values), 1e-9) for values in draws)


def _constant_ratio(pairs: Sequence[tuple[float, float]], tolerance: float) -> float | None:
    """mine / truth, if that is the same everywhere; None if not, or if there is no such number."""
    ratios = [mine / truth for mine, truth in pairs if truth and math.isfinite(mine)]
    zeros = all(_close(mine, truth, tolerance) for mine, truth in pairs if not truth)
    if not zeros or len(ratios) < sum(truth != 0 for _, truth in pairs) or not ratios or not ratios[0]:
        return None
    return ratios[0] if all(_close(each, ratios[0], max(2 * tolerance, 1e-9)) for each in ratios) else None


def _times(ratio: float, tolerance: float = 1e-9) -> str:
    """`2 times`, `1/2 of`, `0.318 times`."""
    if not math.isfinite(ratio):
        return "more than any number of"
    exact = Fraction(ratio).limit_denominator(100)
    if exact and abs(float(exact) / ratio - 1) <= tolerance:
        if exact.denominator == 1:
            return f"{exact.numerator:,} times"
        return f"{exact.numerator:,}/{exact.denominator:,} of" if exact < 1 else f"{exact} times"
    return f"{ratio:.3g} times"


def _easy(values: Mapping[str, float]) -> float:
    """Small numbers are the easy ones to check by hand."""
    return sum(math.log10(abs(each) + 1) for each in values.values())


def _number(value: float) -> str:
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.5g}"


def _close(a: float, b: float, tolerance: float) -> bool:
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-300)
