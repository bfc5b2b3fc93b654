"""A planner's answer as pictures: a list of plans with one of them opened, and a map of sizes and devices.

    plan                 memory of the fullest rank          one step
    dp 128  pp 1  tp 2   ####====**+++++       |             ##########==   12 s, 61% MFU
    dp 256  pp 1  tp 1   ###==*+++++++++++++++++ 1,383 GB    refused: at least 1383.1 GB on rank 0, ...
                                               | 75 GB: what a plan may use

All numbers are the plan's own; nothing is computed here.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from labkit.plan.breakdown import KINDS, Breakdown
from labkit.plan.search.explain import simplest
from labkit.plan.search.search import Plan
from labkit.view.svg import KIND_COLOURS, PALETTE, WIDTH, Picture, box, cut, headline, line, text, width_of
from labkit.view.units import metric_text, seconds_text

LABEL, MEMORY, STEP = 6.0, 206.0, 506.0
WIDE, TALL, BAR, TOP = 280.0, 38.0, 20.0, 86.0
SPENT = ("compute", "host", "tp", "dp and pp", "bubble", "optimizer")
"""The parts of a step's time. "host": the device waits for Python; "dp and pp": the communication of both that is not
hidden behind compute, and that of ep."""
SPENT_COLOURS = (PALETTE[0], PALETTE[2], PALETTE[6], PALETTE[1], PALETTE[7], PALETTE[3])
AGAIN = MappingProxyType({"full": ("again",), "selective": ("selective",), "gathers": ("gathers",)})
AGAIN_WORDS = "again: blocks are computed again in backward (checkpointing); selective: their norms and activations are"


def shortlist(judged: Sequence[Plan], kept: int = 6, refused: int = 6) -> list[Plan]:
    """A few of many plans, the best `kept` and some `refused`.

    First the best plan of each layout, best first. Then refused plans: of each strategy, and of each reason other than
    memory, the one with fewest axes, and of these the one that needs least memory."""
    best: dict[object, Plan] = {}
    near: dict[object, Plan] = {}
    for plan in judged:
        if plan.kept:
            best.setdefault(plan.layout, plan)
            continue
        key = plan.recipe.strategy if plan.needs_bytes else re.sub(r"[\d,.]+", "0", plan.refused)
        before = near.get(key)
        near[key] = plan if before is None or _rank(plan) < _rank(before) else before
    return [*best.values()][:kept] + sorted(near.values(), key=lambda plan: not plan.needs_bytes)[:refused]


def _rank(plan: Plan) -> tuple[int, float]:
    return (plan.layout.pp > 1) + (plan.layout.tp > 1), plan.needs_bytes


def strategy_of(plan: Plan) -> str:
    """`ZeRO-3`, or `HSDP of 8` where 8 ranks of many share one copy of the state."""
    return plan.recipe.strategy_law.title


def name_of(plan: Plan) -> tuple[str, str]:
    """Two short lines that name a plan: its layout, and its recipe."""
    lay, r = plan.layout, plan.recipe
    rows = r.batch_size // lay.dp // r.n_micro
    parts = [strategy_of(plan)] * (lay.dp > 1) + [r.schedule] * (lay.pp > 1) + [f"{r.n_micro} x {rows}"]
    axes = f", cp {lay.cp} by {r.context}" * (lay.cp > 1) + f", ep {lay.ep}" * (lay.ep > 1)
    return f"dp {lay.dp}, pp {lay.pp}, tp {lay.tp}{axes}", ", ".join([*parts, *AGAIN.get(r.recompute, ())])


def spent(step: Breakdown) -> dict[str, float]:
    """The seconds of each part of SPENT: the seconds that overlap hides are taken off those of dp and pp. What
    ep and cp send is among them."""
    in_the_open = sum(value for name, value in dict(step).items() if name in ("dp", "pp", "ep", "cp", "overlap"))
    seconds = step["compute"], step["host"], step["tp"], in_the_open, step["bubble"], step["optimizer"]
    return dict(zip(SPENT, seconds, strict=True))


def plan_list(listed: Sequence[Plan], pick: int = 0, title: str = "", headroom: float = 0.0) -> Picture:
    """Each plan's memory by kind beside the device's, and its step, or the reason why it was refused.

    Plan number `pick`, from 0, is opened below, with the formula of each number. `headroom` is the share of the
    device's memory that plans must leave free. ValueError for an empty list, and for a number that is not in it."""
    if not listed or not 0 <= pick < len(listed):
        raise ValueError(f"plan {pick + 1} of {len(listed)} is none that can be shown")
    device = listed[0].hardware.memory_bytes.value
    longest = max((plan.step_s for plan in listed if plan.kept), default=1.0)
    scale = WIDE * 0.78 / device
    kept = sum(plan.kept for plan in listed)
    title = title or f"{kept} kept and {len(listed) - kept} refused plans"
    body = [headline(title), *_legends()]
    bottom = TOP + TALL * len(listed)
    caps = [MEMORY + device * share * scale for share in (1.0, 1 - headroom)]
    for row, plan in enumerate(listed):
        y = TOP + TALL * row
        if row == pick:
            body.append(box(2, y - 4, WIDTH - 4, TALL - 2, "none", "", "opened below", 2))
        first, second = name_of(plan)
        body += [text(LABEL, y + 11, cut(first, 30), bold=True), text(LABEL, y + 26, cut(second, 34), size=11)]
        body += _memory(plan, y, scale, caps) + (_step(plan, y, longest) if plan.kept else _refused(plan, y))
    for x, dash in zip(caps, ("2 3", "9 4"), strict=True):
        body.append(line(x, TOP - 8, x, bottom, dash, 2.0, PALETTE[6]))
    usable = f"{_bytes(device * (1 - headroom))} usable of " * (headroom > 0)
    body.append(text(MEMORY + device * scale - 4, bottom + 12, f"{usable}{_bytes(device)} a device", "end", 12))
    opened, tall = _opened(listed[pick], bottom + 40)
    plans_told = "; ".join(_told(plan) for plan in listed)
    return Picture("".join(body + opened), tall, f"{title}: {plans_told}; opened: {', '.join(name_of(listed[pick]))}")


def _bytes(n_bytes: float) -> str:
    return metric_text(n_bytes, "B")


def _memory(plan: Plan, y: float, scale: float, caps: Sequence[float]) -> list[str]:
    """The memory of the fullest rank as a bar, with its total. A bar too long for the page is cut and has an arrow.

    The total is moved to the left of each line at one of `caps`, the rightmost first, that would cross it."""
    if not plan.kept and not plan.needs_bytes:
        return []
    out, x = [], MEMORY
    for kind, n_bytes in dict(plan.memory).items():
        wide = min(n_bytes * scale, MEMORY + WIDE - x)
        if wide > 0.5:
            out.append(box(x, y, wide, BAR, KIND_COLOURS[KINDS.index(kind)], "", f"{kind}: {n_bytes:,.0f} B"))
        x += max(0.0, wide)
    words = _bytes(plan.memory.total)
    if plan.memory.total * scale > WIDE:  # the bar would go on beyond the page
        out.append(text(MEMORY + WIDE + 2, y + 15, "→", size=15, bold=True))
    end = min(x, MEMORY + WIDE)
    for cap in caps:
        end = cap - 4 if end - width_of(words, 11) - 3 < cap < end + 3 else end
    return [*out, text(end, y + BAR + 10, words, "end", 11)]


def _step(plan: Plan, y: float, longest: float) -> list[str]:
    assert plan.step is not None
    words = f"{seconds_text(plan.step_s)}, {100 * plan.mfu:.0f}% MFU"
    full = WIDTH - STEP - 14 - width_of(words, 12)
    out, x = [], STEP
    for (name, seconds), fill in zip(spent(plan.step).items(), SPENT_COLOURS, strict=True):
        wide = max(0.0, seconds) / longest * full
        if wide > 0.5:
            word = name if wide > width_of(name) + 6 else ""
            out.append(box(x, y, wide, BAR, fill, word, f"{name}: {seconds_text(seconds)}"))
        x += wide
    return [*out, text(x + 6, y + 14, words, size=12)]


def _refused(plan: Plan, y: float) -> list[str]:
    lines = textwrap.wrap(f"refused: {plan.refused}", 46)[:2]
    if len(" ".join(lines)) < len(plan.refused):
        lines[-1] = cut(lines[-1] + " ...", 46)
    return [f"<g><title>refused: {_plain(plan.refused)}</title>"] + [
        text(STEP, y + 9 + 14 * k, words, size=11) for k, words in enumerate(lines)
    ] + ["</g>"]  # fmt: skip


def _plain(words: str) -> str:
    return words.replace("&", "&amp;").replace("<", "&lt;")


def _legends() -> list[str]:
    """The titles of the columns, and the legends of their colours."""
    out = [text(LABEL, 42, "plan", size=12, bold=True)]
    out += [
        text(LABEL, 57, "layout; then strategy,", size=11),
        text(LABEL, 71, "micro-batches x rows of each", size=11),
    ]
    for x, title, names, fills in (
        (MEMORY, "memory of the fullest rank", KINDS[:5], KIND_COLOURS),
        (STEP, "one step: dp and pp in the open", SPENT, SPENT_COLOURS),
    ):
        out.append(text(x, 42, title, size=12, bold=True))
        for k, (name, fill) in enumerate(zip(names, fills, strict=False)):
            at, y = x + 94 * (k % 3), 50 + 14 * (k // 3)
            out += [box(at, y, 9, 9, fill), text(at + 13, y + 9, name, size=11)]
    return out


def _opened(plan: Plan, y: float) -> tuple[list[str], float]:
    """The opened plan, each number with its formula; and the height at which the picture ends."""
    out = [text(4, y, cut(f"opened: {', '.join(name_of(plan))}", 96), bold=True)]
    for words in textwrap.wrap(f"refused: {plan.refused}", 112) if plan.refused else []:
        y += 17
        out.append(text(4, y, words, size=12))
    parts: list[Breakdown] = [plan.memory] if plan.kept or plan.needs_bytes else []
    for part in parts + ([plan.step] if plan.step is not None else []):
        y += 8
        for name, value, formula in [*((i.name, i.value, i.formula) for i in part.items), ("total", part.total, "")]:
            y += 16
            amount = _bytes(value) if part.unit == "B" else seconds_text(value) if value else "0 s"
            out += [text(12, y, name, size=12, bold=name == "total"), text(176, y, amount, "end", 12)]
            out.append(text(190, y, cut(formula, 98), size=11))
    return out, y + 12


def _told(plan: Plan) -> str:
    first, second = name_of(plan)
    if not plan.kept:
        return f"{first}, {second}: refused, {plan.refused}"
    shares = (
        ", ".join(f"{name} {seconds_text(part_s)}" for name, part_s in spent(plan.step).items()) if plan.step else ""
    )
    return f"{first}, {second}: {_bytes(plan.memory.total)}, {seconds_text(plan.step_s)} ({shares})"


# -- the map -----------------------------------------------------------------------------------------------------------

FILLS = (PALETTE[0], PALETTE[1], PALETTE[2], PALETTE[3])
IDEAS = ("one copy each", "state sharded over dp", "and tensor parallel", "and a pipeline")


def ideas_of(plan: Plan) -> int:
    """The place in IDEAS that describes a plan: 0 DDP or one device, 1 ZeRO, 2 with tp, 3 with pp."""
    lay = plan.layout
    return 3 if lay.pp > 1 else 2 if lay.tp > 1 else int(lay.dp > 1 and plan.recipe.cuts.state)


def in_short(plan: Plan) -> str:
    """A plan in few words: `ZeRO-3`, `ZeRO-1, tp 8, pp 4`, `one device`."""
    lay = plan.layout
    parts = [strategy_of(plan)] * (lay.dp > 1)
    parts += [f"{axis} {getattr(lay, axis)}" for axis in ("tp", "pp") if getattr(lay, axis) > 1]
    return ", ".join(parts) or "one device"


def strategy_map(judged: Mapping[tuple[str, int], Sequence[Plan]], title: str = "") -> Picture:
    """A row for each model, a column for each number of devices: the fastest plan, and below it the simplest that fits.

    `judged` maps (model, devices) to the plans of that search, best first. ValueError if it is empty."""
    if not judged:
        raise ValueError("a map needs at least one search: {(model, devices): plans(...)}")
    models, counts = list(dict.fromkeys(m for m, _ in judged)), sorted({n for _, n in judged})
    title = title or "the fastest plan, by size of the model and number of devices"
    wide, tall = (WIDTH - 124) / len(counts), 66.0
    body, cells = [headline(title)], []
    for k, (name, fill) in enumerate(zip(IDEAS, FILLS, strict=True)):
        body += [box(120 + 168 * k, 30, 11, 11, fill), text(120 + 168 * k + 16, 40, name, size=12)]
    for column, n in enumerate(counts):
        body.append(text(120 + (column + 0.5) * wide, 62, f"{n:,} device{'s' * (n > 1)}", "middle", 12, True))
    for row, model in enumerate(models):
        y = 70 + row * tall
        body.append(text(4, y + 36, cut(model, 16), size=12, bold=True))
        for column, n in enumerate(counts):
            plans_ = judged.get((model, n), ())
            best, easy = (plans_[0] if plans_ else None), simplest(plans_)
            x, rooms = 120 + column * wide, (int((wide - 12) / 7), int((wide - 12) / 6.4))  # bold words are wider
            fits = best is not None and best.kept and easy is not None
            body.append(box(x, y, wide - 4, tall - 6, FILLS[ideas_of(best)] if fits and best else "none", "", model))
            lines = ["does not fit" if best else ""]
            if fits and best and easy:
                remark = "".join(f", {word}" for word in AGAIN.get(best.recipe.recompute, ()))
                lines = [in_short(best), f"{100 * best.mfu:.0f}% MFU, {_bytes(best.memory.total)}{remark}"]
                lines.append(f"simplest: {in_short(easy)}" if in_short(easy) != in_short(best) else "the simplest, too")
            ink = ' fill="#111"' if fits else ""
            body += [f"<g{ink}>"] + [
                text(x + 6, y + 18 + 17 * k, cut(words, rooms[k > 0]), size=12 if k == 0 else 11, bold=k == 0)
                for k, words in enumerate(lines)
            ] + ["</g>"]  # fmt: skip
            cells.append(f"{model} on {n}: {', '.join(lines)}")
    y = 70 + len(models) * tall
    body.append(text(120, y + 8, AGAIN_WORDS, size=11))
    return Picture("".join(body), y + 18, f"{title}: {'; '.join(cells)}")
