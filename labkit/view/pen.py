"""Draws matplotlib figures as SVG in the style of labkit.view.svg, with the colours and letters of the page.

    black                 the colour of the page's words, so that a chart is readable on a light and a dark page
    words                 <text>, which can be searched and copied, in the letters of the page
    an artist's gid       the text that appears when the pointer rests on it: <g><title>...</title>
    beyond the axes       cut off by an inner <svg>

matplotlib's own SVG has ids, which collide when two pictures are on one page, and a style sheet, which changes the
whole page. It also takes 1.5 times as long to draw.
"""

from __future__ import annotations

import base64
import io
from html import escape
from typing import Any

import numpy as np
from matplotlib.backend_bases import GraphicsContextBase, RendererBase
from matplotlib.colors import to_hex
from matplotlib.image import imsave
from matplotlib.path import Path
from matplotlib.transforms import Affine2D, Transform

from labkit.view.svg import width_of


class Pen(RendererBase):
    """A page on which a figure draws itself; `out` lists the elements inside its <svg>."""

    def __init__(self, width: float, height: float, scale: float = 1.0) -> None:
        """A page of `width` by `height` pixels, with `scale` pixels for each point."""
        super().__init__()
        self.width, self.height, self.scale = width, height, scale
        self.out, self.hovers = list[str](), list[bool]()

    def flipy(self) -> bool:
        """True, since y counts downward in SVG."""
        return True

    def get_canvas_width_height(self) -> tuple[float, float]:
        """Width and height in pixels."""
        return self.width, self.height

    def points_to_pixels(self, points: Any) -> Any:
        """The pixels of this many points."""
        return points * self.scale

    def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> tuple[float, float, float]:
        """An estimate of the room that words take. The page's font is not known, and asking a font would take half of
        all drawing time."""
        if ismath:
            return super().get_text_width_height_descent(s, prop, ismath)
        size = self.points_to_pixels(prop.get_size_in_points())
        return width_of(s, size, _bold(prop)), size, 0.24 * size

    def open_group(self, s: str, gid: str | None = None) -> None:
        """Begin an artist; its gid appears when the pointer rests on it."""
        self.hovers.append(bool(gid))
        if gid:
            self.out.append(f"<g><title>{escape(gid)}</title>")

    def close_group(self, s: str) -> None:
        """End an artist."""
        if self.hovers.pop():
            self.out.append("</g>")

    def draw_path(self, gc: GraphicsContextBase, path: Path, transform: Transform, rgbFace: Any = None) -> None:
        """Draw a line or an area."""
        paint = self._paint(gc, rgbFace)
        if 'stroke="' not in paint and 'fill="none"' in paint:
            return
        down = transform + Affine2D().scale(1, -1).translate(0, self.height)
        clean: Any = path.cleaned(down, remove_nans=True, simplify=rgbFace is None and path.should_simplify)
        shape = _rectangle(clean, gc.get_linewidth() > 0) or _outline(clean)
        if shape:
            self._put(f"<{shape} {paint}/>", gc, clean.vertices[(clean.codes > 0) & (clean.codes < 79)])

    def draw_markers(
        self, gc: Any, marker_path: Path, marker_trans: Any, path: Any, trans: Transform, rgbFace: Any = None
    ) -> None:
        """Draw marks; round ones, the most frequent, as circles."""
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
        """Write words as text, which can be searched and copied. Formulas between dollars are drawn as outlines."""
        if ismath:
            super().draw_text(gc, x, y, s, prop, angle, ismath, mtext)
            return
        anchor = ""
        if mtext is not None and angle == 0:  # the page's letters may be wider than estimated
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
        """Draw an image, as a PNG inside the SVG."""
        file, (high, wide) = io.BytesIO(), im.shape[:2]
        imsave(file, im[::-1], format="png")
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
        dashes: Any = gc.get_dashes()[1]
        if dashes is not None:
            out += f' stroke-dasharray="{" ".join(f"{self.points_to_pixels(dash):g}" for dash in dashes)}"'
        return out + (
            ' stroke-linejoin="round"' if gc.get_joinstyle() == "round" and face is None and width > 1 else ""
        )

    def _put(self, shape: str, gc: GraphicsContextBase, points: Any) -> None:
        """Add a shape through these points, cut at matplotlib's clip rectangle if it crosses it."""
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
    code = to_hex(colour[:3])
    return "currentColor" if code == "#000000" else code


def _rectangle(path: Any, edged: bool) -> str:
    """An upright closed path of four corners as a <rect>, a little rounded if it has an edge; "" for any other."""
    corners = path.vertices[:4]
    if list(path.codes[:6]) != [1, 2, 2, 2, 79, 0] or len(path.codes) > 6:
        return ""
    (x0, y0), (x1, y1) = corners.min(0), corners.max(0)
    if any(x not in (x0, x1) or y not in (y0, y1) for x, y in corners):
        return ""
    rounded = ' rx="3"' if edged and min(x1 - x0, y1 - y0) > 11 else ""
    return f'rect x="{x0:.1f}" y="{y0:.1f}" width="{x1 - x0:.1f}" height="{y1 - y0:.1f}"{rounded}'


def _outline(path: Any) -> str:
    """A path as SVG writes it, with M, L, Q, C and z; "" for a path without points."""
    out, point = [], 0
    points, codes = path.vertices.round(1).tolist(), path.codes.tolist()
    while point < len(codes) and codes[point]:
        code = codes[point]
        count = {1: 1, 2: 1, 3: 2, 4: 3}.get(code, 1)
        places = "" if code == 79 else " ".join(f"{x:g} {y:g}" for x, y in points[point : point + count])
        out.append({1: "M", 2: "L", 3: "Q", 4: "C", 79: "z"}[code] + places)
        point += count
    return f'path d="{"".join(out)}"' if out else ""
