"""A small table as HTML for a notebook. As text it is in labkit/plan/text_columns.py."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Rows = Sequence[Sequence[str]]
"""The head, then the rows."""


def html_table(rows: Rows) -> str:
    """The rows as HTML."""
    names, *body = rows
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    cells = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f"<table><tr>{head}</tr>{''.join(cells)}</table>"
