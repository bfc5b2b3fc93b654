"""Time against size: measured points, the fitted line, and the laws of ring, tree and star on that line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from labkit.plan.collectives import ALGORITHMS, Line, crossover_bytes, seconds
from labkit.view.svg import PALETTE, Picture, bytes_text, line, seconds_text, text

LEFT, RIGHT, TOP, BOTTOM = 74, 660, 40, 330


def fitted(samples: Sequence[tuple[float, float]], link: Line, title: str = "one message between two ranks") -> Picture:
    """Measured (bytes, seconds) as dots, alpha + bytes * beta as a line; both axes logarithmic."""
    said = f"alpha {seconds_text(link.alpha_s)}, {link.bandwidth / 1e9:.2f} GB/s"
    return _plot({"measured": samples}, {f"fit: {said}": link.seconds}, title)


def laws(n_ranks: int, link: Line, measured: Mapping[str, Sequence[tuple[float, float]]] | None = None) -> Picture:
    """all_reduce by ring, tree and star on `n_ranks`: the laws as lines, measurements as dots, and the crossover."""
    curves = {name: _law(name, n_ranks, link) for name in ALGORITHMS}
    cross = crossover_bytes(n_ranks, link)
    where = f"ring and tree meet at {bytes_text(round(cross))}" if 0 < cross < math.inf else "ring and tree do not meet"
    return _plot(measured or {}, curves, f"all_reduce on {n_ranks} ranks: {where}", cross)


def _law(name: str, n_ranks: int, link: Line) -> Callable[[float], float]:
    return lambda n_bytes: seconds(name, "all_reduce", n_ranks, n_bytes, link)


def _plot(
    dots: Mapping[str, Sequence[tuple[float, float]]],
    curves: Mapping[str, Callable[[float], float]],
    title: str,
    mark: float = 0.0,
) -> Picture:
    sizes = [size for points in dots.values() for size, _ in points] or [64.0, float(64 << 20)]
    low, high = max(1.0, min(sizes) / 2), max(sizes) * 2
    xs = [low * (high / low) ** (i / 60) for i in range(61)]
    times = [t for points in dots.values() for _, t in points] + [f(x) for f in curves.values() for x in xs]
    times = [t for t in times if t > 0] or [1e-6, 1.0]
    floor, ceiling = min(times) / 1.5, max(times) * 1.5

    def at(x: float, t: float) -> tuple[float, float]:
        across = math.log(x / low) / math.log(high / low)
        up = math.log(max(t, floor) / floor) / math.log(ceiling / floor)
        return LEFT + across * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)

    body = [text(4, 20, title, size=15, bold=True), *_axes(low, high, floor, ceiling, at)]
    names = list(curves) + [name for name in dots if name not in curves]
    for i, name in enumerate(names):
        colour = PALETTE[(5, 6, 2, 3)[i % 4]]
        if name in curves:
            points = [at(x, curves[name](x)) for x in xs]
            path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
            body.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for size, t in dots.get(name, ()):
            px, py = at(size, t)
            hover = f"<title>{name}: {bytes_text(size)} in {seconds_text(t)}</title>"
            body.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4.5" fill="{colour}" stroke="#fff">{hover}</circle>')
        body.append(f'<rect x="{LEFT + 12}" y="{TOP + 8 + 20 * i}" width="14" height="10" fill="{colour}"/>')
        body.append(text(LEFT + 32, TOP + 18 + 20 * i, name))
    if low < mark < high:
        px, _ = at(mark, floor)
        body.append(line(px, TOP, px, BOTTOM, "5 4"))
        body.append(text(px + 5, BOTTOM - 8, bytes_text(round(mark))))
    return Picture("".join(body), 372, title, 720)


def _axes(
    low: float, high: float, floor: float, ceiling: float, at: Callable[[float, float], tuple[float, float]]
) -> list[str]:
    out = [line(LEFT, BOTTOM, RIGHT, BOTTOM), line(LEFT, TOP, LEFT, BOTTOM)]
    power = math.ceil(math.log2(low))
    while 2**power <= high:
        if power % 4 == 0:
            x, _ = at(2.0**power, floor)
            out += [line(x, BOTTOM, x, BOTTOM + 5), text(x, BOTTOM + 20, bytes_text(2**power), "middle", 12)]
        power += 1
    decade = math.ceil(math.log10(floor))
    few = ceiling / floor < 300
    for each in [m * 10.0 ** (decade + k) for k in range(-1, 12) for m in ((1, 2, 5) if few else (1,))]:
        if floor <= each <= ceiling:
            _, y = at(low, each)
            out += [line(LEFT, y, RIGHT, y, "1 5"), text(LEFT - 8, y + 4, seconds_text(each), "end", 12)]
    return out
