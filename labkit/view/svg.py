"""Elements of pictures: boxes with words in them, arrows, text. They can be read on light and dark pages, and printed.

Text and lines take the colour of the page (`currentColor`), boxes take the Okabe-Ito palette, whose colours people who
cannot tell red from green can tell apart; no meaning rests on colour alone. Pictures have no ids and no scripts, so any
number of them can stand on one page.

JupyterLab removes every SVG element from the HTML of a notebook that it does not trust, and only the words between the
elements stay. So a picture is stored twice: as an image, which JupyterLab always keeps, and as a drawing in a hidden
box. A style, which it keeps only in trusted notebooks, shows the box in place of the image if the drawing is in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from urllib.parse import quote

PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#D55E00", "#999999")
"""Okabe and Ito (2008); sky, orange, green, pink, yellow, blue, vermilion, grey."""
KIND_COLOURS = (*PALETTE[:4], PALETTE[7], PALETTE[4], PALETTE[6])
"""A colour for each kind of memory. The dark blue is not among them, since dark words on it cannot be read."""
INK = "#111"
"""The colour of text on a coloured box."""
WIDTH = 800
STYLE = "<style>.lk-drawing:has(svg){display:block!important}.lk-image:has(+.lk-drawing svg){display:none}</style>"
"""Shows the drawing, which has the page's colours and texts under the pointer, and hides its image."""


class Drawing:
    """An object that a notebook shows as SVG, also after an export to HTML: a hand-drawn Picture, or a Chart.

    `str()` of it is the SVG, `width` and `height` are its size, and `label` says in words what it shows."""

    label: str
    width: float
    height: float

    def __repr__(self) -> str:
        return f"<picture: {self.label}>"

    def html(self) -> str:
        """The drawing for a page that allows it, and a dark on white image of it for one that does not."""
        svg = str(self)
        image = quote(svg, safe=" =:/;,()'")
        return (
            f"<!-- a picture -->\n{STYLE}"  # the first line is what JupyterLab shows of an output that is folded
            f'<img class="lk-image" alt="{escape(self.label)}" src="data:image/svg+xml,{image}" '
            f'style="background:#fff;width:100%;max-width:{self.width:g}px">'
            f'<div class="lk-drawing" hidden="hidden">{svg}</div>'
        )

    def _repr_html_(self) -> str:
        return self.html()

    def _repr_svg_(self) -> str:
        return str(self)


@dataclass(frozen=True, repr=False)
class Picture(Drawing):
    """A hand-drawn picture; `body` is the text inside its <svg>."""

    body: str
    height: float
    label: str
    width: float = WIDTH

    def __str__(self) -> str:
        return drawing(self.body, self.height, self.label, self.width)


def drawing(body: str, height: float, label: str, width: float = WIDTH) -> str:
    """A whole <svg> with this body. It is as wide as its column, at most `width`, in the page's colour and letters."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(label)}" style="max-width:{width:g}px;width:100%;height:auto;'
        f'color:var(--jp-content-font-color1,currentColor)" font-family="system-ui,sans-serif" font-size="13" '
        f'fill="currentColor">{body}</svg>'
    )


def text(x: float, y: float, words: object, anchor: str = "start", size: float = 13, bold: bool = False) -> str:
    """Words with their baseline at (x, y)."""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    style = ("" if size == 13 else f' font-size="{size:g}"') + (' font-weight="600"' if bold else "")
    return f'<text x="{x:g}" y="{y:g}"{place}{style}>{escape(str(words))}</text>'


def headline(words: str, size: float = 15, width: float = WIDTH) -> str:
    """The title of a picture at its upper left."""
    words, size = title_of(words, width, size)
    return text(4, 20, words, size=size, bold=True)


def title_of(words: str, width: float = WIDTH, largest: float = 15) -> tuple[str, float]:
    """A title and its size, the largest that fits a page of this width, at least 11; a longer title is cut."""
    sizes = (size for size in (largest, 14, 13, 12, 11) if size <= largest)
    fits = (size for size in sizes if width_of(words, size, bold=True) <= width - 8)
    return cut(words, int((width - 8) / width_of("m", 11, bold=True))), next(fits, 11)


def box(
    x: float, y: float, w: float, h: float, fill: str = "none", words: object = "", title: str = "", width: float = 1
) -> str:
    """A box with words in its middle. `title` appears when the pointer rests on it; `width` is that of its edge."""
    return _hover(_rect(x, y, w, h, fill, width) + _inside(x, y, w, h, words, "" if fill == "none" else INK), title)


def striped(
    x: float, y: float, w: float, h: float, fills: Sequence[str], words: object, title: str = "", width: float = 1
) -> str:
    """A box with stripes in several colours, and words on a white plate in its middle."""
    stripe = w / max(1, len(fills))
    stripes = "".join(
        f'<rect x="{x + i * stripe:g}" y="{y:g}" width="{stripe:g}" height="{h:g}" fill="{fill}"/>'
        for i, fill in enumerate(fills)
    )
    wide = min(w - 4, 7.6 * len(str(words)) + 8)
    plate = f'<rect x="{x + (w - wide) / 2:g}" y="{y + h / 2 - 9:g}" width="{wide:g}" height="18" rx="3" fill="#fff"/>'
    ground = stripes + plate if fills else ""
    return _hover(ground + _rect(x, y, w, h, "none", width) + _inside(x, y, w, h, words, INK if fills else ""), title)


def line(
    x1: float, y1: float, x2: float, y2: float, dash: str = "", width: float = 1, colour: str = "currentColor"
) -> str:
    """A straight line."""
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="{width:g}"{style}/>'


def arrow(points: Sequence[tuple[float, float]], title: str = "") -> str:
    """An arrow along straight pieces through `points`. A wide invisible stroke makes it easy to point at."""
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    (x1, y1), (x2, y2) = points[-2:]
    length = math.hypot(x2 - x1, y2 - y1) or 1.0
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    head = "L".join(f"{x2 - 8 * dx + s * 4 * dy:g} {y2 - 8 * dy - s * 4 * dx:g}" for s in (1, -1))
    return _hover(
        f'<path d="{path}" fill="none" stroke="#000" stroke-opacity="0" stroke-width="12"/>'
        f'<path d="{path}" fill="none" stroke="currentColor" stroke-width="1.5"/><path d="M{x2:g} {y2:g}L{head}z"/>',
        title,
    )


def cut(words: str, length: int) -> str:
    """The words, or as many as fit in `length` characters and an ellipsis."""
    return words if len(words) <= length else words[: length - 1] + "…"


def width_of(words: object, size: float = 13, bold: bool = False) -> float:
    """The estimated width of words, in the picture's units: that in DejaVu Sans, the widest of the usual fonts."""
    return (0.69 if bold else 0.59) * size * len(str(words))


@dataclass
class Room:
    """The places of a page that are taken, so that words do not lie on words: boxes as (left, top, width, height)."""

    left: float = 0.0
    top: float = 0.0
    right: float = WIDTH
    bottom: float = math.inf
    taken: tuple[tuple[float, float, float, float], ...] = ()

    def take(self, x: float, y: float, w: float, h: float) -> bool:
        """Take this box if it is inside the page and meets no other. Returns True if it has been taken."""
        inside = self.left <= x and self.top <= y and x + w <= self.right and y + h <= self.bottom
        if not inside or any(x < a + c and a < x + w and y < b + d and b < y + h for a, b, c, d in self.taken):
            return False
        self.taken = (*self.taken, (x, y, w, h))
        return True

    def keep(self, x: float, y: float, w: float, h: float) -> None:
        """Take this box even if it meets others: a mark or a line is there, and no words may lie on it."""
        self.taken = (*self.taken, (x, y, w, h))

    def keep_path(self, points: Sequence[tuple[float, float]]) -> None:
        """Take the straight pieces between these points, so that no words lie on the line."""
        boxes = []
        for (x1, y1), (x2, y2) in itertools.pairwise(points):
            count = max(1, math.ceil(math.hypot(x2 - x1, y2 - y1) / 4))
            shares = (step / count for step in range(count + 1))
            boxes += [(x1 + (x2 - x1) * share - 2, y1 + (y2 - y1) * share - 2, 4.0, 4.0) for share in shares]
        self.taken = (*self.taken, *boxes)

    def first(self, places: Iterable[tuple[float, float]], w: float, h: float) -> tuple[float, float] | None:
        """The first of these corners at which a box of this size is free, which is then taken; None if none is."""
        return next(((x, y) for x, y in places if self.take(x, y, w, h)), None)


def round_marks(high: float, base: int = 10) -> list[float]:
    """0 and about four more round numbers up to `high`, as 0, 25, 50, 75, 100. With `base` 2 the steps are powers of
    two, for bytes."""
    if not 0 < high < math.inf:
        return [0.0]
    if base == 2:
        step = 2.0 ** math.ceil(math.log2(high / 6))
    else:
        size = 10.0 ** math.floor(math.log10(high / 4.5))
        step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= high / 4.5 * 0.999)
    return [k * step for k in range(math.floor(high / step * (1 + 1e-9)) + 1)]


def shade(part: float) -> str:
    """A blue, from pale for 0 to full for 1, always light enough for dark text."""
    ends = zip((236, 246, 253), (86, 180, 233), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * min(1.0, max(0.0, part))):02x}" for a, b in ends)


def _rect(x: float, y: float, w: float, h: float, fill: str, width: float) -> str:
    edge = "" if width == 1 else f' stroke-width="{width:g}"'
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{fill}" stroke="currentColor"{edge}/>'


def _inside(x: float, y: float, w: float, h: float, words: object, ink: str) -> str:
    if words == "":
        return ""
    size = min(13.0, (w - 6) / (0.58 * max(1, len(str(words)))))  # a long number gets smaller, never cut
    style = ("" if size == 13 else f' font-size="{size:.3g}"') + (f' fill="{ink}"' if ink else "")
    place = f'x="{x + w / 2:g}" y="{y + h / 2 + 0.35 * size:.4g}" text-anchor="middle"'
    return f"<text {place}{style}>{escape(str(words))}</text>"


def _hover(shapes: str, title: str) -> str:
    return f"<g><title>{escape(title)}</title>{shapes}</g>" if title else f"<g>{shapes}</g>"
