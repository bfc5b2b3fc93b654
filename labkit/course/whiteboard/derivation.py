"""A derivation: a question, its symbols with units, and its true answer, which is a law of the planner and not a text.

`law` computes the truth with the planner's own function; `answer` is the formula that one would write on a whiteboard.
A test compares the two on random values, so that neither can change alone. `wrong` are formulas that people often give,
each with what it really describes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from labkit.course.whiteboard.formula import Formula, parse

Values = Mapping[str, float]


@dataclass(frozen=True)
class Symbol:
    """A symbol of a question: its name, its meaning, its unit ("" for a plain number) and the range of its values.

    Values are whole numbers, unless `whole` is False; multiples of `step` and of the symbols in `multiple_of`; below
    the symbol `below`."""

    name: str
    means: str
    unit: str = ""
    low: float = 1
    high: float = 64
    whole: bool = True
    multiple_of: tuple[str, ...] = ()
    below: str = ""
    step: int = 1

    def draw(self, numbers: random.Random, values: Values) -> float:
        """A random value, on a logarithmic scale if the range is wide; `values` are those of the symbols before it."""
        if self.below:
            return numbers.randint(int(self.low), int(values[self.below]) - 1)
        if self.high > 100 * max(self.low, 1e-300):
            value = math.exp(numbers.uniform(math.log(self.low), math.log(self.high)))
            size = 10.0 ** (math.floor(math.log10(value)) - 1)
            value = round(value / size) * size
        else:
            value = numbers.uniform(self.low, self.high)
        if not self.whole:
            return float(f"{value:.2g}")
        step = self.step * math.prod(int(values[name]) for name in self.multiple_of)
        return max(math.ceil(self.low / step), round(value / step)) * step


@dataclass(frozen=True)
class Wrong:
    """A formula that people often give, and what it really describes."""

    formula: str
    why: str


@dataclass(frozen=True)
class Derivation:
    """One question for the whiteboard.

    answer      the formula;  law   the planner's function;  source   the name of that function
    tolerance   how far a right formula may be off, as a share: 1e-9, or 0.01 if small terms are left out
    grows       symbols for which the limit at infinity tells something;  at_one: those for which the value 1 does
    lab         the lab that measures it
    """

    name: str
    question: str
    symbols: tuple[Symbol, ...]
    unit: str
    answer: str
    law: Callable[[Values], float]
    source: str
    lab: str
    wrong: tuple[Wrong, ...] = ()
    tolerance: float = 1e-9
    grows: tuple[str, ...] = ()
    at_one: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the symbols."""
        return tuple(symbol.name for symbol in self.symbols)

    @property
    def units(self) -> dict[str, str]:
        """The unit of each symbol, by name."""
        return {symbol.name: symbol.unit for symbol in self.symbols}

    @property
    def along(self) -> str:
        """The symbol that is best to draw the formula over."""
        return (*self.grows, *self.at_one, *self.names)[0]

    def symbol(self, name: str) -> Symbol:
        """The symbol with this name. KeyError if there is none."""
        for entry in self.symbols:
            if entry.name == name:
                return entry
        raise KeyError(f"{self.name} has no symbol {name!r}; there are {', '.join(self.names)}")

    @cached_property
    def formula(self) -> Formula:
        """The answer as a parsed formula."""
        return parse(self.answer, self.names)

    def read(self, text: str) -> Formula:
        """Parse a formula over the symbols. NoFormula, with the column, if it is invalid."""
        return parse(text, self.names)

    def draws(self, count: int, seed: int = 0) -> list[dict[str, float]]:
        """`count` random points, the same for the same seed."""
        numbers = random.Random(f"{self.name} {seed}")
        points = []
        for _ in range(count):
            values: dict[str, float] = {}
            for symbol in sorted(self.symbols, key=lambda entry: (bool(entry.below), bool(entry.multiple_of))):
                values[symbol.name] = symbol.draw(numbers, values)
            points.append({name: values[name] for name in self.names})
        return points
