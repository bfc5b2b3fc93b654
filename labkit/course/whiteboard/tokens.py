"""The tokens of a formula: numbers, names, operators, each with its column; any other character is an error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

FUNCTIONS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"sqrt": (1, 1), "log": (1, 1), "log2": (1, 1), "ceil": (1, 1), "floor": (1, 1), "min": (2, 6), "max": (2, 6)}
)
"""The functions that may be called, with the least and the largest number of arguments."""
MOST_DIGITS, MOST_NUMBER = 24, 10.0**30
SPELLED: Mapping[str, str] = MappingProxyType(
    {"^": "**", "×": "*", "·": "*", "÷": "/", "−": "-", "α": "alpha", "β": "beta"}
)  # fmt: skip
TOKEN = re.compile(r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<name>[^\W\d]\w*)|(?P<op>\*\*|[-+*/^(),×·÷−])")
HINTS: Mapping[str, str] = MappingProxyType(
    {
        "=": "write the right-hand side alone",
        "%": "write 0.05 for 5%",
        ".": "write a number with a digit, such as 0.5",
        "[": "write ( and )", "{": "write ( and )", "'": "no words here", '"': "no words here",
    }
)  # fmt: skip


class NoFormula(ValueError):
    """Raised if what was typed is not a formula; `column` counts from 1."""

    def __init__(self, reason: str, column: int) -> None:
        super().__init__(f"column {column}: {reason}")
        self.column = column


class Token(NamedTuple):
    """A piece of the text: "number", "name", "op" or "end", as it was typed, and the column where it begins."""

    kind: str
    text: str
    column: int


def tokens(text: str) -> Iterator[Token]:
    """The tokens of a text. NoFormula for a character that no formula has."""
    place = 0
    while place < len(text):
        if text[place].isspace():
            place += 1
            continue
        match = TOKEN.match(text, place)
        if match is None:
            hint = HINTS.get(text[place], f"known are + - * / ^ ( ) and {', '.join(FUNCTIONS)}")
            raise NoFormula(f"{text[place]!r} is no part of a formula: {hint}", place + 1)
        word = match[0]
        if match.lastgroup == "number" and (len(word) > MOST_DIGITS or not float(word) <= MOST_NUMBER):
            raise NoFormula(f"a number has {MOST_DIGITS} digits at most and is no larger than 1e30", place + 1)
        yield Token(match.lastgroup or "", SPELLED.get(word, word) if match.lastgroup == "name" else word, place + 1)
        place = match.end()
