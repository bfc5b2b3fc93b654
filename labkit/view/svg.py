"""A small vocabulary for pictures: boxes with numbers in them, arrows, words. Light and dark, readable when printed.

Text and lines take the colour of the page (`currentColor`), boxes take the Okabe-Ito palette, which people who cannot
tell red from green can tell apart; no meaning rests on colour alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#D55E00", "#999999")
"""Okabe and Ito (2008); sky, orange, green, pink, yellow, blue, vermilion, grey."""
WIDTH = 800


@dataclass(frozen=True)
class Picture:
    """An SVG drawing that shows itself in a notebook and survives an export to HTML."""

    body: str
    height: float
    label: str
    width: float = WIDTH

    def __str__(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'aria-label="{escape(self.label)}" style="max-width:{self.width:g}px;width:100%;height:auto;'
            f'color:var(--jp-content-font-color1,currentColor)" font-family="system-ui,sans-serif" font-size="13" '
            f'fill="currentColor"><title>{escape(self.label)}</title>{_ARROW}{self.body}</svg>'
        )

    def __repr__(self) -> str:
        return f"<picture: {self.label}>"

    def _repr_html_(self) -> str:
        return str(self)


_ARROW = (
    '<defs><marker id="lk-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
)


def text(x: float, y: float, words: object, anchor: str = "start", size: float = 13, bold: bool = False) -> str:
    """Words with their baseline at (x, y)."""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size:g}"{weight}>{escape(str(words))}</text>'


def box(x: float, y: float, w: float, h: float, fill: str = "none", words: object = "", title: str = "") -> str:
    """A box with words in its middle; `title` shows when the pointer rests on it."""
    ink = "currentColor" if fill == "none" else "#111"
    hover = f"<title>{escape(title)}</title>" if title else ""
    inside = (
        f'<text x="{x + w / 2:g}" y="{y + h / 2 + 4.5:g}" text-anchor="middle" fill="{ink}">{escape(str(words))}</text>'
        if words != ""
        else ""
    )
    shape = f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{fill}" stroke="currentColor"/>'
    return f"<g>{hover}{shape}{inside}</g>"


def striped(x: float, y: float, w: float, h: float, fills: Iterable[str], words: object, title: str = "") -> str:
    """A box in several colours side by side, with words in its middle."""
    fills = list(fills)
    each = w / max(1, len(fills))
    stripes = "".join(
        f'<rect x="{x + i * each:g}" y="{y:g}" width="{each:g}" height="{h:g}" fill="{fill}"/>'
        for i, fill in enumerate(fills)
    )
    hover = f"<title>{escape(title)}</title>" if title else ""
    plate = (
        f'<rect x="{x + w / 2 - 19:g}" y="{y + h / 2 - 9:g}" width="38" height="18" rx="3" fill="#fff" opacity=".82"/>'
    )
    frame = f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="none" stroke="currentColor"/>'
    inside = (
        f'<text x="{x + w / 2:g}" y="{y + h / 2 + 4.5:g}" text-anchor="middle" fill="#111">{escape(str(words))}</text>'
    )
    return f"<g>{hover}{stripes}{plate}{frame}{inside}</g>"


def line(
    x1: float, y1: float, x2: float, y2: float, dash: str = "", width: float = 1, colour: str = "currentColor"
) -> str:
    """A straight line."""
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="{width:g}"{style}/>'


def arrow(x1: float, y1: float, x2: float, y2: float, title: str = "", bend: float = 0) -> str:
    """An arrow from one point to another, bent aside by `bend`."""
    hover = f"<title>{escape(title)}</title>" if title else ""
    cx, cy = (x1 + x2) / 2 + bend, (y1 + y2) / 2
    path = f'<path d="M{x1:g} {y1:g}Q{cx:g} {cy:g} {x2:g} {y2:g}" fill="none" stroke="currentColor" stroke-width="1.5" '
    return f'<g>{hover}{path}marker-end="url(#lk-tip)"/></g>'


def bytes_text(n_bytes: float) -> str:
    """`384 B`, `1.5 KiB`, `16 MiB`."""
    if abs(n_bytes) < 10_000:
        return f"{n_bytes:,.6g} B"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(n_bytes) >= size:
            return f"{n_bytes / size:.3g} {unit}"
    return f"{n_bytes:g} B"


def seconds_text(seconds: float) -> str:
    """`85 us`, `1.2 ms`, `3 s`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def value_text(value: float, unit: str) -> str:
    """A number with its unit, scaled where the unit is bytes ("B") or seconds ("s")."""
    if unit in ("B", "bytes"):
        return bytes_text(value)
    if unit in ("s", "seconds"):
        return seconds_text(value)
    return f"{value:,.4g} {unit}".strip()
