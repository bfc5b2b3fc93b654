"""A table for a terminal in which every word is whole: where its columns do not fit, some are left out if the table
says which, or else it is turned or told by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table

AMPLE = 100_000
"""A width, in letters, that no table needs: at it, a table and its cells are asked how narrow they can be."""


class TerminalTable(Table):
    """rich's table, whose columns are never narrower than their longest word.

    rich itself makes the widest columns narrower until all fit, and cuts what is then too long. Here each column has
    room for its words first; what is left goes to those that need least more to stand in one line. If even the words do
    not fit, columns of the names in `dispensable` are left out, the first ones first and as few as will do, and a line
    below names them. If that is not enough, rows and columns change places; and if that is too wide, each row is told
    in a few lines."""

    def __init__(self, *headers: Column | str, dispensable: Sequence[str] = (), **options: Any) -> None:
        """A table without rows; `options` are those of rich's table."""
        super().__init__(*headers, **options)
        self.dispensable = tuple(dispensable)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, or what takes its place where the terminal is narrow."""
        ample = options.update(width=AMPLE)
        needs = [_need(console, ample, column) for column in self.columns]
        least = [need.minimum for need in needs]
        frame = Measurement.get(console, ample, self).maximum - sum(need.maximum for need in needs)
        spare = options.max_width - frame - sum(least)
        if spare < 0:
            present = [name for name in self.dispensable if any(name == column.header for column in self.columns)]
            for count in range(1, len(present) + 1):
                shorter = self._without(present[:count])
                if Measurement.get(console, ample, shorter).minimum <= options.max_width:
                    yield shorter
                    yield f"[dim]{options.max_width} columns have no room for: {', '.join(present[:count])}[/dim]"
                    return
            turned = self._turned()
            fits = Measurement.get(console, ample, turned).maximum <= options.max_width
            yield from filter(None, (self.title, turned if fits else self._row_by_row(), self.caption))
            return
        by_span = sorted(range(len(needs)), key=lambda place: needs[place].span)
        for count, place in enumerate(by_span):
            extra = min(needs[place].span, spare // (len(by_span) - count))
            self.columns[place].width = least[place] + extra
            spare -= extra
        yield from super().__rich_console__(console, options)
        for column in self.columns:
            column.width = None  # another terminal may be wider

    def _without(self, names: Sequence[str]) -> TerminalTable:
        """The same without these columns."""
        table = TerminalTable(box=self.box, padding=self.padding, pad_edge=self.pad_edge, title=self.title)
        kept = [column for column in self.columns if column.header not in names]
        for column in kept:
            table.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap)
        for cells in zip(*(column.cells for column in kept), strict=True):
            table.add_row(*cells)
        table.caption = self.caption
        return table

    def _turned(self) -> Table:
        """The same with a row for each column, and a column for each row."""
        table = Table(box=self.box)
        for name, *cells in ((column.header, *column.cells) for column in self.columns):
            if table.columns:
                table.add_row(name, *cells)
                continue
            table.add_column(name)
            for cell in cells:
                table.add_column(cell, justify="right")
        return table

    def _row_by_row(self) -> Group:
        """Each row as a heading, its first cell, and a line for each other cell that has something in it."""
        names = [column.header for column in self.columns]
        parts = list[RenderableType]()
        for heading, *cells in zip(*(column.cells for column in self.columns), strict=True):
            lines = Table.grid(padding=(0, 2))
            for name, cell in zip(names[1:], cells, strict=True):
                if cell:
                    lines.add_row(name, cell)
            parts += [f"{names[0]} {heading}".strip(), Padding(lines, (0, 0, 0, 2))]
        return Group(*parts)


def _need(console: Console, options: ConsoleOptions, column: Column) -> Measurement:
    """The least and the greatest width that a column can use; if it does not wrap, both are the same."""
    sizes = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
    most = max(size.maximum for size in sizes)
    return Measurement(most if column.no_wrap else max(size.minimum for size in sizes), most)
