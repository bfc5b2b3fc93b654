"""The forms of the live pages as data: fields with their bounds, and the questions that they make.

Pure Python, as is all that it imports: the same file runs in a browser (labkit/course/export/live/live.js).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Field(NamedTuple):
    """One thing to fill in. `begin` is the value with which the page opens.

    kind     "number": a whole number or a decimal from `least` to `most`; "choice": one of `options`; "text": lines
    """

    name: str
    label: str
    begin: str
    kind: str = "number"
    options: tuple[str, ...] = ()
    least: float = 1
    most: float = 1e6
    whole: bool = True

    def read(self, text: str) -> str | float | int:
        """What a reader filled in. ValueError, with the bounds, for anything else."""
        if self.kind == "text":
            return text
        if self.kind == "choice":
            if text not in self.options:
                raise ValueError(f"{self.label}: one of {', '.join(self.options)}, got {text!r}")
            return text
        try:
            value = int(text.replace(",", "")) if self.whole else float(text.replace(",", ""))
        except ValueError:
            kind = "a whole number" if self.whole else "a number"
            raise ValueError(f"{self.label}: {kind}, such as {self.begin}; got {text!r}") from None
        if not self.least <= value <= self.most:
            raise ValueError(f"{self.label}: from {self.least:,g} to {self.most:,g}, got {text}")
        return value


class Form(NamedTuple):
    """A page: its name in addresses, its title, a sentence, what is to be filled in."""

    name: str
    title: str
    lead: str
    fields: tuple[Field, ...]

    def begin(self) -> dict[str, str]:
        """The values with which the page opens, by the names of the fields."""
        return {field.name: field.begin for field in self.fields}

    def read(self, values: Mapping[str, str]) -> dict[str, str | float | int]:
        """The values that a reader has filled in, and for the other fields those with which the page opens.

        ValueError for a value that its field does not take, and for a name that no field has."""
        names = [field.name for field in self.fields]
        if unknown := sorted(set(values) - set(names)):
            raise ValueError(f"{self.name} has no field {', '.join(unknown)}; its fields are {', '.join(names)}")
        return {field.name: field.read(str(values.get(field.name, field.begin)).strip()) for field in self.fields}
