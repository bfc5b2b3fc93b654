"""Pictures put together from panels, in rows and columns, so that nobody has to work out where each of them stands.

    below(phrase("links", bold=True), rule(300), beside(tile(12, 12, PALETTE[0]), phrase("kept"), gap=5))

    links                 a phrase: a line of words
    ------------------    a rule
    [] kept               a tile and a phrase, beside each other

A panel knows the room that it takes, that of words by the estimate of `svg.width_of`, and is drawn when its place is
known. What has to meet across panels, such as arrows and axes, is drawn by `labkit.view.svg` itself.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from labkit.view.svg import INK, WIDTH, Picture, box, headline, line, text, width_of

MARGIN, HEAD = 4.0, 33.0
"""Units of the page that stay free beside panels, and those that a title takes above them."""
PROSE = 0.9
"""So many times as wide as `width_of` says are the letters of sentences: narrower than those of numbers and names."""


@dataclass(frozen=True)
class Panel:
    """A part of a picture: its width, its height, and `draw(x, y)`, its elements with their upper left corner there."""

    width: float
    height: float
    draw: Callable[[float, float], str]

    def padded(self, left: float = 0.0, top: float = 0.0, right: float = 0.0, bottom: float = 0.0) -> Panel:
        """This panel with free room around it."""
        wide, high = self.width + left + right, self.height + top + bottom
        return Panel(wide, high, lambda x, y: self.draw(x + left, y + top))

    def told(self, words: str) -> Panel:
        """This panel, which shows `words` while the pointer rests on it."""
        title = f"<title>{escape(words)}</title>"
        return Panel(self.width, self.height, lambda x, y: f"<g>{title}{self.draw(x, y)}</g>")

    def dark(self) -> Panel:
        """This panel with dark letters, which can be read on a coloured ground."""
        return Panel(self.width, self.height, lambda x, y: f'<g fill="{INK}">{self.draw(x, y)}</g>')


def space(width: float, height: float) -> Panel:
    """Room in which nothing is drawn."""
    return Panel(width, height, lambda x, y: "")


def phrase(words: object, size: float = 13, bold: bool = False, anchor: str = "start", width: float = 0.0) -> Panel:
    """One line of words: as wide as they are, or of this `width`, in which `anchor` ("start", "middle", "end") says
    where they stand."""
    wide = width or width_of(words, size, bold)
    x0 = _free(anchor, wide)
    if words == "":
        return space(wide, 1.4 * size)
    return Panel(wide, 1.4 * size, lambda x, y: text(x + x0, y + 1.05 * size, words, anchor, size, bold))


def paragraph(
    words: str, width: float = WIDTH - 2 * MARGIN, size: float = 13, bold: bool = False, anchor: str = "start",
    most: int | None = None,
) -> Panel:  # fmt: skip
    """Words in as many lines of this width as they need, or in at most `most`, the last of which then ends in "…"."""
    letters = int(width / (PROSE * width_of("m", size, bold)))
    rows = textwrap.wrap(words, letters, max_lines=most, placeholder=" …", break_on_hyphens=False)
    return below(*(phrase(row, size, bold, anchor, width) for row in rows))


def tile(
    width: float, height: float, fill: str = "none", words: object = "", hover: str = "", edge: float = 1.0
) -> Panel:
    """A box with words in its middle, as `svg.box` draws it."""
    return Panel(width, height, lambda x, y: box(x, y, width, height, fill, words, hover, edge))


def rule(width: float = WIDTH - 2 * MARGIN, stroke: float = 1.0, dash: str = "") -> Panel:
    """A line across."""
    return Panel(width, 1.0, lambda x, y: line(x, y + 0.5, x + width, y + 0.5, dash, stroke))


def sample(width: float, stroke: float = 1.0, dash: str = "", colour: str = "currentColor") -> Panel:
    """A short line as it is drawn elsewhere in the picture, for a legend."""
    return Panel(width, 12.0, lambda x, y: line(x, y + 6, x + width, y + 6, dash, stroke, colour))


def below(*panels: Panel, gap: float = 0.0) -> Panel:
    """Panels below one another, all with the same left edge."""

    def draw(x: float, y: float) -> str:
        out = []
        for panel in panels:
            out.append(panel.draw(x, y))
            y += panel.height + gap
        return "".join(out)

    high = sum(panel.height for panel in panels) + gap * max(0, len(panels) - 1)
    return Panel(max((panel.width for panel in panels), default=0.0), high, draw)


def beside(*panels: Panel, gap: float = 0.0, top: bool = False) -> Panel:
    """Panels beside one another, with their middles at one height, or their upper edges (`top`)."""
    high = max((panel.height for panel in panels), default=0.0)

    def draw(x: float, y: float) -> str:
        out = []
        for panel in panels:
            out.append(panel.draw(x, y if top else y + (high - panel.height) / 2))
            x += panel.width + gap
        return "".join(out)

    return Panel(sum(panel.width for panel in panels) + gap * max(0, len(panels) - 1), high, draw)


def over(*panels: Panel) -> Panel:
    """Panels with one upper left corner, the first of them behind the others."""
    wide, high = (max(getattr(panel, side) for panel in panels) for side in ("width", "height"))
    return Panel(wide, high, lambda x, y: "".join(panel.draw(x, y) for panel in panels))


def legend(keys: Mapping[str, str], gap: float = 17.0, size: float = 12) -> Panel:
    """A row of words with a small box of their colours."""
    swatches = (beside(tile(12, 12, fill), phrase(words, size), gap=5) for words, fill in keys.items())
    return beside(*swatches, gap=gap)


@dataclass(frozen=True)
class Column:
    """A column of a table: its name, where its words stand ("start", "middle", "end"), and its width; 0 is that of its
    widest cell."""

    name: str = ""
    anchor: str = "start"
    width: float = 0.0


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[str | Panel]], size: float = 13, gap: float = 16.0,
    lead: float = 2.0, width: float = 0.0, total: bool = False,
) -> Panel:  # fmt: skip
    """Rows of words or panels below the names of their columns, and a rule between both if there are names.

    `gap` stands between columns, and grows until the table has this `width`; `lead` stands between rows. The words of
    the last row are bold if it is the `total`."""
    heads = [phrase(column.name, size, True, column.anchor) for column in columns]
    rows = [*rows]
    cells = [
        [phrase(cell, size, total and row is rows[-1], column.anchor) if isinstance(cell, str) else cell
         for column, cell in zip(columns, row, strict=True)]
        for row in rows
    ]  # fmt: skip
    widths = [
        column.width or max(cell.width for cell in in_column)
        for column, *in_column in zip(columns, heads, *cells, strict=True)
    ]
    gap = max(gap, (width - sum(widths)) / max(1, len(widths) - 1))
    named = any(column.name for column in columns)
    lines = [
        beside(*(_within(cell, wide, column) for cell, wide, column in zip(row, widths, columns, strict=True)), gap=gap)
        for row in ([heads] if named else []) + cells
    ]
    if named:
        lines.insert(1, rule(lines[0].width))
    return below(*lines, gap=lead)


def _within(cell: Panel, width: float, column: Column) -> Panel:
    """A cell in the room that its column has."""
    x0 = _free(column.anchor, width - cell.width)
    return Panel(width, cell.height, lambda x, y: cell.draw(x + x0, y))


def _free(anchor: str, width: float) -> float:
    """How much of a free `width` lies before what stands at its "start", in its "middle" or at its "end"."""
    return {"start": 0.0, "middle": width / 2, "end": width}[anchor]


def page(
    title: str, *panels: Panel, label: str, aside: str = "", gap: float = 10.0, width: float = WIDTH, size: float = 15
) -> Picture:
    """A picture of panels below one another under a title; `aside` are words at the right of the title."""
    beyond = width_of(aside, 13, bold=True) + 12 if aside else 0.0
    head = headline(title, size, width - beyond) + (text(width - MARGIN, 20, aside, "end", bold=True) if aside else "")
    whole = below(*panels, gap=gap)
    return Picture(head + whole.draw(MARGIN, HEAD), HEAD + whole.height + MARGIN, label, width)
