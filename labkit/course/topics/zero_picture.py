"""The stages of ZeRO: the model state of one rank as four stacks, with a line for the bytes of a device.

    GB |  |opt |
       |  |    |
       |--|grad|--------------------------- device
       |  |par |  |op|par|    ...
       +---DDP-----ZeRO-1-----ZeRO-2-----ZeRO-3
           16 N    4 N + 12 N/n          16 N/n           the law, bytes a parameter, bytes, bytes sent a step

The chosen stage has a frame and the word "chosen"; a measurement is a second stack beside the law's.
"""

from __future__ import annotations

from collections.abc import Mapping

from labkit.plan.breakdown import KINDS, Breakdown
from labkit.plan.pocket.zero_table import NAMES, STAGES, ModelState
from labkit.view import chart
from labkit.view.svg import KIND_COLOURS, PALETTE, cut, round_marks
from labkit.view.units import metric_text, plural

LEFT, RIGHT, TOP, BOTTOM = 76.0, 792.0, 84.0, 300.0
COLUMN = (RIGHT - LEFT) / len(STAGES)
BAR = 66.0
STEP = (BAR + 4) / COLUMN
FAR = 4.0
"""A device with more than this many times the tallest stack is not drawn as a line: stacks would be too flat."""


@chart.style()
def zero_stages(
    state: ModelState,
    stage: int = 1,
    device: tuple[str, float] | None = None,
    measured: Mapping[int, Breakdown] | None = None,
    n_micro: int = 1,
) -> chart.Chart:
    """Bytes of one rank by kind for all stages, with `stage` marked, their laws, and the bytes that a step sends.

    `device` is a name and its bytes; `measured` maps stages to bytes of a run, of which only the model state is drawn.
    ValueError for a stage that does not exist, and for a device without bytes."""
    seen = {
        level: _state_of(breakdown) for level, breakdown in (measured or {}).items() if state.cut(level) is not None
    }
    held = {level: dict(state.held(level)) for level in STAGES}
    state.cut(stage)
    if device is not None and not device[1] > 0:
        raise ValueError(f"a device has more than 0 bytes, got {device}")
    highest = max(sum(level.values()) for level in (*held.values(), *seen.values()))
    near = device is not None and device[1] <= FAR * highest
    ceiling = 1.1 * max(highest, device[1] if device and near else 0.0)
    title = f"{NAMES[stage]}, {_count(state.n_params)} parameters on n = {plural(state.n_ranks, 'rank')}"
    title += f", {state.precision}, {state.optimizer}"
    verdict = _verdict(state, stage, device)
    parts = [f"{NAMES[level]} {state.law(level)} = {_amount(sum(held[level].values()))}" for level in STAGES]
    parts += [f"{NAMES[level]} measured {sum(kinds.values()):,.0f} B" for level, kinds in sorted(seen.items())]
    figure = chart.Chart(BOTTOM + 144, title, f"{title}; {verdict}; " + "; ".join(parts))
    figure.words(4, 42, cut(verdict, 112))
    axes = figure.panel(LEFT, TOP, RIGHT, BOTTOM, xlim=(0, len(STAGES)), ylim=(0, ceiling))
    for level in STAGES:
        pair = [("law", held[level])] + ([("measured", seen[level])] if level in seen else [])
        start = level + 0.5 - len(pair) * STEP / 2
        for k, (name, kinds) in enumerate(pair):
            _stack(axes, f"{NAMES[level]}, {name}", kinds, start + k * STEP, device[1] if device else 0.0)
            if len(pair) > 1:
                figure.words(LEFT + COLUMN * (start + k * STEP) + BAR / 2, BOTTOM + 14, name, "center", fontsize=11)
        _laws(figure, state, level, n_micro)
    unit = ceiling / (BOTTOM - TOP)  # bytes for one unit of the page
    frame = (stage + 3 / COLUMN, -92 * unit, 1 - 6 / COLUMN, ceiling + 116 * unit)
    chart.box(axes, *frame, "none", "", f"chosen: {NAMES[stage]}", edge=2.5)
    figure.words(LEFT + COLUMN * (stage + 0.5), TOP - 8, "chosen", "center", fontsize=12, weight="bold")
    if device and near:
        axes.axhline(device[1], color=PALETTE[6], linestyle=(0, (9, 4)))
    chart.marks(axes, [], round_marks(ceiling), None, lambda n_bytes: _amount(n_bytes) if n_bytes else "0")
    axes.spines[:].set_visible(False)
    _legend(figure, device, near)
    return figure


def _state_of(breakdown: Breakdown) -> dict[str, float]:
    return {kind: breakdown[kind] for kind in KINDS[:3] if kind in breakdown}


def _verdict(state: ModelState, stage: int, device: tuple[str, float] | None) -> str:
    """A sentence with the law and its numbers, and whether they fit the device."""
    total = state.held(stage).total
    law = state.law(stage).replace("N/n", f"N/{state.n_ranks}")
    words = f"each rank holds {law} = {state.bytes_per_param(stage):.3g} bytes a parameter = {_amount(total)}"
    words += f", {state.times_less(stage):.3g} times less than DDP" if stage else ""
    if device is None:
        return words
    return words + (": fits " if total <= device[1] else ": does not fit ") + device[0]


def _stack(axes: chart.Axes, name: str, kinds: Mapping[str, float], x: float, room: float) -> None:
    """One stack, with parameters at the bottom. A kind has no words where the line at `room` bytes would cross them."""
    low, unit = 0.0, axes.get_ylim()[1] / (BOTTOM - TOP)
    for kind, n_bytes in kinds.items():
        crossed = abs(room - low - n_bytes / 2) < 9 * unit
        words = "" if crossed or n_bytes < 16 * unit else _amount(n_bytes)
        if n_bytes:
            colour = KIND_COLOURS[KINDS.index(kind)]
            chart.box(axes, x, low, BAR / COLUMN, n_bytes, colour, words, f"{name}, {kind}: {n_bytes:,.0f} B")
        low += n_bytes


def _laws(figure: chart.Chart, state: ModelState, stage: int, n_micro: int) -> None:
    """Below the stacks: the stage, its law, bytes a parameter, and bytes that a step sends."""
    rows = (
        NAMES[stage],
        state.law(stage),
        f"{state.bytes_per_param(stage):.3g} B × N = {_amount(state.held(stage).total)}",
        f"sends {_amount(state.sent(stage, n_micro))} a step",
    )
    for k, words in enumerate(rows):
        style = {"fontsize": 12} if k else {"weight": "bold"}
        figure.words(LEFT + COLUMN * (stage + 0.5), BOTTOM + 32 + 18 * k, words, "center", **style)


def _legend(figure: chart.Chart, device: tuple[str, float] | None, near: bool) -> None:
    """The legend of the kinds' colours and of the device's line."""
    figure.swatches(LEFT, BOTTOM + 106, zip(KINDS[:3], KIND_COLOURS, strict=False))
    if device:
        figure.rule(BOTTOM + 112, LEFT + 330, LEFT + 358, (0, (9, 4)), PALETTE[6], 2.5)
        where = "" if near else ", above the picture"
        figure.words(LEFT + 364, BOTTOM + 117, f"{cut(device[0], 24)}: {_amount(device[1])}{where}", fontsize=12)
    figure.words(LEFT, BOTTOM + 137, "model state of one rank; activations and buckets come on top", fontsize=12)


def _amount(n_bytes: float) -> str:
    return metric_text(n_bytes, "B")


def _count(value: float) -> str:
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.4g} {word}"
    return f"{value:,.0f}"
