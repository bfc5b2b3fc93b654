"""Compares a typed answer with the parts of a card: what it contains, in which words, and what is missing.

    judge(card, "2 (n-1)/n N bytes: for 440 MB on 8 GPUs that is 770 MB")
    {"claim": Judged(False, missing=("nothing", ...)), "law": Judged(True, evidence=("2 (n-1)/n N bytes",)), ...}

    law      a formula that the whiteboard's checker finds equal to one of the card's, symbols renamed or not
    number   a computed figure of the card, in any unit that fits, and what it was computed from
    costs    words of both sides of the trade-off
    others   enough of the words that carry the card's sentence, in neighbouring sentences; the claim comes first

Words that the question contains already do not count, nor what the text denies. This finds words and numbers, and does
not understand sentences: the right words in a wrong order are accepted, and a right answer in unusual words may not be.
So it only proposes a result, with the evidence, and the learner decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from labkit.course.cards.card import FORMULA, NAMED, PARTS, Card
from labkit.course.cards.figures import Figure
from labkit.course.interview.answer_words import Term, nearest, sentences, terms, weight
from labkit.course.interview.quantities import COUNT, Quantity, held_against, kind_of, quantities
from labkit.course.interview.spoken_formulas import Spoken, against, formulas, laws, names, nearly, question_of, size
from labkit.course.whiteboard.derivation import Derivation
from labkit.course.whiteboard.derivations import derivation
from labkit.course.whiteboard.formula_verdict import KINDS

ENOUGH, SIDE, LEAST, FIRST = 0.36, 0.15, 4.0, 2
"""The share of a part's words, by weight, that has to come, and of each side of a trade-off; how much a part must weigh
to be looked for at all; and how many sentences of an answer are its beginning, where the claim belongs."""
SIDES = re.compile(r";|\.\s|\bbut\b|\bagainst\b|\bwhile\b|\binstead\b|,\s+(?:and|so|since)\b")
"""Between the two sides of a trade-off."""
NEARLY = 0.6
"""A formula of a law that is larger than this share of the largest says as much as that."""
FIGURE, CODE, MOST_MISSING, LONGEST = 3.0, 3.0, 4, 20_000
"""What a figure and a piece of code weigh beside words; how much is named that is missing; characters of an answer."""

KNOWN_SIZE = (
    r"""(?:ModelShape\.preset\(["'][^"']+["']\)|case\(["'][^"']+["']\)(?:\.shape)?)\.(?:n_params|seq|batch|n_ranks)"""
)
"""The expression of a size that belongs to the setting of a card: a known model's parameters, a design case's batch."""


@dataclass(frozen=True)
class Judged:
    """The result for one point of the rubric. `reached` is a proposal, and None where words alone cannot decide.

    evidence   words of the answer that make the point;  missing   words, figures or formulas that it lacks
    remarks    what is nearly right, and why it does not count
    """

    reached: bool | None
    evidence: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Answer:
    """A typed answer, split into sentences, words and quantities once."""

    text: str

    @cached_property
    def sentences(self) -> list[str]:
        return sentences(self.text)

    @cached_property
    def terms(self) -> list[list[Term]]:
        return [terms(FORMULA.sub(lambda match: match[0].strip("`"), sentence)) for sentence in self.sentences]

    @cached_property
    def quantities(self) -> list[Quantity]:
        return quantities(self.text.replace("`", " "))

    @cached_property
    def compact(self) -> str:
        return _compact(self.text)


def judge(card: Card, typed: str) -> Mapping[str, Judged]:
    """The result for every part of the card, by name. ValueError for a text that is far too long."""
    if len(typed) > LONGEST:
        raise ValueError(f"an answer has {LONGEST:,} characters at most, this one has {len(typed):,}")
    answer, points = _Answer(typed), dict[str, Judged]()
    spoken = formulas(typed, _symbols(card)) if typed.strip() else []
    for part in card.parts():
        if part == "law" and _laws(card):
            points[part] = _law(card, spoken)
        elif part != "number":
            points[part] = _words(card, part, answer)
    if card.number:
        law = points.get("law")
        points["number"] = _number(card, answer, law is not None and bool(law.reached))
    return MappingProxyType({part: points[part] for part in PARTS if part in points})


# The law


def _laws(card: Card) -> list[str]:
    """The formulas of the card's law that its question does not contain already."""
    question = card.as_sentence(card.front)
    question_laws = {*laws(question), *(spoken.formula for spoken in formulas(question))}
    return [law for law in laws(card.as_sentence(card.law)) if law not in question_laws]


def _symbols(card: Card) -> list[str]:
    return [name for law in laws(card.as_sentence(card.law)) for name in names(law)]


def _law(card: Card, spoken: Sequence[Spoken]) -> Judged:
    """Reached if the text has the largest of the card's formulas, or the first if hardly smaller, or half of them by
    size; or the whiteboard's answer."""
    wanted = _laws(card)
    asked = derivation(card.derive) if card.derive else None
    passages = {law: passage for law in wanted if (passage := against(law, spoken))}
    if asked and not passages:
        bare_answer = _bare(asked.answer)
        passages = {bare_answer: passage} if (passage := against(bare_answer, spoken)) else {}
    evidence = tuple(
        _quote(passage.words) + f" ({passage.renamed})" * bool(passage.renamed) for passage in passages.values()
    )
    largest = max(size(law) for law in wanted)
    enough = bool(set(passages) - set(wanted)) or any(size(law) == largest for law in passages)
    enough = (
        enough
        or (wanted[0] in passages and size(wanted[0]) > NEARLY * largest)
        or 2 * sum(map(size, passages)) >= sum(map(size, wanted))
    )
    if enough and passages:
        return Judged(True, tuple(dict.fromkeys(evidence)))
    remarks = _near(
        asked, wanted, [formula for formula in spoken if not any(against(law, [formula]) for law in passages)]
    )
    missing = tuple(law for law in wanted if law not in passages)[:MOST_MISSING]
    denied = [f"{_quote(formula.words)} denies it" for formula in spoken if formula.denied and any(
        against(law, [formula._replace(denied=False)]) for law in wanted)]  # fmt: skip
    return Judged(False, evidence, missing, tuple(dict.fromkeys([*remarks, *denied])))


def _near(asked: Derivation | None, wanted: Sequence[str], spoken: Sequence[Spoken]) -> list[str]:
    """The whiteboard's sentence about a formula that is nearly the law."""
    for question in [*([asked] if asked else []), *map(question_of, wanted)]:
        if near := nearly(question, spoken):
            candidate, verdict = near
            reasons = " ".join(verdict.reasons[:2])
            return [f"{_quote(candidate.words)}, read as {candidate.formula}: {KINDS[verdict.kind]}. {reasons}"]
    return []


def _bare(formula: str) -> str:
    return formula.replace(" ", "")


# The number


def _number(card: Card, answer: _Answer, law: bool) -> Judged:
    """Reached if the text has a computed figure that the question does not tell, and one more thing it rests on."""
    figures = {name: card.figures[name] for name in dict.fromkeys(NAMED.findall(card.number))}
    question_quantities = quantities(card.as_sentence(card.front))
    given_figures = [figure for name in NAMED.findall(card.front) for figure in [card.figures[name]]]
    new = {name: figure for name, figure in figures.items() if not held_against(figure, question_quantities).met}
    results = {name: figure for name, figure in new.items() if not _typed(card, name)} or new
    if not results:
        return Judged(None, remarks=("the question tells its figures",))
    others = [*given_figures, *card.figures.values()]
    matches = {name: held_against(figure, answer.quantities, others) for name, figure in new.items()}
    met = {name: match.met for name, match in matches.items() if match.met}
    evidence = tuple(dict.fromkeys(_quote(words) for words in met.values()))
    remarks = tuple(dict.fromkeys(match.remark for match in matches.values() if match.remark))
    missing = tuple(f"{figure}" for name, figure in results.items() if name not in met)[:MOST_MISSING]
    basis = tuple(f"{figure}" for name, figure in new.items() if name not in met)[:MOST_MISSING]
    shared = _shared(card, "number", answer)
    sure = sum(name in met and _tells(figure) for name, figure in results.items())
    likely = sum(name in met for name in results) > 1 or shared >= ENOUGH
    if not any(name in met for name in results) or not (sure or likely):
        return Judged(False, evidence, missing, remarks)
    based = law or shared >= ENOUGH or (shared >= ENOUGH / 4 and (len(met) > 1 or len(new) == 1))
    if not (based or sure > 1):
        return Judged(False, evidence, basis, (*remarks, "say what the number is of, and what it is computed from"))
    return Judged(True, evidence, remarks=remarks)


def _typed(card: Card, name: str) -> bool:
    """True if a figure is an input of the question, such as 8 ranks or a known model's size, and not computed."""
    return bool(re.fullmatch(rf"\s*([-\d.e+*]+|{KNOWN_SIZE})\s*(->.*)?", card.numbers[name]))


def _tells(figure: Figure) -> bool:
    """True if a figure is unlikely to occur by chance: it has three significant digits, or two and a unit."""
    digits = len(f"{figure.value:.3g}".partition("e")[0].replace(".", "").strip("0"))
    return digits >= 3 or (digits == 2 and kind_of(figure) != COUNT)


# Words


def _shared(card: Card, part: str, answer: _Answer) -> float:
    """The share of a part's words, by weight, that stand anywhere in the answer."""
    wanted = _wanted(card, part)
    if not wanted:
        return 1.0
    stems = {term.stem for line in answer.terms for term in line}
    return sum(weight(stem) for stem in wanted if nearest(stem, stems)) / sum(map(weight, wanted))


def _wanted(card: Card, part: str) -> dict[str, list[Term]]:
    """The words of a part that its question does not contain, by stem."""
    asked = {term.stem for term in terms(card.as_sentence(card.front))}
    by_stem: dict[str, list[Term]] = {}
    for term in terms(NAMED.sub(" ", FORMULA.sub(" ", getattr(card, part)))):
        if term.stem not in asked:
            by_stem.setdefault(term.stem, []).append(term)
    return by_stem


def _code(card: Card, part: str) -> list[str]:
    """Pieces of code and formulas of a part that the question does not contain, without spaces."""
    asked = _compact(card.as_sentence(card.front))
    inside = [_compact(piece) for piece in re.findall(r"`([^`]*)`", card.as_sentence(getattr(card, part)))]
    return [piece for piece in dict.fromkeys(inside) if len(piece) > 2 and piece not in asked]


def _words(card: Card, part: str, answer: _Answer) -> Judged:
    """Reached if neighbouring sentences have enough of the words, figures and code of the part."""
    wanted, code = _wanted(card, part), _code(card, part)
    question_quantities = quantities(card.as_sentence(card.front))
    figures = [card.figures[name] for name in dict.fromkeys(NAMED.findall(getattr(card, part)))]
    figures = [figure for figure in figures if not held_against(figure, question_quantities).met]
    total = sum(map(weight, wanted)) + FIGURE * len(figures) + CODE * len(code)
    if total < LEAST:
        return Judged(None, remarks=("too few words of it are not in the question: judge it yourself",))
    room = len(sentences(getattr(card, part))) + 1
    best, window, hits = 0.0, range(0), set[str]()
    for start in range(len(answer.sentences)):
        for stop in range(start + 1, min(start + room, len(answer.sentences)) + 1):
            weights = _came(wanted, code, figures, answer, range(start, stop))
            share = sum(weights.values()) / total
            early = (
                part == "claim" and best >= ENOUGH and window.start < FIRST <= start
            )  # it came first: that is enough
            if share > best + 1e-9 and not early:
                best, window, hits = share, range(start, stop), set(weights)
    missing = [terms_[0].written for stem, terms_ in sorted(wanted.items(), key=lambda item: -weight(item[0]))
               if stem not in hits]  # fmt: skip
    missing = [*(f"{figure}" for figure in figures if f"{figure}" not in hits), *(c for c in code if c not in hits),
               *missing]  # fmt: skip
    evidence = (_quote(" ".join(answer.sentences[place] for place in window)),) if hits else ()
    if best < ENOUGH:
        return Judged(False, evidence if best >= ENOUGH / 2 else (), tuple(missing[:MOST_MISSING]))
    if part == "costs" and (lacking := _other_side(card, hits)):
        return Judged(False, evidence, lacking, ("that is one side of it: what is on the other?",))
    if part == "claim" and window.start >= FIRST:
        return Judged(False, evidence, remarks=("it is there, and it comes late: say the claim first",))
    return Judged(True, evidence)


def _other_side(card: Card, hits: set[str]) -> tuple[str, ...]:
    """Words of a side of the trade-off that the answer leaves out; () if none is, or the card names only one side."""
    asked = {term.stem for term in terms(card.as_sentence(card.front))}
    for side in SIDES.split(FORMULA.sub(" ", NAMED.sub(" ", card.costs)), maxsplit=1):
        wanted = {term.stem: term for term in terms(side) if term.stem not in asked}
        total = sum(map(weight, wanted))
        if total >= LEAST / 2 and sum(weight(stem) for stem in wanted if stem in hits) < SIDE * total:
            heaviest = sorted(wanted.values(), key=lambda term: -weight(term.stem))[:MOST_MISSING]
            return tuple(term.written for term in heaviest)
    return ()


def _came(
    wanted: Mapping[str, Sequence[Term]], code: Iterable[str], figures: Iterable[Figure], answer: _Answer, window: range
) -> dict[str, float]:
    """The words, code and figures of a part that stand in these sentences of the answer, each with its weight."""
    denials: dict[str, set[bool]] = {}
    for place in window:
        for term in answer.terms[place]:
            denials.setdefault(term.stem, set()).add(term.denied)
    text = " ".join(answer.sentences[place] for place in window)
    weights = {piece: CODE for piece in code if piece in _compact(text)}
    near = quantities(text.replace("`", " "))
    weights |= {f"{figure}": FIGURE for figure in figures if held_against(figure, near).met}
    for stem, uses in wanted.items():
        if (other := nearest(stem, denials)) and denials[other] & {term.denied for term in uses}:
            weights[stem] = weight(stem)
    return weights


def _compact(text: str) -> str:
    return re.sub(r"[\s*`]", "", text)


def _quote(text: str) -> str:
    words = " ".join(text.split())
    return f"“{words if len(words) <= 180 else words[:179].rstrip() + '…'}”"
