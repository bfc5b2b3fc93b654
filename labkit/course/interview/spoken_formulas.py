"""Finds formulas in running text, writes them out for the whiteboard's reader, and compares them with a law.

    "each sends 2 (n-1)/n times N bytes"     ->  Spoken("2*(n-1)/n*N", words "2 (n-1)/n times N", denied=False)
    against("2 (n-1)/n D", spoken)           ->  StatedLaw: right, "with N for D"

This file finds where a formula begins and ends, and writes out what people leave out or say in words: the sign of
multiplication, "over", "squared", "sixteen bytes a parameter". labkit/course/whiteboard reads and checks the formulas.
Symbols may have other names than the card's, one for one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

from labkit.course.interview.quantities import DENIED, REFUSED, WORDS
from labkit.course.whiteboard.derivation import Derivation, Symbol
from labkit.course.whiteboard.formula import Formula, parse
from labkit.course.whiteboard.formula_verdict import FormulaVerdict, check
from labkit.course.whiteboard.tokens import FUNCTIONS, SPELLED, NoFormula, tokens

GREEK = ("alpha", "beta", "gamma", "eps", "lr")
SIZES = frozenset({"N", "P", "D", "M", "S", "Psi", "psi", "Ψ", "Phi", "Φ"})
"""Letters for the size of a model or a tensor: any of them may stand for another."""
SAID = tuple(
    (re.compile(pattern, re.IGNORECASE), put)
    for pattern, put in (
        (rf"\b({'|'.join(sorted(WORDS, key=len, reverse=True))})\b", lambda match: WORDS[match[0].lower()]),
        (r"\b(?:bytes?|flops?)\s*(?:/|a|an|per|for each|for every)\s*(?:parameters?|params?|weights?)\b", " N "),
        (r"[⋅∗•]", " * "),
        (r"\btwice\b|\bdouble\b", " 2 * "),
        (r"\b(?:multiplied by|times)\b", " * "),
        (r"\b(?:divided by|over)\b", " / "),
        (r"\bplus\b", " + "),
        (r"\bminus\b", " - "),
        (r"\bsquared\b|²", "^2 "),
        (r"\bcubed\b|³", "^3 "),
        (r"\bto the (?:power of\s*)?(?=[\d(-])", "^"),
        (r"\b(?:the )?(?:square )?root of\s*(\w+)", r"sqrt(\1)"),
        (r"√\s*(\w+)", r"sqrt(\1)"),
        (r"√\s*(?=\()", "sqrt"),
        (r"\blog_2\b|\blog2\b|\blog base 2(?: of)?|\blog₂", "log2"),
        (r"\b(log2|log|sqrt)\s*(?=[a-z]\b)([a-z])", r"\1(\2)"),
        (r"(?<=\d)\s+x\s+(?=\d)", " * "),
    )
)
"""Spoken forms, and the formula that each stands for."""
SIDES = re.compile(r"<=|>=|≤|≥|≈|~|=|<|>|:|;|`")
PIECE = re.compile(
    r"(?P<value>\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+)|(?P<name>[^\W\d]\w*)|(?P<op>\*\*|[-+*/^×·÷−(),])|(?P<gap>\s+)|(?P<else>.)"
)


class Spoken(NamedTuple):
    """A formula in a text: as the whiteboard reads it, the words it was found in, and whether the text denies it."""

    formula: str
    words: str
    denied: bool


class StatedLaw(NamedTuple):
    """A law that a text states: the words, and which symbols have other names, `N for D`."""

    words: str
    renamed: str


def formulas(typed: str, symbols: Sequence[str] = ()) -> list[Spoken]:
    """Every formula of a text; `symbols` are names of more than one letter that may stand in one."""
    spoken = list[Spoken]()
    for clause in re.split(r"(?<=[.!?;])\s+|\n+", typed):
        written = clause
        for pattern, put in SAID:
            written = pattern.sub(put, written)
        for side in _sides(written):
            sums = list[str]()
            for before, run, after in _runs(side, symbols):
                denied = bool(DENIED.search(before) or REFUSED.match(after))
                spoken += [Spoken(text, clause.strip(), denied) for text in [_explicit(run)] if text]
                sums = [*sums, run] if sums and run.lstrip().startswith("+") else [run]
                if len(sums) > 1 and (text := _explicit(" ".join(sums))):  # 2 N of weights + 2 N of gradients
                    spoken.append(Spoken(text, clause.strip(), denied))
    return list(dict.fromkeys(spoken))


def laws(text: str) -> list[str]:
    """The formulas in backticks in a card's law, ready to be parsed; a name alone is not a formula."""
    written_out = []
    for inside in re.findall(r"`([^`]*)`", text):
        written = re.sub(r"(?<=\d)\s+x\s+(?=\d)", " * ", inside)
        sides = [side.strip() for side in SIDES.split(written)]
        if len(sides) > 1 and re.fullmatch(r"\w*(\(\w+\))?", sides[0]):  # t(b) = ...
            sides = sides[1:]
        written_out += [text for side in sides if (text := _explicit(_calls(side)))]
    return list(dict.fromkeys(written_out))


def names(formula: str) -> list[str]:
    """The symbols of a formula, in order."""
    return list(dict.fromkeys(token.text for token in tokens(formula)
                              if token.kind == "name" and token.text not in FUNCTIONS))  # fmt: skip


def size(formula: str) -> int:
    """The number of symbols and operators in a formula."""
    return sum(token.kind == "name" or token.text in ("+", "-", "*", "/", "**", "^") for token in tokens(formula))


def against(law: str, spoken: Sequence[Spoken]) -> StatedLaw | None:
    """The first formula of a text that equals the law, where its symbols may have other names; None if none does."""
    for candidate in spoken:
        if candidate.denied:
            continue
        for renamed, text in _renamed(law, candidate.formula):
            if _equal(law, text):
                return StatedLaw(candidate.words, renamed)
    return None


def nearly(asked: Derivation, spoken: Sequence[Spoken]) -> tuple[Spoken, FormulaVerdict] | None:
    """The first formula in the law's own symbols that is right up to a factor or in a limit, with its verdict."""
    for candidate in spoken:
        if candidate.denied or not names(candidate.formula):
            continue
        try:
            verdict = check(asked, candidate.formula)
        except NoFormula:
            continue
        if verdict.kind in ("factor", "limit"):
            return candidate, verdict
    return None


def question_of(law: str) -> Derivation:
    """A card's law as a derivation, so that the whiteboard can check an answer against it."""
    symbols = tuple(Symbol(name, name, "", 2, 64) for name in names(law))
    formula = parse(law, [symbol.name for symbol in symbols])
    under = tuple(
        name for name in names(law) if re.search(rf"/\(?[^()]*\b{name}\b", law)
    )  # symbols below a fraction line, whose limits tell something
    return Derivation(f"law {law}", "", symbols, "", law, formula.number, "the card", "", grows=under, at_one=under)


def _equal(law: str, text: str) -> bool:
    """True if the whiteboard finds both formulas equal."""
    known = names(law)
    try:
        formula, truth = parse(text, known), parse(law, known)
    except NoFormula:
        return False
    if not known:
        return _same(formula, truth, {})
    asked = question_of(law)
    if not all(_same(formula, truth, values) for values in asked.draws(3, 1)):  # cheap numbers first, then slow algebra
        return False
    return check(asked, text).right


def _same(formula: Formula, truth: Formula, values: dict[str, float]) -> bool:
    return math.isclose(formula.number(values), truth.number(values), rel_tol=1e-9)


def _renamed(law: str, text: str) -> Iterator[tuple[str, str]]:
    """The text with the law's names for its symbols, in every plausible way: (which name for which, text)."""
    symbols, truth = names(text), names(law)
    strange, free = [name for name in symbols if name not in truth], [name for name in truth if name not in symbols]
    if not strange:
        yield "", text
        return
    if len(strange) != len(free) or len(strange) > 3:
        return
    plain = size(law) < 4  # `16 N` says little but its number
    for order in permutations(free):
        pairs = list(zip(strange, order, strict=True))
        if plain and not all(a.lower() == b.lower() or {a, b} <= SIZES for a, b in pairs):
            continue
        put = dict(pairs)
        words = " ".join(put.get(token.text, token.text) for token in tokens(text))
        yield ", ".join(f"{a} for {b}" for a, b in pairs), words


def _sides(written: str) -> list[str]:
    """The parts between signs of equality and the like."""
    return [side for side in SIDES.split(written) if side.strip()]


def _runs(side: str, symbols: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """The longest stretches of a text that can be parts of formulas: (text before, stretch, text after)."""
    start, end = -1, 0
    for match in PIECE.finditer(side):
        fits = match.lastgroup in ("value", "op") or (match.lastgroup == "name" and _a_symbol(match, side, symbols))
        if match.lastgroup == "gap":
            continue
        if fits:
            start = match.start() if start < 0 else start
            end = match.end()
        elif start >= 0:
            yield side[:start], side[start:end], side[end:]
            start = -1
    if start >= 0:
        yield side[:start], side[start:end], side[end:]


def _a_symbol(match: re.Match[str], side: str, symbols: Sequence[str]) -> bool:
    word = match[0]
    if word in FUNCTIONS or word in symbols or word in GREEK or "_" in word:
        return True
    if len(word) > 1:
        return word in SPELLED or word in ("Psi", "Phi", "dp", "tp", "pp")
    if word not in ("a", "I", "s"):
        return True
    beside = side[: match.start()].rstrip()[-1:] + side[match.end() :].lstrip()[:1]
    return bool(set(beside) & set("*/^+-("))  # the letter is a symbol next to an operator, else the article


def _explicit(run: str) -> str:
    """A stretch with every sign of multiplication written out, as the whiteboard needs it; "" if it is no formula."""
    run = re.sub(r",(?=\d{3}\b)", "", run)
    try:
        pieces = [token.text for token in tokens(_calls(run)) if token.kind != "end"]
    except NoFormula:
        return ""
    while pieces and pieces[0] in ("+", "*", "/", "^", "**", ")", ",", "×", "·", "÷"):
        pieces = pieces[1:]
    while pieces and (pieces[-1] in ("+", "-", "−", "*", "/", "^", "**", "(", ",", "×", "·", "÷")):
        pieces = pieces[:-1]
    pieces = _balanced(pieces)
    words = ""
    for before, piece in zip(["", *pieces], pieces, strict=False):
        ends = before not in FUNCTIONS and (before == ")" or bool(re.match(r"[\w.]", before)))
        begins = piece == "(" or bool(re.match(r"[\w.]", piece))
        words += f"*{piece}" if ends and begins else piece
    try:
        known = names(words)
        parse(words, known)
    except NoFormula:
        return ""
    return words if size(words) >= 2 or (size(words) and re.search(r"\d", words)) else ""


def _calls(text: str) -> str:
    """The text with brackets round arguments: `log2 n` becomes `log2(n)`."""
    return re.sub(r"\b(log2|log|sqrt|ceil)\s+([A-Za-z]\w*)\b(?!\()", r"\1(\2)", text)


def _balanced(pieces: list[str]) -> list[str]:
    """The pieces without brackets that have no partner."""
    opened, lost = list[int](), set[int]()
    for place, piece in enumerate(pieces):
        if piece == "(":
            opened.append(place)
        elif piece == ")":
            if opened:
                opened.pop()
            else:
                lost.add(place)
    return [piece for place, piece in enumerate(pieces) if place not in lost | set(opened)]
