"""A planner's answer as pictures: a list of plans with one of them opened, and a map of sizes and devices.

    plan                 memory of the fullest rank          one step
    dp 128  pp 1  tp 2   ####====**+++++       |             ##########==   12 s, 61% MFU
    dp 256  pp 1  tp 1   ###==*+++++++++++++++++ 1,383 GB    refused: at least 1383.1 GB on rank 0, ...
                                               | 75 GB: what a plan may use

All numbers are the plan's own; nothing is computed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from labkit.plan.breakdown import KINDS, Breakdown
from labkit.plan.search.explain import simplest
from labkit.plan.search.search import Plan
from labkit.view.panels import Column, Panel, below, beside, legend, over, page, paragraph, phrase, space, table, tile
from labkit.view.svg import KIND_COLOURS, PALETTE, WIDTH, Picture, cut, line, width_of
from labkit.view.units import metric_text, seconds_text

NAME, WIDE, BAR, GAP, MODEL = 198.0, 280.0, 20.0, 4.0, 112.0
"""The widths of a plan's name and of the longest bar of memory, the height of bars, the gap between columns, and in the
map the width of a model's name."""
COLUMNS = (Column(width=NAME), Column(width=WIDE + 16), Column(width=290))
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
    caps = [device * share * scale for share in (1.0, 1 - headroom)]
    rows = []
    for number, plan in enumerate(listed):
        last = _step(plan, longest) if plan.kept else _refused(plan)
        row = table(COLUMNS, [(_name(plan), _memory(plan, scale, caps), last)], gap=GAP).padded(top=4, bottom=2)
        rows.append(over(tile(WIDTH - 8, row.height, "none", "", "opened below", 2), row) if number == pick else row)
    listing = below(*rows)

    def limits(x: float, y: float) -> str:
        left, bottom = x + NAME + GAP, y + listing.height
        lines = zip(caps, ("2 3", "9 4"), strict=True)
        return "".join(line(left + cap, y - 4, left + cap, bottom, dash, 2.0, PALETTE[6]) for cap, dash in lines)

    usable = f"{_bytes(device * (1 - headroom))} usable of " * (headroom > 0)
    room = phrase(f"{usable}{_bytes(device)} a device", 12, anchor="end", width=caps[0] - 4)
    plans_told = "; ".join(_told(plan) for plan in listed)
    return page(
        title, _legends(), below(over(listing, Panel(WIDTH - 8, 0, limits)), room.padded(left=NAME + GAP)),
        _opened(listed[pick]), label=f"{title}: {plans_told}; opened: {', '.join(name_of(listed[pick]))}",
    )  # fmt: skip


def _bytes(n_bytes: float) -> str:
    return metric_text(n_bytes, "B")


def _name(plan: Plan) -> Panel:
    first, second = name_of(plan)
    return below(phrase(cut(first, 30), bold=True), phrase(cut(second, 34), 11)).padded(left=4)


def _memory(plan: Plan, scale: float, caps: Sequence[float]) -> Panel:
    """The memory of the fullest rank as a bar, with its total. A bar too long for its column is cut and has an arrow.

    The total is moved to the left of each line at one of `caps`, the rightmost first, that would cross it."""
    if not plan.kept and not plan.needs_bytes:
        return space(0, 0)
    parts, end = [], 0.0
    for kind, n_bytes in dict(plan.memory).items():
        wide = max(0.0, min(n_bytes * scale, WIDE - end))
        hover = f"{kind}: {n_bytes:,.0f} B"
        parts.append(tile(wide, BAR, KIND_COLOURS[KINDS.index(kind)], "", hover) if wide > 0.5 else space(wide, 0))
        end += wide
    if plan.memory.total * scale > WIDE:  # the bar would go on beyond its column
        parts.append(phrase("→", 15, bold=True))
    words = _bytes(plan.memory.total)
    for cap in caps:
        end = cap - 4 if end - width_of(words, 11) - 3 < cap < end + 3 else end
    return below(beside(*parts), phrase(words, 11, anchor="end", width=end))


def _step(plan: Plan, longest: float) -> Panel:
    assert plan.step is not None
    words = f"{seconds_text(plan.step_s)}, {100 * plan.mfu:.0f}% MFU"
    full = COLUMNS[-1].width - 8 - width_of(words, 12)
    parts = []
    for (name, seconds), fill in zip(spent(plan.step).items(), SPENT_COLOURS, strict=True):
        wide = max(0.0, seconds) / longest * full
        word = name if wide > width_of(name) + 6 else ""
        hover = f"{name}: {seconds_text(seconds)}"
        parts.append(tile(wide, BAR, fill, word, hover) if wide > 0.5 else space(wide, 0))
    return beside(*parts, space(6, 0), phrase(words, 12)).padded(bottom=15)  # as high up as the bar of memory


def _refused(plan: Plan) -> Panel:
    words = f"refused: {plan.refused}"
    return paragraph(words, 0.9 * COLUMNS[-1].width, 11, most=2).told(words)  # figures are wider than prose


def _legends() -> Panel:
    """The titles of the columns, and the legends of their colours."""
    what = paragraph("layout; then strategy, micro-batches x rows of each", NAME, 11)
    cells = [below(phrase("plan", 12, bold=True), what).padded(left=4)]
    for title, names, fills in (
        ("memory of the fullest rank", KINDS[:5], KIND_COLOURS),
        ("one step: dp and pp in the open", SPENT, SPENT_COLOURS),
    ):
        keys = [beside(tile(9, 9, fill), phrase(name, 11), gap=4) for name, fill in zip(names, fills, strict=False)]
        keys += [space(0, 0)] * (6 - len(keys))
        grid = table((Column(),) * 3, [keys[:3], keys[3:]], gap=8, lead=0)
        cells.append(below(phrase(title, 12, bold=True), grid))
    return table(COLUMNS, [cells], gap=GAP)


def _opened(plan: Plan) -> Panel:
    """The opened plan, each number with its formula."""
    out = [phrase(cut(f"opened: {', '.join(name_of(plan))}", 96), bold=True)]
    out += [paragraph(f"refused: {plan.refused}", size=12)] if plan.refused else []
    parts: list[Breakdown] = [plan.memory] if plan.kept or plan.needs_bytes else []
    for part in parts + ([plan.step] if plan.step is not None else []):
        rows: list[tuple[str | Panel, ...]] = []
        for name, value, formula in [*((i.name, i.value, i.formula) for i in part.items), ("total", part.total, "")]:
            amount = _bytes(value) if part.unit == "B" else seconds_text(value) if value else "0 s"
            rows.append((name, amount, phrase(cut(formula, 98), 11)))
        columns = (Column(width=90), Column(anchor="end", width=70), Column())
        out.append(table(columns, rows, 12, gap=10, lead=0, total=True).padded(left=8))
    return below(*out, gap=6)


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
    wide = (WIDTH - MODEL - 8) / len(counts) - GAP
    heads = (phrase(f"{n:,} device{'s' * (n > 1)}", 12, True, "middle", wide) for n in counts)
    rows, facts = [beside(space(MODEL, 0), *heads, gap=GAP)], []
    for model in models:
        cells = [phrase(cut(model, 16), 12, bold=True, width=MODEL)]
        for n in counts:
            cell, lines = _fastest(model, judged.get((model, n), ()), wide)
            cells.append(cell)
            facts.append(f"{model} on {n}: {', '.join(lines)}")
        rows.append(beside(*cells, gap=GAP))
    rows.append(phrase(AGAIN_WORDS, 11).padded(left=MODEL + GAP))
    keys = legend(dict(zip(IDEAS, FILLS, strict=True))).padded(left=MODEL + GAP)
    return page(title, keys, below(*rows, gap=6), label=f"{title}: {'; '.join(facts)}")


def _fastest(model: str, plans_: Sequence[Plan], wide: float) -> tuple[Panel, list[str]]:
    """A box of the map with the fastest of some plans and the simplest that fits; and its words."""
    best, easy = (plans_[0] if plans_ else None), simplest(plans_)
    if best is None or easy is None or not best.kept:
        words = "does not fit" if best else ""
        return tile(wide, 60, "none", words, model), [words]
    remark = "".join(f", {word}" for word in AGAIN.get(best.recipe.recompute, ()))
    lines = [in_short(best), f"{100 * best.mfu:.0f}% MFU, {_bytes(best.memory.total)}{remark}"]
    lines.append(f"simplest: {in_short(easy)}" if in_short(easy) != in_short(best) else "the simplest, too")
    rooms = int((wide - 8) / 7), int((wide - 8) / 6.4)  # bold words are wider
    first, *others = lines
    words_ = below(phrase(cut(first, rooms[0]), 12, bold=True), *(phrase(cut(line_, rooms[1]), 11) for line_ in others))
    return over(tile(wide, 60, FILLS[ideas_of(best)], "", model), words_.dark().padded(6, 5)), lines
