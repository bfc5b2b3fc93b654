"""Time against size: measured points, the fitted line, and the laws of ring, tree and star on that line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from labkit.plan.collectives import ALGORITHMS, Line, crossover_bytes, seconds
from labkit.view.svg import PALETTE, Picture, headline, line, text, width_of
from labkit.view.units import binary_text, bytes_text, seconds_text

LEFT, RIGHT, TOP, BOTTOM, LEGEND = 74, 660, 72, 350, 38
COLOURS = ("#2B8CD6", PALETTE[6], PALETTE[2], PALETTE[3])
"""A lighter blue than the palette's: a thin line of that one is lost on a dark page."""
DASHES = ("", "9 4", "2 3", "9 3 2 3")
Points = Sequence[tuple[float, float]]


def fitted(
    samples: Points,
    link: Line,
    title: str = "one message between two ranks",
    across: str = "bytes",
    upward: str = "time",
) -> Picture:
    """Measured (bytes, seconds) as dots, alpha + bytes * beta as a line; both axes logarithmic, with these names."""
    said = f"alpha {seconds_text(link.alpha_s)}, {link.bandwidth / 1e9:.3g} GB/s"
    return _plot({"measured": samples}, {f"fit: {said}": link.seconds}, title, across, upward, ends=False)


def laws(n_ranks: int, link: Line, measured: Mapping[str, Points] | None = None) -> Picture:
    """all_reduce by ring, tree and star on `n_ranks`: the laws as lines, measurements as dots, and the crossover."""
    curves = {name: _law(name, n_ranks, link) for name in ALGORITHMS}
    cross = crossover_bytes(n_ranks, link)
    where = f"ring and tree meet at {bytes_text(round(cross))}" if 0 < cross < math.inf else "ring and tree do not meet"
    title, across, upward = f"all_reduce on {n_ranks} ranks: {where}", "bytes of the tensor", "time of an all_reduce"
    return _plot(measured or {}, curves, title, across, upward, cross)


def _law(name: str, n_ranks: int, link: Line) -> Callable[[float], float]:
    return lambda n_bytes: seconds(name, "all_reduce", n_ranks, n_bytes, link)


@dataclass(frozen=True)
class _Frame:
    """Two logarithmic axes: from bytes and seconds to a place in the picture."""

    low: float
    high: float
    floor: float
    ceiling: float

    def at(self, n_bytes: float, seconds: float) -> tuple[float, float]:
        across = math.log(max(n_bytes, self.low) / self.low) / math.log(self.high / self.low)
        up = math.log(max(seconds, self.floor) / self.floor) / math.log(self.ceiling / self.floor)
        return LEFT + across * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)


def _plot(
    dots: Mapping[str, Points],
    curves: Mapping[str, Callable[[float], float]],
    title: str,
    across: str,
    upward: str,
    mark: float = 0.0,
    ends: bool = True,
) -> Picture:
    sizes = [size for points in dots.values() for size, _ in points] or [64.0, float(64 << 20)]
    low, high = max(1.0, min(sizes) / 2), max(max(sizes) * 2, 8.0)
    xs = [low * (high / low) ** (i / 60) for i in range(61)]
    times = [t for points in dots.values() for _, t in points] + [f(x) for f in curves.values() for x in xs]
    times = [t for t in times if 0 < t < math.inf] or [1e-6, 1.0]
    frame = _Frame(low, high, min(times) / 1.5, max(times) * 1.5)
    body = [headline(title, width=720), *_axes(frame, across, upward)]
    if low < mark < high:
        x, _ = frame.at(mark, frame.floor)
        body += [line(x, TOP, x, BOTTOM, "5 4"), text(x + 5, BOTTOM - 8, bytes_text(round(mark)))]
    tips: list[tuple[float, str]] = []
    right = float(LEFT)
    for i, name in enumerate([*curves, *(name for name in dots if name not in curves)]):
        colour, dash = COLOURS[i % 4], DASHES[i % 4] if name in curves else ""
        if name in curves:
            path = "M" + "L".join("{:.1f} {:.1f}".format(*frame.at(x, curves[name](x))) for x in xs)
            style = f' stroke-dasharray="{dash}"' if dash else ""
            body.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.5"{style}/>')
            tips.append((frame.at(high, curves[name](high))[1], name))
            body.append(line(right, LEGEND, right + 24, LEGEND, dash, 2.5, colour))
        for size, t in dots.get(name, ()):
            body.append(_dot(*frame.at(size, t), i, colour, f"{name}: {bytes_text(size)} in {seconds_text(t)}"))
        said = f"{name}, and measured" if name in curves and name in dots else name
        body += [_dot(right + 12, LEGEND, i, colour, said)] if name in dots else []
        body.append(text(right + 30, LEGEND + 4, said))
        right += 52 + width_of(said)
    body += _names(tips) if ends else []
    return Picture("".join(body), BOTTOM + 46, _told(title, dots, curves, (low, high)), 720)


def _dot(x: float, y: float, kind: int, colour: str, hover: str) -> str:
    """A round, square or pointed mark, so that two series differ in more than colour."""
    edge = f'fill="{colour}" stroke="#fff"><title>{hover}</title>'
    if kind % 3 == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {edge}</circle>'
    if kind % 3 == 1:
        return f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9" {edge}</rect>'
    return f'<path d="M{x:.1f} {y - 5.5:.1f}l5.5 10h-11z" {edge}</path>'


def _names(tips: Sequence[tuple[float, str]]) -> list[str]:
    """Each curve's name at its right end, pushed apart where curves end close together."""
    out, last = [], -math.inf
    for y, name in sorted(tips):
        last = max(y + 4, last + 15)
        out.append(text(RIGHT + 6, last, name, bold=True))
    return out


def _axes(frame: _Frame, across: str, upward: str) -> list[str]:
    out = [line(LEFT, BOTTOM, RIGHT, BOTTOM), line(LEFT, TOP, LEFT, BOTTOM)]
    out += [text((LEFT + RIGHT) / 2, BOTTOM + 38, across, "middle", 12), text(4, TOP - 12, upward, size=12)]
    doublings = math.log2(frame.high / frame.low)
    every = 1 if doublings < 6 else 2 if doublings < 12 else 4
    for power in range(math.ceil(math.log2(frame.low)), math.floor(math.log2(frame.high)) + 1):
        if power % every == 0:
            x, _ = frame.at(2.0**power, frame.floor)
            out += [line(x, BOTTOM, x, BOTTOM + 5), text(x, BOTTOM + 20, binary_text(2**power), "middle", 12)]
    ratio = frame.ceiling / frame.floor
    marks = (1.0,) if ratio > 300 else (1.0, 2.0, 5.0) if ratio > 3 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    decade = math.floor(math.log10(frame.floor))
    for each in [m * 10.0 ** (decade + k) for k in range(14) for m in marks]:
        if frame.floor <= each <= frame.ceiling:
            _, y = frame.at(frame.low, each)
            out += [line(LEFT, y, RIGHT, y, "1 5"), text(LEFT - 8, y + 4, seconds_text(each), "end", 12)]
    return out


def _told(
    title: str, dots: Mapping[str, Points], curves: Mapping[str, Callable[[float], float]], ends: tuple[float, float]
) -> str:
    """The picture for somebody who cannot see it: each curve at both ends, each point."""
    said = [f"{n}: " + ", ".join(f"{bytes_text(x)} in {seconds_text(f(x))}" for x in ends) for n, f in curves.items()]
    said += [f"{n}: " + ", ".join(f"{bytes_text(x)} in {seconds_text(t)}" for x, t in p) for n, p in dots.items()]
    return "; ".join([title, *said])
