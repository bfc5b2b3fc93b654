"""A chart: a matplotlib figure in labkit's style, which shows itself in a notebook as the hand-drawn pictures do.

    chart = curve({"loss": losses})          # any chart of labkit: a matplotlib Figure
    chart.axes[0].set_yscale("log")          # restyle it, or add to it, as you would any figure
    chart.savefig("loss.pdf")

    chart = Chart(362, "loss of a run")      # a page 800 units wide and 362 high, with its title
    axes = chart.panel(64, 72, 690, 320)     # matplotlib Axes between these edges: left, top, right, bottom
    axes.plot(steps, losses, label="loss")

One unit of the page is one point, and places on the page count from its upper left corner, as in `labkit.view.svg`.
A notebook shows it as SVG in which black becomes the colour of the page's words (see `labkit.view.pen`). An artist's
gid is the text that appears when the pointer rests on it. pyplot and its list of figures are not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from labkit.view.pen import Pen
from labkit.view.svg import INK, PALETTE, WIDTH, Drawing, Room, drawing, round_marks, title_of, width_of
from labkit.view.units import seconds_text

_FILE: Any = matplotlib.rc_params_from_file(Path(__file__).with_name("labkit.mplstyle"), use_default_template=False)
STYLE: Mapping[str, Any] = MappingProxyType(dict(_FILE))
"""matplotlib's settings while a chart is made, drawn or saved. At all other times the learner's own settings hold."""
LINES = tuple(STYLE["axes.prop_cycle"].by_key()["color"])
DASHES = tuple(STYLE["axes.prop_cycle"].by_key()["linestyle"])
MARKS = ("o", "s", "^", "D")
"""Lines that differ in colour also differ in their dashes and marks, for readers who cannot tell the colours."""
CHOSEN: Mapping[str, Any] = MappingProxyType(
    {"marker": "D", "color": PALETTE[4], "markeredgecolor": "black", "markersize": 11}
)
"""Options of `dot` for the mark of a chosen point."""


def style() -> Any:
    """The settings of STYLE for a `with` block, or for a function under `@style()`."""
    settings: Any = dict(STYLE)
    return matplotlib.rc_context(settings)


class Chart(Drawing, Figure):
    """A figure on a page of `height` by `width` points, with a title; `label` says in words what it shows."""

    @style()
    def __init__(self, height: float, title: str = "", label: str = "", width: float = WIDTH) -> None:
        """An empty page. `title` gets smaller, and is cut, if it is too long."""
        super().__init__(figsize=(width / 72, height / 72), dpi=72)
        self.label, self.width, self.height = label or title, width, height
        if title:
            words, size = title_of(title, width)
            self.words(4, 20, words, fontsize=size, weight="bold")

    def panel(self, left: float, top: float, right: float, bottom: float, **options: Any) -> Axes:
        """Axes with the edges of their plot at these places of the page; `options` as of matplotlib's add_axes."""
        wide, high = self.get_size_inches() * 72
        return self.add_axes((left / wide, 1 - bottom / high, (right - left) / wide, (bottom - top) / high), **options)

    def words(self, x: float, y: float, text: str, anchor: str = "left", **options: Any) -> None:
        """Words with their baseline at a place of the page; `options` as of matplotlib's Text."""
        wide, high = self.get_size_inches() * 72
        early = {"fontsize": 13, "zorder": -1}  # drawn first, so that screen readers read it before the panels
        self.text(x / wide, 1 - y / high, text, ha=anchor, **{**early, **options})

    def put(
        self, room: Room, places: Iterable[tuple[float, float]], words: str, size: float = 12, bold: bool = False
    ) -> None:
        """Words with their upper left corner at the first of these places that is free; nowhere if none is."""
        wide = width_of(words, size, bold)
        if spot := room.first(places, wide, size):
            # words at the edge are anchored at their end, so that letters of another width stay on the page
            at_the_edge = spot[0] + wide > room.right - 4
            end, anchor = (spot[0] + wide, "right") if at_the_edge else (spot[0], "left")
            self.words(end, spot[1] + 0.83 * size, words, anchor, fontsize=size, weight="bold" if bold else "normal")

    def rule(
        self,
        y: float,
        left: float = 4,
        right: float = WIDTH - 4,
        dash: Any = "-",
        colour: str = "black",
        width: float = 1,
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

    def keys(self, x: float, y: float, axes: Axes, **options: Any) -> Legend:
        """The legend of `axes` in one row, its left end at a place of the page; `options` as of matplotlib's legend."""
        wide, high = self.get_size_inches() * 72
        place = {"loc": "center left", "bbox_to_anchor": (x / wide, 1 - y / high), "bbox_transform": self.transFigure}
        return axes.legend(**{**place, "ncols": len(axes.get_legend_handles_labels()[1]) or 1, **options})

    @style()
    def savefig(self, fname: Any, **options: Any) -> None:
        """As matplotlib's savefig, but on white and at 144 dots an inch unless `options` say otherwise."""
        super().savefig(fname, **{"facecolor": "white", "dpi": 144, **options})

    @style()
    def __str__(self) -> str:
        pen = Pen(*self.bbox.size, self.dpi / 72)
        self.draw(pen)
        return drawing("".join(pen.out), self.bbox.height, self.label, self.bbox.width)

    __repr__ = Drawing.__repr__


def upward(axes: Axes, name: str) -> None:
    """Name the vertical axis in a horizontal line above its upper end, which is easier to read than turned letters."""
    frame = axes.get_window_extent()
    axes.set_ylabel(name, rotation=0, ha="left", va="baseline")
    axes.yaxis.set_label_coords((4 - frame.x0) / frame.width, 1 + 12 / frame.height)


def dot(axes: Axes, x: float, y: float, hover: str = "", label: str = "", **options: Any) -> None:
    """A mark, moved to the edge of the axes if it lies beyond. `label` goes into the legend, `hover` appears under the
    pointer."""
    (left, right), (low, high) = axes.get_xlim(), sorted(axes.get_ylim())
    edge = {"markeredgewidth": 3} if options.get("marker") == "x" else {"markeredgecolor": "white"}
    axes.plot([min(max(x, left), right)], [min(max(y, low), high)], label=label or None, gid=hover or None,
              clip_on=False, **{"marker": "o", "linestyle": "", **edge, **options})  # fmt: skip


def on_page(axes: Axes, x: float, y: float) -> tuple[float, float]:
    """The place on the page, counted from its upper left corner, of a point of the axes."""
    across, up = axes.transData.transform((x, y))
    return float(across), float(axes.figure.bbox.height - up)


def marks(
    axes: Axes,
    x: Iterable[float] | None = None,
    y: Iterable[float] | None = None,
    x_text: Callable[[float], str] | None = None,
    y_text: Callable[[float], str] | None = None,
) -> None:
    """Set the marks of the axes, and how their numbers are written. None: about five round ones, as matplotlib writes
    them. Marks on the horizontal axis whose numbers would run into an earlier one are left out."""
    for axis, at, say in ((axes.xaxis, x, x_text), (axes.yaxis, y, y_text)):
        axis.minorticks_off()
        if say is not None:
            axis.set_major_formatter(FuncFormatter(lambda value, _, say=say: say(value)))
        if at is None and axis.get_scale() == "linear":
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        elif at is not None:
            axis.set_major_locator(FixedLocator(_apart(axes, at, say) if axis is axes.xaxis and say else list(at)))


def lanes(axes: Axes) -> None:
    """Style the axes of bars in lanes over seconds: times at round marks below, names at the left, no grid."""
    marks(axes, round_marks(axes.get_xlim()[1]), axes.get_yticks(), lambda t: seconds_text(t) if t else "0")
    for mark in axes.get_xticklabels()[-1:]:  # the last one may stand at the end of the page
        mark.set_horizontalalignment("right" if mark.get_position()[0] > 0.96 * axes.get_xlim()[1] else "center")
    axes.spines["left"].set_visible(False)
    axes.grid(False)


def _apart(axes: Axes, at: Iterable[float], say: Callable[[float], str]) -> list[float]:
    """The marks on the horizontal axis whose numbers do not run into an earlier one."""
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
    words: str = "",
    hover: str = "",
    size: int = 12,
    edge: float = 1.0,
) -> None:
    """A box in the units of the axes, with words in its middle where they fit; `hover` appears under the pointer.

    A box of at most 4 units of the page has no edges, which would hide its colour."""
    (x0, y0), (x1, y1) = axes.transData.transform([(x, y), (x + wide, y + high)])
    edge = edge if x1 - x0 > 4 else 0.0
    patch = Rectangle((x, y), wide, high, facecolor=colour, linewidth=edge, gid=hover or None, clip_on=False)
    axes.add_artist(patch)  # add_patch takes ten times as long: it asks each patch for the limits of the axes
    if words and width_of(words, size) + 4 <= abs(x1 - x0) and abs(y1 - y0) >= size:
        ink = "black" if colour == "none" else INK
        axes.text(x + wide / 2, y + high / 2, words, ha="center", va="center_baseline", fontsize=size, color=ink,
                  gid=hover or None)  # fmt: skip
