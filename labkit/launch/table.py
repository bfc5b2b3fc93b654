"""A small table, as text for a terminal and as HTML for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Rows = Sequence[Sequence[str]]
"""The head, then the rows."""


def text_table(rows: Rows, numbers: Sequence[int] = ()) -> str:
    """The columns below each other; those in `numbers` end at the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(n) if i in numbers else cell.ljust(n)
            for i, (cell, n) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, rows))


def html_table(rows: Rows) -> str:
    """The same as HTML."""
    names, *body = rows
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    cells = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f"<table><tr>{head}</tr>{''.join(cells)}</table>"
