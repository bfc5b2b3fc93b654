"""Where the time of a step goes, how that scales, and what to watch while it runs.

    speed-up |      / ideal                     communication  |######   | 22 ms, 41%
             |    /   ____ what if                             |==       | 6 ms
             |  o o--- . . law                  data           |###      | 11 ms, 20%
             |___________ ranks                                |###      | 11 ms

Left Amdahl's law with what was measured, right a recorded step by its parts, and what is left of each when some shrink.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from labkit.plan.bottlenecks import WORK, RankTime, culprit, gain, outside, scaled, shrunk, split
from labkit.plan.breakdown import Breakdown
from labkit.plan.scaling import amdahl, fit_serial
from labkit.probe.intervals import common, union, without
from labkit.probe.recording import Recording
from labkit.view.axes import Axes, Point
from labkit.view.svg import PALETTE, Picture, box, headline, line, text
from labkit.view.units import bytes_text, number_text, seconds_text

LAW, IF, IDEAL, SEEN, GUESS = "#2B8CD6", PALETTE[6], PALETTE[7], PALETTE[2], PALETTE[4]
MOST = 1024
"""The last number of ranks of a curve."""


def split_of(recording: Recording, data: str = "data", flops: float = 0.0, peak_flops: float = 0.0) -> Breakdown:
    """A recorded step of all ranks by its bottlenecks (see plan.bottlenecks); spans named `data` are time for input.

    ValueError for a recording of no time."""
    times = []
    for row in recording.rows:
        mine = recording.parts[row.rank]
        reads = common(union((span.t0, span.t1) for span in row.spans if span.name == data), mine.compute)
        times.append(RankTime(without(mine.compute, reads), mine.exposed, mine.bubble, reads))
    return split(times, flops, peak_flops)


def speed_up(
    measured: Mapping[int, float],
    serial: float,
    guess: tuple[int, float] | None = None,
    title: str = "",
    most: int = 64,
) -> Picture:
    """Amdahl's law for a serial share (0 to 1), measured speed-ups as dots, and a prediction (ranks, speed-up).

    ValueError for a share outside 0 to 1."""
    points = [(n, x) for n, x in sorted(measured.items())]
    top = max([x for _, x in points] + [amdahl(most, serial)] + ([guess[1]] if guess else [])) * 1.25
    axes = _axes(64, 84, 640, 330, points + ([(guess[0], guess[1])] if guess else []), top, most)
    limit = "no limit" if not serial else f"never above {1 / serial:.3g}"
    label = title or "speed-up over one rank"
    body = [headline(f"{label}: serial share {serial:.1%}, {limit}", width=700), *_frame(axes), *_ideal(axes)]
    body.append(axes.path([(n, amdahl(n, serial)) for n in _steps(axes.x[1])], LAW))
    body += _key(64, 62, [("law", LAW, ""), ("ideal", IDEAL, "2 3")])
    for n, x in points:
        body.append(axes.dot(n, x, SEEN, f"measured on {n:g} rank{'s' if n > 1 else ''}: {x:.3g} times as fast"))
    x = 240.0
    for name, mark in (("measured", _dot(x, 58)), ("your prediction", _diamond(x + 110, 58))):
        if name == "measured" or guess:
            body += [mark, text(x + 12, 62, name, size=12)]
            x += 110
    words = f"{label}: law with serial share {serial:.1%}, {limit}"
    if guess:
        body.append(axes.diamond(*guess, GUESS))
        words += f"; you predicted {guess[1]:.3g} times on {guess[0]} ranks"
    words += "".join(
        f"; measured on {n:g} rank{'s' if n > 1 else ''} {x:.3g}, law {amdahl(n, serial):.3g}" for n, x in points
    )
    return Picture("".join(body), 376, words, 700)


def explored(
    splits: Mapping[int, Breakdown], serial: float, n_ranks: int, faster: Mapping[str, float], title: str = ""
) -> Picture:
    """Recorded steps {n_ranks: split}, Amdahl's law for `serial`, and what is left where parts are `faster`.

    The bars are those of the largest recorded size up to `n_ranks`. Speed-ups are over the smallest recorded size, each
    curve over its own. ValueError for fewer than two sizes, and parts that are not there."""
    if len(splits) < 2:
        raise ValueError(f"a curve needs recorded steps of two sizes or more, got those of {sorted(splits)} ranks")
    after = {n: shrunk(steps, faster) for n, steps in splits.items()}
    was, now = ([(r.n_ranks, r.speed_up) for r in scaled({n: s.total for n, s in steps.items()})]
                for steps in (splits, after))  # fmt: skip
    changed = any(times != 1 for times in faster.values())
    rest = fit_serial(now) if changed else serial
    here = max((n for n in splits if n <= n_ranks), default=min(splits))
    before, left = splits[here], after[here]
    title = title or f"{here} rank{'s' * (here != 1)}: {seconds_text(before.total)} a step"
    title += f", most lost to {culprit(before)}" if any(before[part] for part in before if part not in WORK) else ""
    if changed:
        title += f"; then {seconds_text(left.total)}, {before.total / left.total:.3g} times as fast"
    law = f"at {n_ranks:,} ranks, by Amdahl's law: {_times(n_ranks, serial)}"
    if changed:
        law += f"; what if: {_times(n_ranks, rest)}"
    top = max([x for _, x in (*was, *now)] + [amdahl(MOST, serial), amdahl(MOST, rest)]) * 1.4
    axes = _axes(50, 96, 372, 350, was + now, top, MOST)
    body = [headline(title), text(4, 42, law, size=13 if len(law) < 105 else 12), *_frame(axes), *_ideal(axes)]
    keys = [("law", LAW, ""), ("ideal", IDEAL, "2 3")] + [("what if", IF, "8 4")] * changed
    body += _key(50, 76, keys) + [axes.path([(n, amdahl(n, serial)) for n in _steps(MOST)], LAW)]
    if changed:
        body.append(axes.path([(n, amdahl(n, rest)) for n in _steps(MOST)], IF, "8 4"))
        body += [axes.cross(n, x, IF, f"what if, on {n} ranks: {x:.3g} times as fast") for n, x in now[1:]]
    body += [axes.dot(n, x, SEEN, f"measured on {n} ranks: {x:.3g} times as fast") for n, x in was]
    body += [axes.diamond(n_ranks, amdahl(n_ranks, serial), GUESS), *_parts(before, left, changed)]
    told = ", ".join(f"{name} {seconds_text(before[name])}" for name in before)
    seen = ", ".join(f"{x:.3g} on {n}" for n, x in was)
    return Picture("".join(body), 412, f"{title}. {law}. Measured: {seen}. Parts: {told}")


def dashboard(
    watched: Mapping[str, tuple[Sequence[float], str]],
    limits: Mapping[str, tuple[float, float]] | None = None,
    title: str = "a run, watched",
) -> Picture:
    """A small chart over the steps for each watched number: name -> (values, unit), two side by side.

    `limits` are name -> (low, high): they are drawn, and steps outside are crossed and named. ValueError for nothing to
    watch, and numbers of different length."""
    limits = dict(limits or {})
    lengths = {len(values) for values, _ in watched.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"a dashboard needs as many values of each number, got {sorted(lengths)}")
    outlying = {
        name: outside(values, *limits.get(name, (-math.inf, math.inf))) for name, (values, _) in watched.items()
    }
    alarms = [f"{name} out of its limits from step {steps[0]}" for name, steps in outlying.items() if steps]
    outcome = "; ".join(alarms) if alarms else "all within limits" if limits else "no limits"
    body = [headline(f"{title}: {outcome}")]
    for k, (name, (values, unit)) in enumerate(watched.items()):
        left, top = 74.0 + 400 * (k % 2), 60.0 + 122 * (k // 2)
        body += _chart(name, values, unit, limits.get(name), outlying[name], left, top)
    told = "; ".join(
        f"{name}: first {_short(values[0], unit)}, last {_short(values[-1], unit)}"
        for name, (values, unit) in watched.items()
    )
    return Picture("".join(body), 60 + 122 * ((len(watched) + 1) // 2), f"{title}: {outcome}. {told}")


def _chart(
    name: str, values: Sequence[float], unit: str, limits: tuple[float, float] | None, out: Sequence[int], *at: float
) -> list[str]:
    left, top = at
    shown = [v for v in values if math.isfinite(v)] or [0.0]
    near = [v for v in limits or () if 0 < abs(v) <= 2 * max(map(abs, shown))]  # one far off would flatten the rest
    low, high = min(0.0, *shown, *near), max(0.0, *shown, *near)
    high += 0.1 * (high - low) or 1.0
    axes = Axes(left, top, left + 300, top + 72, (0.0, max(1.0, len(values) - 1.0)), (low, high))
    body = [text(left, top - 8, f"{name}: {_short(values[-1], unit)}", bold=True)]
    body += [line(left, top, left, top + 72), line(left, top + 72, left + 300, top + 72)]
    body.append(text(left - 6, axes.at(0, max(shown))[1] + 4, _short(max(shown), unit), "end", 11))
    for k in sorted({0, len(values) - 1}):
        body.append(text(axes.at(k, low)[0], top + 87, f"step {k}" if k else "0", "middle", 11))
    for limit in near:
        y = axes.at(0, limit)[1]
        body.append(line(left, y, left + 300, y, "6 4"))
    body.append(axes.path(list(enumerate(values)), LAW))
    return body + [axes.cross(k, values[k], IF, f"step {k}: {_short(values[k], unit)}") for k in out
                   if math.isfinite(values[k])]  # fmt: skip


def _short(value: float, unit: str) -> str:
    if unit in ("B", "s"):
        return bytes_text(value) if unit == "B" else seconds_text(value)
    return f"{value:,.0f} {unit}".strip() if abs(value) >= 100 else f"{value:.3g} {unit}".strip()


def _parts(before: Breakdown, left: Breakdown, changed: bool) -> list[str]:
    """Right: a bar for each part, what is left of it below, and what its vanishing would bring."""
    body, y, zero = [text(400, 76, "a step by its parts" + ", and what if" * changed, bold=True)], 92.0, 526.0
    full = 130.0 / max(before[name] for name in before)
    for name in before:
        share, won = before[name] / before.total, gain(before, name)
        fill = PALETTE[0] if name in WORK else PALETTE[1]
        body += [text(400, y + 12, "underused" if name == "underutilisation" else name, bold=True)]
        if fill == PALETTE[1]:
            body.append(text(400, y + 29, f"gone: {won:.3g} x", size=12))
        words = f"{seconds_text(before[name])}, {share:.0%}" if before[name] else "0"
        body.append(box(zero, y, max(1.5, before[name] * full), 16, fill, "", escape(f"{name}: {words}")))
        body.append(text(zero + 8 + before[name] * full, y + 12, words, size=12))
        if changed:
            words = seconds_text(left[name]) if left[name] else "0"
            body.append(box(zero, y + 18, max(1.5, left[name] * full), 16, GUESS, "", f"what if: {words}"))
            body.append(text(zero + 8 + left[name] * full, y + 30, words, size=12))
        y += 50
    return [*body, line(zero, 88, zero, y - 8)]


def _times(n: int, serial: float) -> str:
    speed = amdahl(n, serial)
    share = f"{speed / n:.0%}" if speed / n > 0.01 else f"{speed / n:.2%}"
    limit = f"limit {1 / serial:.3g}" if serial else "no limit"
    return f"{number_text(round(speed, 2))} times, {share} efficient, {limit}"


def _steps(most: float) -> list[float]:
    return [2 ** (k / 4) for k in range(int(4 * math.log2(most)) + 1)]


def _axes(
    left: float, top: float, right: float, bottom: float, points: Sequence[Point], high: float, most: int
) -> Axes:
    low = min([1.0] + [x for _, x in points]) / 1.15
    last = max([float(most)] + [n for n, _ in points])
    return Axes(left, top, right, bottom, (1.0, last), (low, max(high, 2.0)), log_x=True, log_y=True)


def _frame(axes: Axes) -> list[str]:
    powers = [2.0**k for k in range(-8, 15)]
    every = 2 if axes.x[1] > 100 else 1
    across = [x for x in powers[8::every] if x <= axes.x[1]]
    marks = powers if axes.y[1] > 8 * axes.y[0] else [0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0]
    up = [y for y in marks if axes.y[0] <= y <= axes.y[1]]
    return axes.frame("ranks", number_text, number_text, across, up)


def _ideal(axes: Axes) -> list[str]:
    end = min(axes.x[1], axes.y[1])
    return [axes.path([(1.0, 1.0), (end, end)], IDEAL, "2 3")]


def _key(x: float, y: float, names: Sequence[tuple[str, str, str]]) -> list[str]:
    body = []
    for name, colour, dash in names:
        body += [line(x, y - 4, x + 24, y - 4, dash, 2.5, colour), text(x + 30, y, name, size=12)]
        x += 46 + 7 * len(name)
    return body


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="5" fill="{SEEN}" stroke="#fff"/>'


def _diamond(x: float, y: float) -> str:
    return f'<path d="M{x:g} {y - 7:g}l7 7l-7 7l-7-7z" fill="{GUESS}" stroke="currentColor"/>'
