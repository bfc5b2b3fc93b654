"""A table as lines of text, for a `repr`, a pipe or a file; the command line's own tables are drawn by rich.

in_columns([("rank", "ms"), ("0", "12.5"), ("10", "9")], left=(0,))

rank    ms
0     12.5
10       9
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def in_columns(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """The rows as lines, each column as wide as its widest cell; those whose numbers are in `left` begin at the left,
    all others end at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        sized = enumerate(zip(row, widths, strict=True))
        cells = (cell.ljust(width) if place in left else cell.rjust(width) for place, (cell, width) in sized)
        lines.append("  ".join(cells).rstrip())
    return lines
