"""The words of a text that carry content, reduced to stems, each marked if its clause denies it.

    terms("Activations aren't redundant")      [Term("activation", ...), Term("copy", ..., denied=True)]

Inflections are cut off, words that mean the same in distributed training become one (answer_words.yaml), and a denial
reaches to the end of its clause. `nearest` also finds a word that is slightly misspelled.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from labkit.course.cards.deck import the_deck

WORD = re.compile(r"[A-Za-z][A-Za-z'’]*|\d+(?:[.,]\d+)*|[,;:.!?()]")
SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+")
REACH = 5
"""A denial covers at most this many content words."""
SUFFIXES = ("ations", "ation", "ings", "ing", "edly", "ions", "ion", "ed", "ers", "er", "es", "ly", "ments", "ment",
            "s", "e")  # fmt: skip
SPELLED, CLOSE = 6, 0.88
"""How many letters a word needs for a misspelling to be accepted, and how similar it must then be to the right one."""


class Term(NamedTuple):
    """A word with content: its stem, how it is written, and whether the clause denies it."""

    stem: str
    written: str
    denied: bool


def sentences(text: str) -> list[str]:
    """The sentences of a text; a semicolon and a new line end one, too."""
    return [sentence for sentence in SENTENCE.split(text.strip()) if sentence.strip()]


def terms(text: str) -> list[Term]:
    """The content words of a text, in order: no figures and no formulas, but number words."""
    known, carrying, reach = _known(), list[Term](), 0
    for match in WORD.finditer(_joined(text)):
        word = match[0].lower().replace("’", "'")
        if word in known["wrong"]:  # "2N is wrong" turns round what stands just before
            carrying = [*carrying[:-3], *(term._replace(denied=True) for term in carrying[-3:])]
        if word in ",;:.!?()" or word in known["end"]:
            reach = 0
        elif word in known["deny"] or word.endswith("n't"):
            reach = REACH
        elif word not in known["stop"]:
            carrying.append(Term(stem(word), match[0], reach > 0))
            reach -= 1
    return carrying


@cache
def stem(word: str) -> str:
    """The stem that a word shares with its inflections and with words that mean the same."""
    cut = _cut(word)
    return _known()["same"].get(cut, cut)


@cache
def weight(stem: str) -> float:
    """The weight of a stem in a comparison: the fewer cards of labkit's deck contain it, the larger."""
    seen, cards = _seen()
    return math.log((cards + 1) / (seen.get(stem, 0) + 1))


def nearest(stem: str, others: Iterable[str]) -> str:
    """The stem among `others` that equals this one or is a near spelling of it; "" if none is."""
    every = set(others)
    if stem in every:
        return stem
    long = [other for other in sorted(every) if len(other) >= SPELLED]
    if len(stem) < SPELLED or not long:
        return ""
    begins = [other for other in long if other.startswith(stem) or stem.startswith(other)]  # element, elementwise
    return (begins or [*difflib.get_close_matches(stem, long, 1, CLOSE), ""])[0]


def _cut(word: str) -> str:
    word = re.sub(r"(n't|'s|')$", "", word.lower())
    for suffix in SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= (3 if suffix in ("s", "e", "ed", "ing") else 4):
            word = word.removesuffix(suffix)
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "sl":  # cutt(ing)
        word = word[:-1]
    return word[:-1] if len(word) > 3 and word[-1] in "eiy" else word


@cache
def _known() -> Mapping[str, Any]:
    plain = yaml.safe_load((files("labkit.course.interview") / "answer_words.yaml").read_text(encoding="utf-8"))
    same = {_cut(word): _cut(group[0]) for group in reversed(plain["same"]) for word in group}
    written = [(re.compile(rf"\b(?:{'|'.join(sorted(map(re.escape, group[1:]), key=len, reverse=True))})\b", re.I),
                group[0]) for group in plain["compounds"]]  # fmt: skip
    lists = {name: frozenset(plain[name].split()) for name in ("stop", "deny", "wrong", "end")}
    return MappingProxyType({**lists, "same": MappingProxyType(same), "compounds": tuple(written)})


def _joined(text: str) -> str:
    for pattern, word in _known()["compounds"]:
        text = pattern.sub(word, text)
    return text


@cache
def _seen() -> tuple[Mapping[str, int], int]:
    """The number of cards of labkit's deck in which each stem stands, and the number of all its cards."""
    counts: Counter[str] = Counter()
    for card in the_deck():
        counts.update({term.stem for _, text in card.texts() for term in terms(re.sub(r"\{\w+\}", " ", text))})
    return MappingProxyType(counts), len(the_deck())
