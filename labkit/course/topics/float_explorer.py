"""How does a format store a number? Type one, or flip its bits, and see all formats side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping

import ipywidgets as widgets

from labkit.course.topics.float_picture import floats, number
from labkit.course.widgets.explorer import Explorer, in_a_row
from labkit.train.formats import FORMATS, Format
from labkit.view.svg import Picture

STYLES = ("danger", "warning", "info")
"""Button styles of sign, exponent and mantissa in JupyterLab's themes; gaps between the bits show the same."""


class FloatExplorer(Explorer):
    """A field for the number (`0.00012`, `2^-24`, `1 + 2^-9`, `inf`), a menu of formats, the bits of the chosen one.

    A click flips a bit; Tab goes from bit to bit, Space flips. `.value` is the number, `.picture` shows it in all
    formats. Invalid input is reported, and the last number stays. ValueError for a format not among `formats`."""

    def __init__(self, value: float = 0.00012, format: str = "bf16", formats: Mapping[str, Format] = FORMATS):
        if format not in formats:
            raise ValueError(f"format must be one of {', '.join(formats)}, got {format!r}")
        self.formats, self.value = dict(formats), float(value)
        self.field = widgets.Text(f"{value:.15g}", description="number", continuous_update=False)
        self.chosen = widgets.Dropdown(options=[*formats], value=format, description="bits of")
        longest = max(entry.n_bits for entry in formats.values())
        self.near, self.last = (  # shared layouts; the last bit of a field has a wider margin
            widgets.Layout(width="21px", padding="0", margin=margin) for margin in ("2px 1px", "2px 9px 2px 1px")
        )
        first = widgets.ToggleButton(layout=self.near)
        others = (widgets.ToggleButton(layout=self.near, style=first.style) for _ in range(longest - 1))
        self.bits = [first, *others]
        self.row = in_a_row([])
        self._drawn_text, self._drawn_code = self.field.value, ("", "")  # a code with the name of its format
        super().__init__([in_a_row([self.field, self.chosen]), self.row], [self.field, self.chosen, *self.bits])

    @property
    def format(self) -> Format:
        """The format whose bits are shown."""
        return self.formats[self.chosen.value]

    def drawn(self) -> Picture:
        """The number in all formats, after it was typed or a bit of it flipped; field and bits then show the same."""
        of, typed = self.format, self.field.value
        code = "".join(str(int(bit.value)) for bit in self.bits[: of.n_bits])
        if of.name == self._drawn_code[0] and code != self._drawn_code[1]:
            self.value = of.value(code)
        else:
            if typed != self._drawn_text:
                self._drawn_text = typed  # before it is read, so that nonsense is told once
                self.value = number(typed)
            lost = of.integer and math.isnan(self.value)
            self.note = f"{of.name} has no NaN: these are the bits of 0" * lost
            code = "0" * of.n_bits if lost else "".join(of.bits(self.value))
        for place, (bit, digit) in enumerate(zip(self.bits, code, strict=False)):
            bit.value, bit.description = digit == "1", digit
            field = 0 if place == 0 else 1 if place <= of.exponent_bits else 2
            bit.button_style, bit.tooltip = STYLES[field], f"{('sign', 'exponent', 'mantissa')[field]}, bit {place}"
            bit.layout = self.last if place in (0, of.exponent_bits) else self.near
        if len(self.row.children) != of.n_bits:
            self.row.children = self.bits[: of.n_bits]
        self.field.value = typed if _same(typed, self.value) else f"{self.value:.15g}"
        self._drawn_text, self._drawn_code = self.field.value, (of.name, code)
        return floats(self.value, tuple(self.formats.values()))


def _same(typed: str, value: float) -> bool:
    try:
        return number(typed) == value
    except ValueError:
        return False
