"""explain: a search's result in the order in which a good answer to "how would you train this?" is given.

    1  memory          what must be held, and how many devices that takes at least
    2  baselines       one device, then plain data parallelism: why they do or do not do
    3  simplest        the plan with the fewest axes that fits, and the fastest one
    4  communication   bytes over each link, and whether they hide
    5  batch           rows, micro-batches, accumulation, tokens of a step

Pure text, every number with its formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from labkit.plan.breakdown import Breakdown
from labkit.plan.job.recipe import STRATEGIES
from labkit.plan.model.shape import ModelShape
from labkit.plan.search.search import Plan, gb
from labkit.plan.text_columns import in_columns
from labkit.plan.words import plural

GB = 1e9
WAITS = ("tp", "cp", "ep", "pp", "dp", "overlap", "bubble")
"""Parts of a step in which nothing is computed; "overlap" takes off what is sent meanwhile."""


COLUMNS = (
    ("micro", "micro-batches that each rank of dp takes in a step, and the rows in each"),
    ("recompute", "what backward runs again instead of keeping it"),
    ("exposed", "share of the step in which the slowest rank waits for communication that no computing hides"),
    ("bubble", "share of the step in which it waits for the other stages of a pipeline"),
    ("expected", "seconds of a step with those to expect for what made published runs like it slower"),
)
"""The columns of a table of plans that need a word."""


def heading(judged: Sequence[Plan]) -> str:
    """The question that plans answer, in one line: model, devices, rows, tokens, precision, optimizer.

    ValueError for no plans."""
    plan = _first(judged)
    shape, r, hw = plan.shape, plan.recipe, plan.hardware
    n, tokens = plan.layout.size, r.batch_size * shape.seq
    trains = f"{plan.adapter}" if plan.adapter is not None else r.optimizer
    return (
        f"{shape.name or 'the model'} on {n:,} {hw.name}, {hw.node_size} a node: {r.batch_size:,} rows x "
        f"{shape.seq:,} = {tokens:,} tokens a step, {r.precision}, {trains}"
    )


def rows(judged: Sequence[Plan], count: int = 10) -> list[tuple[str, ...]]:
    """The names of the columns, and then the first `count` kept plans, in words; "expected" where one has a risk."""
    mixed = any(plan.shape.n_expert for plan in judged[:1])  # only then there is an ep
    long = any(plan.layout.cp > 1 for plan in judged)
    axes = ("dp", "pp", "tp", *["cp"] * long, *["ep"] * mixed)
    names = (*axes, "strategy", "schedule", "micro", "recompute", "step", "MFU", "memory", "exposed", "bubble")
    fragile = any(plan.risks for plan in judged[:count])
    names += ("expected",) * fragile
    lines = [names]
    for plan in [plan for plan in judged if plan.kept][:count]:
        lay, r, step = plan.layout, plan.recipe, plan.step
        assert step is not None
        schedule = f"{r.schedule} x{r.stages_per_rank}" if r.stages_per_rank > 1 else r.schedule
        micro_rows, bubble = r.batch_size // lay.dp // r.n_micro, step["bubble"]
        lines.append((
            str(lay.dp), str(lay.pp), str(lay.tp), *[_context(plan)] * long, *[str(lay.ep)] * mixed, _strategy(plan),
            schedule if lay.pp > 1 else "-", f"{r.n_micro} x {micro_rows}",
            {"none": "-"}.get(r.recompute, r.recompute), f"{step.total:.3g} s",
            f"{100 * plan.mfu:.0f}%", gb(plan.memory.total),
            f"{100 * (waiting_s(step) - bubble) / step.total:.0f}%", f"{100 * bubble / step.total:.0f}%",
            *[f"{plan.expected_s:.3g} s"] * fragile,
        ))  # fmt: skip
    return lines


def table(judged: Sequence[Plan], count: int = 10, refused: int = 0) -> str:
    """The first `count` kept plans, and `refused` of the others with their reasons, in columns."""
    return "\n".join([*in_columns(rows(judged, count)), *refusals(judged, refused)])


def refusals(judged: Sequence[Plan], count: int) -> list[str]:
    """A line with the reason for each of the first `count` refused plans."""
    return [f"refused: {plan}" for plan in [plan for plan in judged if not plan.kept][:count]]


def _strategy(plan: Plan) -> str:
    shared = plan.layout.dp * plan.layout.cp > 1
    if plan.adapter is not None:
        return plan.adapter.kind + " zero3" * plan.recipe.cuts.weights
    return plan.recipe.sharded if shared else "-"


def _context(plan: Plan) -> str:
    return f"{plan.layout.cp} {plan.recipe.context}" if plan.layout.cp > 1 else "1"


def explain(judged: Sequence[Plan]) -> str:
    """Five paragraphs about the plans of one search. ValueError for none."""
    return "\n".join(
        [_memory(_first(judged)), _baselines(judged), _simplest(judged), _communication(judged), _batch(judged)]
    )


def _first(judged: Sequence[Plan]) -> Plan:
    if not judged:
        raise ValueError("there are no plans to explain: ask plans(...) first")
    return judged[0]


def waiting_s(step: Breakdown) -> float:
    """Seconds of a step in which the slowest rank waits: communication that nothing hides, and the bubble."""
    return sum(value for name, value in dict(step).items() if name in WAITS)


def simplest(judged: Sequence[Plan]) -> Plan | None:
    """The kept plan with the fewest ideas in it (axes, then strategy, checkpointing, stages), fastest of its kind."""

    def ideas(plan: Plan) -> tuple[float, ...]:
        lay, r = plan.layout, plan.recipe
        shared = STRATEGIES.index(r.strategy) * (lay.dp * lay.cp > 1) + (r.shard_ranks is not None)
        return _axes(plan), shared, r.recompute == "full", r.stages_per_rank, plan.step_s

    return min((plan for plan in judged if plan.kept), key=ideas, default=None)


def _axes(plan: Plan) -> int:
    """The number of axes besides dp along which a plan cuts."""
    lay = plan.layout
    return sum(size > 1 for size in (lay.pp, lay.tp, lay.cp, lay.ep))


def _memory(plan: Plan) -> str:
    shape, room = plan.shape, plan.hardware.memory_bytes.value
    n, r = shape.n_params, plan.recipe
    if plan.adapter is not None:
        memory, where = plan.memory, "cut over all, on each" if plan.recipe.cuts.weights else "whole on each"
        frozen, trains = memory.item("parameters"), memory["gradients"] + memory["optimizer"]
        return (
            f"1 memory         {shape.name or 'the model'} has {n / GB:.3g}e9 parameters, which are frozen. Weights "
            f"{frozen.formula} = {gb(frozen.value)}, gradients and AdamW of the {plan.adapter} "
            f"({plan.adapter.numel(shape):,} numbers) {gb(trains)}: {where} device of {room / GB:.0f} GB."
        )
    state = r.steps_by.state_words(r.state_bytes, r.has_masters)
    n_bytes = r.weight_bytes + r.gradient_bytes + float(state)
    by_adam, law = "", r.steps_by.by_matrix
    if law and r.steps_by.elementwise > law.elements:
        by_matrix = (r.steps_by.elementwise - law.elements) * r.state_bytes
        by_adam = f" ({by_matrix} B more for what is no matrix of a block)"
    if law and law.words:
        by_adam += f" (besides: {law.words})"
    return (
        f"1 memory         {shape.name or 'the model'} has {n / GB:.3g}e9 parameters{_active(shape)}. "
        f"Weights {r.weight_bytes} B, "
        f"gradients {r.gradient_bytes} B, {r.optimizer}{' with masters' * r.has_masters} {state} B{by_adam}: "
        f"{n_bytes:g} N = {n_bytes * n / GB:,.0f} GB, so at least "
        f"{-(-n_bytes * n // room):,.0f} devices of {room / GB:.0f} GB before any activation."
        + " The blocks' linears multiply 8-bit copies; MFU is of the peak of bf16."
        * r.eight_bits
    )


def _active(shape: ModelShape) -> str:
    """Of a model with experts, how much of it one token meets."""
    if not shape.n_expert:
        return ""
    sizes = shape.parameters
    return (
        f", of which a token meets {shape.n_active / GB:.3g}e9 ({shape.top_k} of {shape.n_expert} experts"
        f"{f' and {shape.n_shared} shared' * (shape.n_shared > 0)}; "
        f"{(shape.n_active - sizes['token embedding']) / GB:.3g}e9 without the token embedding): all must be held, and "
        f"only those are multiplied with"
    )


def _baselines(plans: Sequence[Plan]) -> str:
    plain = [plan for plan in plans if _axes(plan) == 0]
    for strategy in STRATEGIES:
        fits = [plan for plan in plain if plan.recipe.strategy == strategy and plan.kept]
        if fits:
            least = "one device" if fits[0].layout.size == 1 else "data parallelism alone"
            return f"2 baselines      {least} does: {fits[0]}"
    last = [plan for plan in plain if plan.recipe.cuts.weights and plan.recipe.shard_ranks is None] or plain
    why = last[-1].refused if last else "no layout has dp alone"
    if last and last[-1].adapter is not None:
        how = "not even cut over all devices" if last[-1].recipe.cuts.weights else "whole"
        return f"2 baselines      the frozen weights do not fit, {how}: {why}"
    even = ", not even ZeRO-3" * any(plan.recipe.cuts.weights for plan in last)
    return f"2 baselines      data parallelism alone does not do{even}: {why}"


def _simplest(plans: Sequence[Plan]) -> str:
    easy, best = simplest(plans), plans[0]
    if easy is None:
        near = min(plans, key=lambda plan: plan.needs_bytes or math.inf)
        return f"3 simplest       nothing fits. Nearest comes {near}"
    fastest = all(best.step_s <= plan.step_s for plan in plans if plan.kept)
    if easy == best:
        return f"3 simplest       the simplest that fits is {'the fastest' if fastest else 'first'} too: {best}"
    gain, name = easy.expected_s / best.expected_s, "fastest" if fastest else "first"
    return f"3 simplest       {easy}\n  {name:14} {best}, {gain:.2f} times as fast for more ideas"


def _communication(plans: Sequence[Plan]) -> str:
    plan = plans[0]
    if plan.step is None:
        return "4 communication  nothing runs, so nothing is sent"
    step, hw = plan.step, plan.hardware
    axes = ("tp", *["cp"] * (plan.layout.cp > 1), *["ep"] * (plan.shape.n_expert > 0), "pp", "dp")
    parts = [f"{axis} {step[axis]:.3g} s" for axis in axes if step[axis]]
    hidden, behind = max(0.0, -step["overlap"]), step["compute"]
    return (
        f"4 communication  {', '.join(parts) or 'none'}; {hidden:.3g} s of it hide behind {behind:.3g} s of compute. "
        f"Inside a node: {hw.intra.name}, {hw.intra.bytes_per_s / GB:.3g} GB/s, and tp stays there. "
        f"Between nodes: {hw.inter.name}, {hw.inter.bytes_per_s / GB:.3g} GB/s a device."
        f"{_hybrid(plan)}{_cut(plan)}{_dealt(plan)}"
    )


def _cut(plan: Plan) -> str:
    """The effect of cp on this plan, in words; "" where rows are whole."""
    lay, r, hw = plan.layout, plan.recipe, plan.hardware
    if lay.cp == 1:
        return ""
    where = "inside a node" if lay.cp * lay.tp <= hw.node_size else f"over nodes of {hw.node_size}"
    how = {
        "ring": "keys and values go round from rank to rank, behind the scores as far as these take long enough",
        "gather": "every rank gathers all keys and values before it attends, and nothing hides that",
        "ulysses": "all_to_alls exchange tokens for heads and back, and nothing hides that",
    }[r.context]
    return (
        f" cp={lay.cp}: each rank has {plan.shape.seq // lay.cp:,} of the {plan.shape.seq:,} tokens of a row, {where}; "
        f"{how}. Gradients are added up over dp x cp = {lay.dp * lay.cp} ranks."
    )


def _dealt(plan: Plan) -> str:
    """The effect of ep on this plan, in words; "" for a dense model."""
    shape, lay, hw = plan.shape, plan.layout, plan.hardware
    if not shape.n_expert:
        return ""
    part = f", and of each its 1/{lay.tp} along tp" * (lay.tp > 1)
    if lay.ep == 1:
        return f" ep=1: each rank has all {shape.n_expert} experts of its blocks{part}, and no token travels."
    apart = lay.pp * lay.cp * lay.tp
    between = " and ".join(f"{axis}={size}" for axis, size in (("pp", lay.pp), ("cp", lay.cp)) if size > 1)
    where = f"over nodes, since {between} {'lie' if ' and ' in between else 'lies'} between them"
    if lay.ep * apart <= hw.node_size or not between:
        where = "inside a node" if lay.ep * apart <= hw.node_size else f"over nodes of {hw.node_size}"
    return (
        f" ep={lay.ep}: {lay.ep} neighbours along dp have {shape.n_expert // lay.ep} of {shape.n_expert} experts each"
        f"{part}, {where}. In each block {shape.top_k} copies of a token travel to their experts and back, forward and "
        f"backward{', from each rank of tp' * (lay.tp > 1)}; nothing hides that. Gradients of experts go over "
        f"{lay.dp * lay.cp // lay.ep} ranks, all others over {lay.dp * lay.cp}. Routing is taken as balanced: a "
        "slowest rank with 1.5 times the mean load takes 1.5 times as long in its experts."
    )


def _hybrid(plan: Plan) -> str:
    shard = plan.recipe.shard_ranks
    if shard is None:
        return ""
    cp = plan.layout.cp
    who = f"{shard} neighbours along dp" + f", each with its {cp} ranks of cp," * (cp > 1)
    return (
        f" {plan.recipe.sharded}: {who} share one copy of the state, and weights move among them "
        f"alone; between the {plan.layout.dp // shard} copies goes 1/{shard * cp} of the gradients, once a step."
    )


def _batch(plans: Sequence[Plan]) -> str:
    plan, r = plans[0], plans[0].recipe
    micro_rows, tokens = r.batch_size // plan.layout.dp // r.n_micro, r.batch_size * plan.shape.seq
    bubble = (
        f"; the bubble is {100 * plan.step['bubble'] / plan.step.total:.0f}% of the step"
        if plan.step is not None
        else ""
    )
    return (
        f"5 batch          {r.batch_size} rows x {plan.shape.seq} = {tokens:,} tokens a step = dp {plan.layout.dp} x "
        f"{plural(r.n_micro, 'micro-batch')} x {plural(micro_rows, 'row')}{bubble}. At most "
        f"dp = {r.batch_size} has a row for each."
    )
