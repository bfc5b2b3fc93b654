"""The stages of ZeRO: what one rank holds of the model state, as four stacks, with a line for what a device has.

    GB |  |opt |
       |  |    |
       |--|grad|--------------------------- device
       |  |par |  |op|par|    ...
       +---DDP-----ZeRO-1-----ZeRO-2-----ZeRO-3
           16 N    4 N + 12 N/K          16 N/K           the law, bytes a parameter, bytes, what is sent

The chosen stage has a frame and the word "chosen"; a measurement stands as a second stack beside the law's. Every
stack carries names, so that nothing rests on colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from labkit.plan.breakdown import KINDS, Breakdown
from labkit.plan.sharding import NAMES, STAGES, ModelState
from labkit.view.svg import KIND_COLOURS as COLOURS, PALETTE, Picture, box, cut, headline, line, round_marks, text
from labkit.view.units import metric_text

LEFT, RIGHT, TOP, BOTTOM = 76.0, 792.0, 84.0, 300.0
COLUMN = (RIGHT - LEFT) / len(STAGES)
BAR = 66.0
FAR = 4.0
"""A device of so many times the tallest stack has its line outside of the picture, or the stacks would be slivers."""


def zero_stages(
    state: ModelState,
    stage: int = 1,
    device: tuple[str, float] | None = None,
    measured: Mapping[int, Breakdown] | None = None,
    n_micro: int = 1,
) -> Picture:
    """Bytes of one rank by kind for all stages with `stage` marked, their laws, and what a step sends.

    `device` is a name and its bytes; `measured` maps stages to bytes of a run, whose kinds beyond the model state are
    left out. ValueError for a stage that there is not, and for a device without bytes."""
    seen = {each: _state_of(found) for each, found in (measured or {}).items() if state.cut(each) is not None}
    held = {each: dict(state.held(each)) for each in STAGES}
    state.cut(stage)
    if device is not None and not device[1] > 0:
        raise ValueError(f"a device has more than 0 bytes, got {device}")
    highest = max(sum(each.values()) for each in (*held.values(), *seen.values()))
    near = device is not None and device[1] <= FAR * highest
    ceiling = 1.1 * max(highest, device[1] if device and near else 0.0)
    tall = (BOTTOM - TOP) / ceiling
    title = f"{NAMES[stage]}, {_count(state.n_params)} parameters on K = {state.n_ranks:,} ranks"
    title += f", {state.precision}, {state.optimizer}"
    verdict = _verdict(state, stage, device)
    body = [headline(title), text(4, 42, cut(verdict, 112))]
    for mark in round_marks(ceiling):
        y = BOTTOM - mark * tall
        body += [line(LEFT, y, RIGHT, y, "1 5"), text(LEFT - 6, y + 4, _amount(mark) if mark else "0", "end", 12)]
    for each in STAGES:
        x = LEFT + each * COLUMN
        if each == stage:
            body.append(box(x + 3, TOP - 24, COLUMN - 6, BOTTOM - TOP + 116, "none", "", f"chosen: {NAMES[each]}", 2.5))
            body.append(text(x + COLUMN / 2, TOP - 8, "chosen", "middle", 12, True))
        pair = [("law", held[each])] + ([("measured", seen[each])] if each in seen else [])
        start = x + (COLUMN - len(pair) * (BAR + 4)) / 2
        for k, (name, kinds) in enumerate(pair):
            body += _stack(f"{NAMES[each]}, {name}", kinds, start + k * (BAR + 4), tall, device[1] if device else 0.0)
            if len(pair) > 1:
                body.append(text(start + k * (BAR + 4) + BAR / 2, BOTTOM + 14, name, "middle", 11))
        body += _told(state, each, x + COLUMN / 2, n_micro)
    if device and near:
        y = BOTTOM - device[1] * tall
        body.append(line(LEFT, y, RIGHT, y, "9 4", 2.5, PALETTE[6]))
    body += _legend(device, near)
    parts = [f"{NAMES[each]} {state.law(each)} = {_amount(sum(held[each].values()))}" for each in STAGES]
    parts += [f"{NAMES[each]} measured {sum(kinds.values()):,.0f} B" for each, kinds in sorted(seen.items())]
    return Picture("".join(body), BOTTOM + 144, f"{title}; {verdict}; " + "; ".join(parts))


def _state_of(found: Breakdown) -> dict[str, float]:
    return {kind: found[kind] for kind in KINDS[:3] if kind in found}


def _verdict(state: ModelState, stage: int, device: tuple[str, float] | None) -> str:
    """In words: the law with its numbers, and whether that fits."""
    total = state.held(stage).total
    law = state.law(stage).replace("N/K", f"N/{state.n_ranks}")
    said = f"each rank holds {law} = {state.bytes_per_param(stage):.3g} bytes a parameter = {_amount(total)}"
    said += f", {state.times_less(stage):.3g} times less than DDP" if stage else ""
    if device is None:
        return said
    return said + (": fits " if total <= device[1] else ": does not fit ") + device[0]


def _stack(name: str, kinds: Mapping[str, float], x: float, tall: float, room: float) -> list[str]:
    """One stack, parameters at the bottom; the line of `room` bytes crosses no words."""
    out, y = [], BOTTOM
    for kind, n_bytes in kinds.items():
        high = n_bytes * tall
        y -= high
        if n_bytes:
            crossed = abs(BOTTOM - room * tall - y - high / 2) < 9
            word = _amount(n_bytes) if high >= 16 and not crossed else ""
            out.append(box(x, y, BAR, high, COLOURS[KINDS.index(kind)], word, f"{name}, {kind}: {n_bytes:,.0f} B"))
    return out


def _told(state: ModelState, stage: int, x: float, n_micro: int) -> list[str]:
    """Below the stacks: the stage, its law, bytes a parameter, and bytes that a step sends."""
    y = BOTTOM + 32
    rows = (
        state.law(stage),
        f"{state.bytes_per_param(stage):.3g} B × N = {_amount(state.held(stage).total)}",
        f"sends {_amount(state.sent(stage, n_micro))} a step",
    )
    out = [text(x, y, NAMES[stage], "middle", bold=True)]
    return out + [text(x, y + 18 * (k + 1), words, "middle", 12) for k, words in enumerate(rows)]


def _legend(device: tuple[str, float] | None, near: bool) -> list[str]:
    """Which colour is which kind, and what the line is."""
    out, x = [], LEFT
    for kind in KINDS[:3]:
        out += [box(x, BOTTOM + 106, 12, 12, COLOURS[KINDS.index(kind)]), text(x + 18, BOTTOM + 117, kind, size=12)]
        x += 110
    if device:
        out.append(line(x, BOTTOM + 112, x + 28, BOTTOM + 112, "9 4", 2.5, PALETTE[6]))
        where = "" if near else ", above the picture"
        out.append(text(x + 34, BOTTOM + 117, f"{cut(device[0], 24)}: {_amount(device[1])}{where}", size=12))
    return [*out, text(LEFT, BOTTOM + 137, "model state of one rank; activations and buckets come on top", size=12)]


def _amount(n_bytes: float) -> str:
    return metric_text(n_bytes, "B")


def _count(value: float) -> str:
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.4g} {word}"
    return f"{value:,.0f}"
