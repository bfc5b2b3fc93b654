"""A whiteboard: the question with its symbols, then the learner's formula and the truth over one symbol.

before an answer    name, meaning, unit and a range of every symbol
after it            truth (solid) and the learner's formula (dashed), shaded where they differ, for given values of the
                    other symbols
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from labkit.course.whiteboard.derivation import Derivation, Symbol
from labkit.course.whiteboard.formula import Formula
from labkit.view import chart
from labkit.view.panels import Column, page, phrase, table
from labkit.view.svg import PALETTE, WIDTH, Picture
from labkit.view.units import metric_text, number_text, seconds_text

TRUTH, MINE, APART = PALETTE[2], chart.LINES[0], PALETTE[7]
LEFT, TOP, RIGHT, BOTTOM = 92.0, 92.0, 776.0, 330.0
POINTS = 40


def question(asked: Derivation) -> Picture:
    """The symbols of a question, before anybody has answered."""
    columns = [Column("symbol"), Column("what it is", width=386), Column("unit", width=112), Column("drawn from")]
    rows, meanings = [], []
    for symbol in asked.symbols:
        name, means, unit, ends = _row(symbol)
        rows.append((phrase(name, bold=True), means, unit, ends))
        meanings.append(f"{name}: {means}" + f" in {unit}" * bool(unit))
    wanted = phrase(f"wanted: {asked.unit or 'a plain number'}", bold=True)
    label = f"{asked.name}: {asked.question} {'; '.join(meanings)}"
    return page(asked.name, table(columns, rows, lead=6, width=WIDTH - 8), wanted, label=label)


def _row(symbol: Symbol) -> tuple[str, str, str, str]:
    ends = f"{_short(symbol.low)} to " + (f"{symbol.below} - 1" if symbol.below else _short(symbol.high))
    return symbol.name, symbol.means, symbol.unit or "–", ends


@chart.style()
def whiteboard(
    asked: Derivation, formula: Formula, along: str, at: Mapping[str, float], title: str = ""
) -> chart.Chart:
    """`formula` and the truth over the symbol `along`; the other symbols have their values of `at`.

    KeyError for a symbol that the question does not have; ValueError if the truth has no finite value in the range."""
    symbol, fixed = asked.symbol(along), {name: value for name, value in at.items() if name != along}
    low, high = float(symbol.low), float(at[symbol.below] - 1 if symbol.below else symbol.high)
    high = max(high, low + 1)
    log_x = low > 0 and high > 30 * low
    xs = _places(low, high, log_x, symbol.whole)
    truth = [(x, asked.formula.number({**at, along: x})) for x in xs]
    answer = [(x, formula.number({**at, along: x})) for x in xs]
    values = [y for _, y in (*truth, *answer) if math.isfinite(y)]
    if not any(math.isfinite(y) for _, y in truth):
        raise ValueError(f"{asked.name} has no value for {along} from {_short(low)} to {_short(high)}")
    log_y = min(values) > 0 and max(values) > 300 * min(values)
    ends = (min(values) / 1.3, max(values) * 1.3) if log_y else _room(min(0.0, *values), max(values))
    pairs = zip(truth, answer, strict=True)
    apart = [x for (x, a), (_, b) in pairs if not math.isclose(a, b, rel_tol=max(asked.tolerance, 1e-9))]
    words = _parting(along, apart, xs)
    last, yours = (_value(points[-1][1], asked.unit) for points in (truth, answer))
    label = f"{asked.name} over {along}: {words}; at {along} = {_short(xs[-1])} the truth is {last}, yours {yours}"
    figure = chart.Chart(BOTTOM + 48, title or asked.name, label)
    axes = figure.panel(LEFT, TOP, RIGHT, BOTTOM, xlim=(low, high), xlabel=f"{along}: {symbol.means}")
    axes.set(xscale="log" if log_x else "linear", yscale="log" if log_y else "linear", ylim=ends)
    axes.margins(0)
    for name, points, colour, dash, width in (
        ("truth", truth, TRUTH, "-", 4),
        ("yours", answer, MINE, (0, (8, 5)), 2.5),
    ):
        heights = [y if math.isfinite(y) else math.nan for _, y in points]
        axes.plot(xs, heights, color=colour, linestyle=dash, linewidth=width, label=name)
    strokes = [
        (x, *((a, b) if math.isfinite(a) and math.isfinite(b) else ends))
        for (x, a), (_, b) in zip(truth, answer, strict=True)
        if x in apart
    ]
    axes.vlines(*(zip(*strokes, strict=True) if strokes else ([], [], [])), APART, linewidth=3, zorder=0.9, label=words)
    twos = [2.0**k for k in range(40)] if log_x and high <= 200 * low else None
    chart.marks(axes, twos, None, _short, lambda y: _value(y, asked.unit))
    figure.keys(4, 41, axes, fontsize=13)
    others = ", ".join(f"{name} = {_short(value)}" for name, value in fixed.items())
    figure.words(4, 70, f"with {others}" if others else "there is no other symbol", fontsize=12)
    return figure


def _parting(along: str, where: list[float], xs: list[float]) -> str:
    """The values at which formula and truth differ, in words: `where` are those, `xs` are all values."""
    if not where:
        return "nowhere apart"
    if len(where) == len(xs):
        return "apart everywhere"
    if where == xs[xs.index(where[0]) :]:
        return f"apart from {along} = {_short(where[0])} on"
    if where == xs[: len(where)]:
        return f"apart up to {along} = {_short(where[-1])}"
    return f"apart at {len(where)} of {len(xs)} values of {along}"


def _places(low: float, high: float, log: bool, whole: bool) -> list[float]:
    """The values at which the curves are computed; whole numbers for a whole symbol."""
    steps = [k / (POINTS - 1) for k in range(POINTS)]
    places = [low * (high / low) ** t if log else low + (high - low) * t for t in steps]
    return sorted({float(round(place)) for place in places}) if whole else places


def _room(low: float, high: float) -> tuple[float, float]:
    return (low * 1.05, high * 1.08) if high > low else (low, low + 1.0)


def _value(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "no value"
    if unit == "s":
        return seconds_text(value) if value else "0 s"
    return metric_text(value, "B") if unit == "B" else _short(value)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e5 else number_text(value)
