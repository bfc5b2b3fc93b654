"""A chart: a matplotlib figure in labkit's style, which shows itself in a notebook as the hand-drawn pictures do.

    chart = curve({"loss": losses})          # any chart of labkit: a matplotlib Figure
    chart.axes[0].set_yscale("log")          # restyle it, or add to it, as you would any figure
    chart.savefig("loss.pdf")

    chart = Chart(362, "loss of a run")      # a page 800 units wide and 362 high, with its title
    axes = chart.panel(64, 72, 690, 320)     # matplotlib Axes between these edges: left, top, right, bottom
    axes.plot(steps, losses, label="loss")

One unit of the page is one point, and places on the page count from its upper left corner, as in `labkit.view.svg`.
In the notebook black follows the colour of the page's words, so that a chart is readable on a light and a dark page; an
artist's gid is what the page tells where the pointer rests on it. pyplot and its list of figures are not used.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterable
from html import escape
from types import MappingProxyType
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import GraphicsContextBase, RendererBase
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.path import Path
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator
from matplotlib.transforms import Affine2D, Transform

from labkit.view.svg import INK, PALETTE, WIDTH, Drawing, drawing, round_marks, title_of, width_of
from labkit.view.units import seconds_text

LINES = ("#2B8CD6", PALETTE[6], PALETTE[2], PALETTE[3])
"""Colours of lines: Okabe and Ito's, but for a lighter blue; a thin line of theirs is lost on a dark page."""
DASHES = ("-", (0, (8, 4)), (0, (2, 3)), (0, (8, 3, 2, 3)))
"""Lines that differ in colour differ in their dashes, too."""
MARKS = ("o", "s", "^", "D")
DOTTED = (0, (1, 5))
CHOSEN = MappingProxyType({"marker": "D", "color": PALETTE[4], "markeredgecolor": "black", "markersize": 11})
"""The mark of what is chosen, for `dot`."""
STYLE = MappingProxyType(
    {
        "axes.axisbelow": True,
        "axes.edgecolor": "black",
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.labelsize": 12,
        "axes.linewidth": 1,
        "axes.prop_cycle": matplotlib.cycler(color=LINES, linestyle=DASHES),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.unicode_minus": False,
        "figure.dpi": 72,
        "figure.facecolor": "none",
        "font.family": "DejaVu Sans",
        "font.size": 12,
        "grid.color": "black",
        "grid.linestyle": DOTTED,
        "grid.linewidth": 1,
        "legend.borderaxespad": 0,
        "legend.borderpad": 0,
        "legend.columnspacing": 1.5,
        "legend.fontsize": 12,
        "legend.frameon": False,
        "legend.handletextpad": 0.5,
        "lines.linewidth": 2.5,
        "lines.markersize": 10,
        "lines.scale_dashes": False,
        "lines.solid_capstyle": "butt",
        "patch.edgecolor": "black",
        "patch.force_edgecolor": True,
        "patch.linewidth": 1,
        "pdf.fonttype": 42,
        "svg.fonttype": "none",
        "svg.hashsalt": "labkit",
        "text.parse_math": False,
        "xtick.labelsize": 12,
        "xtick.major.size": 5,
        "xtick.major.width": 1,
        "ytick.labelsize": 12,
        "ytick.major.pad": 7,
        "ytick.major.size": 0,
    }
)
"""What matplotlib's own settings are while a chart is made, drawn or saved; outside of that they are the learner's."""


def style() -> Any:
    """The settings of STYLE for a `with` block, or for a function under `@style()`."""
    return matplotlib.rc_context(dict(STYLE))


class Chart(Drawing, Figure):
    """A figure on a page of `height` by `width` points, with a title; `label` says in words what it shows."""

    @style()
    def __init__(self, height: float, title: str = "", label: str = "", width: float = WIDTH) -> None:
        """An empty page. `title` gets smaller, and is cut, if it is too long."""
        super().__init__(figsize=(width / 72, height / 72), dpi=72)
        self.label, self.width = label or title, width
        if title:
            words, size = title_of(title, width)
            self.words(4, 20, words, fontsize=size, weight="bold")

    def panel(self, left: float, top: float, right: float, bottom: float, **options: Any) -> Axes:
        """Axes with the edges of their plot at these places of the page; `options` as of matplotlib's add_axes."""
        wide, high = self.get_size_inches() * 72
        return self.add_axes((left / wide, 1 - bottom / high, (right - left) / wide, (bottom - top) / high), **options)

    def words(self, x: float, y: float, said: str, anchor: str = "left", **options: Any) -> None:
        """Words with their baseline at a place of the page; `options` as of matplotlib's Text."""
        wide, high = self.get_size_inches() * 72
        self.text(x / wide, 1 - y / high, said, ha=anchor, **{"fontsize": 13, **options})

    def rule(
        self, y: float, left: float = 4, right: float = WIDTH - 4, dash: Any = "-", colour: str = "black", width: float = 1
    ) -> None:
        """A line across the page at this height."""
        wide, high = self.get_size_inches() * 72
        ends = [left / wide, right / wide], [1 - y / high] * 2
        self.add_artist(Line2D(*ends, color=colour, linewidth=width, linestyle=dash))

    def swatch(self, x: float, y: float, colour: str) -> None:
        """A small box of a colour, for a legend or a table, with its upper left corner at a place of the page."""
        wide, high = self.get_size_inches() * 72
        self.add_artist(Rectangle((x / wide, 1 - (y + 12) / high), 12 / wide, 12 / high, facecolor=colour,
                                  transform=self.transFigure))  # fmt: skip

    def swatches(self, x: float, y: float, keys: Iterable[tuple[str, str]]) -> None:
        """A legend of (words, colour) in one row, its upper left corner at a place of the page."""
        for words, colour in keys:
            self.swatch(x, y, colour)
            self.words(x + 17, y + 11, words, fontsize=12)
            x += 34 + width_of(words, 12)

    def keys(self, x: float, y: float, axes: Axes, **options: Any) -> None:
        """The legend of `axes` in one row, its left end at a place of the page; `options` as of matplotlib's legend."""
        wide, high = self.get_size_inches() * 72
        place = {"loc": "center left", "bbox_to_anchor": (x / wide, 1 - y / high), "bbox_transform": self.transFigure}
        axes.legend(**{**place, "ncols": len(axes.get_legend_handles_labels()[1]) or 1, **options})

    @style()
    def savefig(self, fname: Any, **options: Any) -> None:
        """As matplotlib's, on white and at 144 dots an inch unless told otherwise."""
        super().savefig(fname, **{"facecolor": "white", "dpi": 144, **options})

    @style()
    def __str__(self) -> str:
        pen = Pen(*self.bbox.size, self.dpi / 72)
        self.draw(pen)
        return drawing("".join(pen.out), self.bbox.height, self.label, self.bbox.width)

    __repr__ = Drawing.__repr__


def upward(axes: Axes, name: str) -> None:
    """Name the axis upward, flat above its upper end, where it is read without turning the head."""
    frame = axes.get_window_extent()
    axes.set_ylabel(name, rotation=0, ha="left", va="baseline")
    axes.yaxis.set_label_coords((4 - frame.x0) / frame.width, 1 + 12 / frame.height)


def dot(axes: Axes, x: float, y: float, hover: str = "", label: str = "", **options: Any) -> None:
    """A mark, moved to the edge of the axes if it lies beyond; `label` is for the legend, `hover` for the pointer."""
    (left, right), (low, high) = axes.get_xlim(), sorted(axes.get_ylim())
    edge = {"markeredgewidth": 3} if options.get("marker") == "x" else {"markeredgecolor": "white"}
    axes.plot([min(max(x, left), right)], [min(max(y, low), high)], label=label or None, gid=hover or None,
              clip_on=False, **{"marker": "o", "linestyle": "", **edge, **options})  # fmt: skip


def on_page(axes: Axes, x: float, y: float) -> tuple[float, float]:
    """Where a point of the axes lies on the page, counted from its upper left corner."""
    across, up = axes.transData.transform((x, y))
    return float(across), float(axes.get_figure().bbox.height - up)


def marks(
    axes: Axes,
    x: Iterable[float] | None = None,
    y: Iterable[float] | None = None,
    x_text: Callable[[float], str] | None = None,
    y_text: Callable[[float], str] | None = None,
) -> None:
    """The marks of the axes, and how their numbers are written; None: about five round ones, as matplotlib writes them.

    Of marks across that would run into each other, the later ones are left out."""
    for axis, at, say in ((axes.xaxis, x, x_text), (axes.yaxis, y, y_text)):
        axis.minorticks_off()
        if say is not None:
            axis.set_major_formatter(FuncFormatter(lambda value, _, say=say: say(value)))
        if at is None and axis.get_scale() == "linear":
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        elif at is not None:
            axis.set_major_locator(FixedLocator(_apart(axes, at, say) if axis is axes.xaxis and say else list(at)))


def lanes(axes: Axes) -> None:
    """The axes of bars in lanes over seconds: times at round marks below, names at the left, no grid."""
    marks(axes, round_marks(axes.get_xlim()[1]), axes.get_yticks(), lambda seconds: seconds_text(seconds) if seconds else "0")
    for mark in axes.get_xticklabels()[-1:]:  # the last one may stand at the end of the page
        mark.set_ha("right" if mark.get_position()[0] > 0.96 * axes.get_xlim()[1] else "center")
    axes.spines["left"].set_visible(False)
    axes.grid(False)


def _apart(axes: Axes, at: Iterable[float], say: Callable[[float], str]) -> list[float]:
    """Those of these marks across whose numbers keep apart."""
    kept, taken = [], -math.inf
    low, high = axes.get_xlim()
    for mark in (mark for mark in at if low <= mark <= high):
        x, half = axes.transData.transform((mark, axes.get_ylim()[0]))[0], width_of(say(mark), 12) / 2
        if x - half > taken:
            kept.append(mark)
            taken = x + half + 4
    return kept


def box(
    axes: Axes,
    x: float,
    y: float,
    wide: float,
    high: float,
    colour: str,
    said: str = "",
    hover: str = "",
    size: int = 12,
    edge: float = 1.0,
) -> None:
    """A box in the units of the axes, with words in its middle where they fit; `hover` is told under the pointer.

    One that is narrower than its edges would show has none."""
    (x0, y0), (x1, y1) = axes.transData.transform([(x, y), (x + wide, y + high)])
    edge = edge if x1 - x0 > 4 else 0.0
    patch = Rectangle((x, y), wide, high, facecolor=colour, linewidth=edge, gid=hover or None, clip_on=False)
    axes.add_artist(patch)  # add_patch takes ten times as long: it asks each patch for the limits of the axes
    if said and width_of(said, size) + 4 <= abs(x1 - x0) and abs(y1 - y0) >= size:
        ink = "black" if colour == "none" else INK
        middle = x + wide / 2, y + high / 2
        axes.text(*middle, said, ha="center", va="center_baseline", fontsize=size, color=ink, clip_on=False)


class Pen(RendererBase):
    """A matplotlib renderer that writes SVG in the manner of `labkit.view.svg`: without ids, scripts and style sheets.

    matplotlib's own SVG has ids, which collide where two pictures stand on one page, and a style sheet, which reaches
    all of that page. What lies beyond the edges of a panel is cut by an inner <svg>, which needs no id."""

    def __init__(self, width: float, height: float, scale: float = 1.0) -> None:
        """A page of this many pixels, and pixels for each point."""
        super().__init__()
        self.width, self.height, self.scale = width, height, scale
        self.out, self.hovers = list[str](), list[bool]()

    def flipy(self) -> bool:
        """True: y counts downward."""
        return True

    def get_canvas_width_height(self) -> tuple[float, float]:
        """Pixels."""
        return self.width, self.height

    def points_to_pixels(self, points: Any) -> Any:
        """Pixels for points."""
        return points * self.scale

    def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> tuple[float, float, float]:
        """About what words take: which font the page has is not known, and to ask one takes half of the time."""
        if ismath:
            return super().get_text_width_height_descent(s, prop, ismath)
        size = self.points_to_pixels(prop.get_size_in_points())
        return width_of(s, size, _bold(prop)), size, 0.24 * size

    def open_group(self, s: str, gid: str | None = None) -> None:
        """An artist begins; its gid shows when the pointer rests on it."""
        self.hovers.append(bool(gid))
        if gid:
            self.out.append(f"<g><title>{escape(gid)}</title>")

    def close_group(self, s: str) -> None:
        """An artist ends."""
        if self.hovers.pop():
            self.out.append("</g>")

    def draw_path(self, gc: GraphicsContextBase, path: Path, transform: Transform, rgbFace: Any = None) -> None:
        """A line or an area."""
        paint = self._paint(gc, rgbFace)
        if 'stroke="' not in paint and 'fill="none"' in paint:
            return
        down = transform + Affine2D().scale(1, -1).translate(0, self.height)
        clean = path.cleaned(down, remove_nans=True, simplify=rgbFace is None and path.should_simplify)
        shape = _rectangle(clean, gc.get_linewidth() > 0) or _outline(clean)
        if shape:
            self._put(f"<{shape} {paint}/>", gc, clean.vertices[(clean.codes > 0) & (clean.codes < 79)])

    def draw_markers(
        self, gc: Any, marker_path: Path, marker_trans: Any, path: Path, trans: Transform, rgbFace: Any = None
    ) -> None:
        """Marks; round ones, the most frequent, as circles."""
        if marker_path is not Path.unit_circle():
            super().draw_markers(gc, marker_path, marker_trans, path, trans, rgbFace)
            return
        radius = abs(marker_trans.frozen().to_values()[0])
        for x, y in trans.transform(path.vertices):
            circle = f'<circle cx="{x:.1f}" cy="{self.height - y:.1f}" r="{radius:g}" {self._paint(gc, rgbFace)}/>'
            self._put(circle, gc, np.array([[x, self.height - y]]))

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, ismath: Any = False, mtext: Any = None
    ) -> None:
        """Words stay words: they can be searched and copied. Formulas between dollars are drawn as outlines."""
        if ismath:
            super().draw_text(gc, x, y, s, prop, angle, ismath, mtext)
            return
        anchor = ""
        if mtext is not None and angle == 0:  # the page's letters may be wider than those that were measured
            place = mtext.get_transform().transform(mtext.get_unitless_position())
            x, side = place[0], mtext.get_horizontalalignment()
            anchor = {"center": ' text-anchor="middle"', "right": ' text-anchor="end"'}.get(side, "")
        turn = f' transform="rotate({-angle:g} {x:.1f} {y:.1f})"' if angle else ""
        size = self.points_to_pixels(prop.get_size_in_points())
        bold, size_of = ' font-weight="600"' * _bold(prop), "" if size == 13 else f' font-size="{size:g}"'
        colour = _colour(gc.get_rgb())
        fill = "" if colour == "currentColor" else f' fill="{colour}"'
        words = f'<text x="{x:.1f}" y="{y:.1f}"{anchor}{size_of}{bold}{fill}{turn}>{escape(s)}</text>'
        self._put(words, gc, np.array([[x, y]]))

    def draw_image(self, gc: Any, x: float, y: float, im: Any, transform: Any = None) -> None:
        """Pixels, as a PNG within the drawing."""
        file, (high, wide) = io.BytesIO(), im.shape[:2]
        matplotlib.image.imsave(file, im[::-1], format="png")
        data = base64.b64encode(file.getvalue()).decode()
        top = self.height - y - high
        self._put(
            f'<image x="{x:.1f}" y="{top:.1f}" width="{wide}" height="{high}" href="data:image/png;base64,{data}"/>',
            gc,
            np.array([[x, top], [x + wide, top + high]]),
        )

    def _paint(self, gc: GraphicsContextBase, face: Any) -> str:
        """Fill and stroke as attributes."""
        forced, alpha = gc.get_forced_alpha(), gc.get_alpha()
        out = 'fill="none"' if face is None else f'fill="{_colour(face)}"'
        if face is not None and (part := alpha if forced else face[3] if len(face) == 4 else 1.0) < 1:
            out += f' fill-opacity="{part:.3g}"'
        width, rgb = self.points_to_pixels(gc.get_linewidth()), gc.get_rgb()
        part = alpha if forced else rgb[3]
        if width <= 0 or part <= 0:
            return out
        out += f' stroke="{_colour(rgb)}"' + (f' stroke-width="{width:g}"' if width != 1 else "")
        out += f' stroke-opacity="{part:.3g}"' if part < 1 else ""
        _, dashes = gc.get_dashes()
        if dashes is not None:
            out += f' stroke-dasharray="{" ".join(f"{self.points_to_pixels(dash):g}" for dash in dashes)}"'
        return out + (' stroke-linejoin="round"' if gc.get_joinstyle() == "round" and face is None and width > 1 else "")

    def _put(self, shape: str, gc: GraphicsContextBase, points: Any) -> None:
        """Add a shape through these points, cut at the edges to which matplotlib cuts it."""
        clip = gc.get_clip_rectangle()
        if clip is not None and len(points):
            left, top, right, bottom = clip.x0, self.height - clip.y1, clip.x1, self.height - clip.y0
            (x0, y0), (x1, y1) = points.min(0), points.max(0)
            if x0 < left - 1 or y0 < top - 1 or x1 > right + 1 or y1 > bottom + 1:
                frame = f"{left:.1f} {top:.1f} {right - left:.1f} {bottom - top:.1f}"
                x, y, wide, high = frame.split()
                shape = f'<svg x="{x}" y="{y}" width="{wide}" height="{high}" viewBox="{frame}">{shape}</svg>'
        self.out.append(shape)


def _bold(prop: Any) -> bool:
    weight = prop.get_weight()
    return weight in ("bold", "semibold", "heavy", "black") or (isinstance(weight, int) and weight >= 600)


def _colour(colour: Any) -> str:
    """A colour as SVG writes it; black is that of the page's words."""
    said = to_hex(colour[:3])
    return "currentColor" if said == "#000000" else said


def _rectangle(path: Path, edged: bool) -> str:
    """An upright closed path of four corners as a <rect>, a little rounded if it has an edge; "" for any other."""
    corners = path.vertices[:4]
    if list(path.codes[:6]) != [1, 2, 2, 2, 79, 0] or len(path.codes) > 6:
        return ""
    (x0, y0), (x1, y1) = corners.min(0), corners.max(0)
    if any(x not in (x0, x1) or y not in (y0, y1) for x, y in corners):
        return ""
    rounded = ' rx="3"' if edged and min(x1 - x0, y1 - y0) > 11 else ""
    return f'rect x="{x0:.1f}" y="{y0:.1f}" width="{x1 - x0:.1f}" height="{y1 - y0:.1f}"{rounded}'


def _outline(path: Path) -> str:
    """A path's letters: M, L, Q, C, z; nothing for one without points."""
    out, point = [], 0
    points, codes = path.vertices.round(1).tolist(), path.codes.tolist()
    while point < len(codes) and codes[point]:
        code = codes[point]
        count = {1: 1, 2: 1, 3: 2, 4: 3}.get(code, 1)
        places = "" if code == 79 else " ".join(f"{x:g} {y:g}" for x, y in points[point : point + count])
        out.append({1: "M", 2: "L", 3: "Q", 4: "C", 79: "z"}[code] + places)
        point += count
    return f'path d="{"".join(out)}"' if out else ""
