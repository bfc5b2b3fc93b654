"""Columns of text: each as wide as its widest cell, from the side that was asked for."""

from __future__ import annotations

from labkit.plan.text_columns import in_columns


def test_each_column_is_as_wide_as_its_widest_cell_and_stands_at_its_side() -> None:
    """Would catch a head that is cut off, a column that begins at the wrong side, and spaces at the ends of lines."""
    rows = [("rank", "ms", "what"), ("0", "12.5", "waits"), ("10", "9", "")]
    assert in_columns(rows, left=(0, 2)) == ["rank    ms  what", "0     12.5  waits", "10       9"]
    assert in_columns(rows) == ["rank    ms   what", "   0  12.5  waits", "  10     9"]
