"""Named numbers that add up: what was predicted, item by item, and how far it is from what was measured.

    predicted = Breakdown([Item("parameters", 4 * n, "B", "4 N"), Item("optimizer", 8 * n, "B", "8 N", "m and v")])
    predicted.total                      12 N bytes
    predicted["optimizer"]               8 N, the number alone
    predicted.against(probe.peak)        a table: predicted, measured, how far

A number without its formula cannot be argued with; so an item carries the formula it came from and where that is
written. Nothing here knows what is counted: bytes of memory, seconds of a step and flops all break down the same way.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from labkit.plan.text_columns import in_columns

KINDS = ("parameters", "gradients", "optimizer", "activations", "other")
"""The purposes of memory: the names of a memory breakdown, in the order in which they are listed and drawn."""
MEASURED, REHEARSED = "measured", "rehearsed"
"""The origins of numbers beside a prediction: a real run, or one on simulated devices (labkit.rehearse)."""


@dataclass(frozen=True)
class Item:
    """One number: its name, value and unit ("B", "s", "flops"), the formula in words and where that is written."""

    name: str
    value: float
    unit: str = "B"
    formula: str = ""
    source: str = ""


@dataclass(frozen=True)
class Breakdown:
    """Items of one unit that add up to `total`. Frozen: it can be kept, sent from rank to rank and compared."""

    items: tuple[Item, ...]

    def __init__(self, items: Iterable[Item]) -> None:
        """Raises ValueError for two items of one name, items of different units, and a value that is not a number."""
        object.__setattr__(self, "items", tuple(items))
        names = self.keys()
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"a breakdown names each item once; {', '.join(twice)} stands there more than once")
        units = {item.unit for item in self.items}
        if len(units) > 1:
            raise ValueError(f"items of one breakdown add up, so they have one unit; got {', '.join(sorted(units))}")
        for item in self.items:
            if math.isnan(item.value):
                raise ValueError(f"{item.name} is not a number")

    @classmethod
    def of(cls, values: Mapping[str, float], unit: str = "B", source: str = "") -> Breakdown:
        """A breakdown of bare numbers, such as measurements, which have no formula."""
        return cls(Item(name, value, unit, "", source) for name, value in values.items())

    @property
    def total(self) -> float:
        """The sum of all items; 0 for none."""
        return sum(item.value for item in self.items)

    @property
    def unit(self) -> str:
        """The unit of all items; "" for none."""
        return self.items[0].unit if self.items else ""

    @property
    def origin(self) -> str:
        """The name of these numbers beside a prediction: REHEARSED if that is the source of all, otherwise MEASURED."""
        return REHEARSED if self.items and all(item.source == REHEARSED for item in self.items) else MEASURED

    def item(self, name: str) -> Item:
        """The item of this name, with formula and source. Raises KeyError that names the nearest."""
        for item in self.items:
            if item.name == name:
                return item
        near = difflib.get_close_matches(name, self.keys(), 1)
        raise KeyError(f"no item {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"there are {self.keys()}"))

    def __getitem__(self, name: str) -> float:
        return self.item(name).value

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.items)

    def keys(self) -> list[str]:
        """The names in order; with this, `dict(breakdown)` is {name: value}."""
        return [item.name for item in self.items]

    def against(self, measured: Breakdown | Mapping[str, float] | float) -> Comparison:
        """This prediction beside a measurement, name by name; a name that one side lacks counts as 0 there.

        A bare number is held against the total. Raises ValueError if the two have different units."""
        if isinstance(measured, int | float):
            return Comparison((ComparedItem("total", self.total, measured),), self.unit)
        unit = measured.unit if isinstance(measured, Breakdown) else self.unit
        if self.unit and unit and self.unit != unit:
            raise ValueError(f"the prediction is in {self.unit}, the measurement in {unit}: they cannot be compared")
        predicted, seen = dict(self), dict(measured)
        rows = [ComparedItem(name, predicted.get(name, 0), seen.get(name, 0)) for name in {**predicted, **seen}]
        return Comparison(
            tuple(rows), self.unit or unit, measured.origin if isinstance(measured, Breakdown) else MEASURED
        )

    def __repr__(self) -> str:
        rows = [*self.items, Item("total", self.total, self.unit)]
        wide = max(len(item.name) for item in rows)
        tall = max(len(_number(item.value)) for item in rows)
        return "\n".join(
            f"{item.name:<{wide}} {_number(item.value):>{tall}} {item.unit}  {_why(item)}".rstrip() for item in rows
        )


@dataclass(frozen=True)
class ComparedItem:
    """One name of a comparison, predicted beside measured."""

    name: str
    predicted: float
    measured: float

    @property
    def apart(self) -> float:
        """The error of the prediction as a share of the measurement: 0.02 is 2% too much, -0.02 too little.

        0 where both are 0, infinite where something was predicted and nothing measured."""
        if self.predicted == self.measured:
            return 0.0
        return math.copysign(math.inf, self.predicted) if not self.measured else self.predicted / self.measured - 1


@dataclass(frozen=True)
class Comparison:
    """A prediction beside its measurement, or its rehearsal (`origin`): `rows` name by name, and their `total`."""

    rows: tuple[ComparedItem, ...]
    unit: str = "B"
    origin: str = MEASURED

    def __getitem__(self, name: str) -> ComparedItem:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no row {name!r}; there are {[row.name for row in self.rows]}")

    @property
    def total(self) -> ComparedItem:
        """The two sums."""
        return ComparedItem("total", sum(row.predicted for row in self.rows), sum(row.measured for row in self.rows))

    @property
    def worst(self) -> ComparedItem:
        """The row whose difference is largest in units, not in percent: that is the one that explains the total."""
        return max(self.rows, key=lambda row: abs(row.predicted - row.measured), default=self.total)

    def __repr__(self) -> str:
        table = [("", "predicted", self.origin, "apart")]
        for row in (*self.rows, self.total):
            apart = "exact" if row.apart == 0 else f"{100 * row.apart:+.3g}%"
            table.append((row.name, _number(row.predicted), _number(row.measured), apart))
        return "\n".join([*in_columns(table, left=(0,)), f"all in {self.unit}"])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value, 0) or abs(value) >= 1e6 else f"{value:,.6g}"


def _why(item: Item) -> str:
    return f"= {item.formula}" * bool(item.formula) + f"  [{item.source}]" * bool(item.source)
