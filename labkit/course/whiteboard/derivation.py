"""A derivation: a question, its symbols with units, and its truth, which is a law of the planner and not a text.

`law` computes the truth with the planner's own function; `answer` is the formula that one would write on a whiteboard.
A test holds the two against each other on random values, so neither can drift. `wrong` are formulas that people give,
with what they are in truth.
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
    """A symbol of a question: its name, what it means, its unit ("" for a plain number) and where values are drawn.

    Whole numbers, unless `whole` is False; a multiple of `step` and of the symbols in `multiple_of`; below `below`."""

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
        """A value, evenly on a logarithmic scale where the range is wide; `values` are those of symbols before it."""
        if self.below:
            return numbers.randint(int(self.low), int(values[self.below]) - 1)
        if self.high > 100 * max(self.low, 1e-300):
            found = math.exp(numbers.uniform(math.log(self.low), math.log(self.high)))
            size = 10.0 ** (math.floor(math.log10(found)) - 1)
            found = round(found / size) * size
        else:
            found = numbers.uniform(self.low, self.high)
        if not self.whole:
            return float(f"{found:.2g}")
        step = self.step * math.prod(int(values[name]) for name in self.multiple_of)
        return max(math.ceil(self.low / step), round(found / step)) * step


@dataclass(frozen=True)
class Wrong:
    """A formula that people give, and what it is in truth."""

    formula: str
    why: str


@dataclass(frozen=True)
class Derivation:
    """One question for the whiteboard.

    answer      the formula;  law   the planner's function;  source   that function's name, for a reader
    tolerance   how far a right formula may be off, as a share: 1e-9, or 0.01 where small terms are left out
    grows       symbols whose growth without end tells something;  at_one: those for which 1 does
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
        """Names of the symbols."""
        return tuple(each.name for each in self.symbols)

    @property
    def units(self) -> dict[str, str]:
        """Name -> unit."""
        return {each.name: each.unit for each in self.symbols}

    @property
    def along(self) -> str:
        """The symbol over which a picture tells most."""
        return (*self.grows, *self.at_one, *self.names)[0]

    def symbol(self, name: str) -> Symbol:
        """The symbol of this name. KeyError for one that is not there."""
        for each in self.symbols:
            if each.name == name:
                return each
        raise KeyError(f"{self.name} has no symbol {name!r}; there are {', '.join(self.names)}")

    @cached_property
    def formula(self) -> Formula:
        """The answer, read."""
        return parse(self.answer, self.names)

    def read(self, said: str) -> Formula:
        """A formula over the symbols. NoFormula, with the column, for what is none."""
        return parse(said, self.names)

    def draws(self, count: int, seed: int = 0) -> list[dict[str, float]]:
        """So many random points; the same for the same seed."""
        numbers = random.Random(f"{self.name} {seed}")
        found = []
        for _ in range(count):
            values: dict[str, float] = {}
            for symbol in sorted(self.symbols, key=lambda each: (bool(each.below), bool(each.multiple_of))):
                values[symbol.name] = symbol.draw(numbers, values)
            found.append({name: values[name] for name in self.names})
        return found
