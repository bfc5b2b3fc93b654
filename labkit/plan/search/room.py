"""Sentences beside a plan's numbers: the machine that is assumed, what else wants its memory, how sure a fit is, the
interval of its seconds, and what puts it at risk.

Memory is predicted for labkit's own strategies, and others' runs differ from it: four of five published runs lie within
`EDGE` of it (labkit.plan.search.search). A plan that holds so nearly what a device has is at the edge: it may fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from labkit.plan.search.interval import MEANING, kind_of
from labkit.plan.search.search import AGAIN, EDGE, HEADROOM, Plan, gb
from labkit.plan.search.uncertainty import constants
from labkit.plan.words import plural

GB = 1e9
LOOKED_AT = 40
"""Fastest plans whose memory is worked out where one that is not at the edge is looked for: each takes its time."""


def machine_words(plan: Plan) -> str:
    """`machine: 2 nodes of 8 h100; inside a node nvlink, 450 GB/s a device, ...`: what is assumed of the links."""
    hw, n = plan.hardware, plan.layout.size
    nodes = -(-n // hw.node_size)
    inside = f"inside a node {hw.intra.name}, {hw.intra.bytes_per_s / GB:.4g} GB/s a device"
    if nodes == 1:
        return f"machine: 1 node of {hw.node_size} {hw.name}; {inside}"
    between = f"between nodes {hw.inter.name}, {hw.inter.bytes_per_s / GB:.4g} GB/s a device"
    return f"machine: {plural(nodes, 'node')} of {hw.node_size} {hw.name}; {inside}, {between} (assumed, if not given)"


def besides(plan: Plan, headroom: float = HEADROOM) -> str:
    """A sentence: the memory that is left alone of a device, and its use."""
    memory = plan.hardware.memory_bytes.value
    left = headroom * memory
    return (
        f"besides: {gb(memory - left)} of {gb(memory)} are planned with. The other {gb(left)} are for the context and "
        "the libraries (some 0.5 to 1 GB), NCCL's buffers, kernels' scratch, and what the allocator cannot use"
    )


def loading(plan: Plan) -> list[str]:
    """A line if a device cannot hold the whole model before a strategy cuts it, though the plan fits."""
    memory, whole = plan.hardware.memory_bytes.value, 4.0 * plan.shape.n_params
    if plan.layout.size == 1 or whole <= memory:
        return []
    half = " (in bf16 it would be)" if whole / 2 <= memory else ""
    return [
        f"loading: the whole model in fp32 is {gb(whole)}, more than a device has{half}: build it on the meta device "
        "and load each rank's part, or the job dies before its first step"
    ]


def edge(plans: Sequence[Plan]) -> list[str]:
    """Lines if the first plan, or where none fits the nearest one, is at the edge; and the fastest that is not."""
    if not plans:
        return []
    words = f"within the {EDGE:.0%} to which four of five published runs are predicted"
    if plans[0].kept:
        if not plans[0].at_edge:
            return []
        held, has = plans[0].memory.total, plans[0].hardware.memory_bytes.value
        fast = [plan for plan in plans[:LOOKED_AT] if plan.kept]
        safe = next((plan for plan in fast if not plan.at_edge), None)
        ways = [way for way, plan in _ways_out(plans) if plan != safe]
        mend = (
            f"Out of it: {'; or with '.join([str(safe), *ways])}"
            if safe
            else f"None of the fastest {len(fast)} is out of it: {', '.join([*ways, 'more devices, or shorter rows'])}"
        )
        return [f"at the edge: the first plan holds {gb(held)} of {gb(has)}, {words}: it may not fit. {mend}"]
    near = min(plans, key=lambda plan: plan.needs_bytes or math.inf)
    if not near.at_edge:
        return []
    has = near.hardware.memory_bytes.value
    return [
        f"at the edge: nothing fits, and what comes nearest needs {gb(near.needs_bytes)} of {gb(has)}, {words}: it may "
        "run. Out of it: more devices, fewer or shorter rows, or more recomputation"
    ]


def _ways_out(plans: Sequence[Plan]) -> Iterator[tuple[str, Plan]]:
    """Single changes that take the first plan out of the edge: fewer rows in a micro-batch, more recomputation."""
    first = plans[0]

    def likeness(plan: Plan) -> tuple[object, ...]:
        r = plan.recipe
        return plan.layout, r.strategy, r.shard_ranks, r.schedule, r.stages_per_rank, r.context, plan.adapter

    alike = [plan for plan in plans if plan.kept and likeness(plan) == likeness(first)]
    degree = {name: place for place, name in enumerate(AGAIN)}
    fewer = [
        plan for plan in alike if plan.recipe.recompute == first.recipe.recompute and _rows(plan) < _rows(first)
    ]  # fmt: skip
    recomputed = [
        plan for plan in alike
        if _rows(plan) == _rows(first) and degree[plan.recipe.recompute] > degree[first.recipe.recompute]
    ]  # fmt: skip
    for ways, name in ((fewer, "micro-batches of {rows}"), (recomputed, "{again}")):
        plan = next((plan for plan in ways if not plan.at_edge), None)
        if plan:
            words = name.format(rows=plural(_rows(plan), "row"), again=plan.recipe.again)
            yield f"{words} ({gb(plan.memory.total)}, {plan.step_s:.3g} s)", plan


def _rows(plan: Plan) -> int:
    return plan.recipe.batch_size // plan.layout.dp // plan.recipe.n_micro


def interval_words(plan: Plan) -> list[str]:
    """A line with the intervals in which seconds and memory lie; none where nothing like the plan is published."""
    if plan.interval is None:
        return []
    low, high, runs, sources = plan.interval
    kind = MEANING[kind_of(plan.shape, plan.layout, plan.hardware, plan.mfu)]
    memory, held = plan.memory.total, constants().held
    seconds, times = f"{low * plan.step_s:.3g} to {high * plan.step_s:.3g} s", f"{low:.2g} to {high:.2g} times"
    return [
        f"interval: {seconds} a step, predicted {plan.step_s:.3g} s. Nine of ten of {runs:,} published runs ({kind}; "
        f"{sources}) took {times} what is predicted of them. Memory: {gb(held.low * memory)} to "
        f"{gb(held.high * memory)} for {gb(memory)}, since nine of ten of {held.runs:,} held {held.low:.2g} to "
        f"{held.high:.2g} times as much"
    ]


def risk_words(plans: Sequence[Plan], count: int) -> list[str]:
    """A line for each risk of the first `count` kept plans, and one if another is faster by predicted seconds alone."""
    kept, by_words = [plan for plan in plans if plan.kept], dict[str, list[str]]()
    for plan in kept[:count]:
        for risk in plan.risks:
            by_words.setdefault(risk.words, []).append(
                f"{_place(plan)} ({risk.expected_s(plan.step_s):.3g} s are to be expected)"
            )
    lines = [f"risk of {'; '.join(places)}: {words}" for words, places in by_words.items()]
    fastest = min(kept, key=lambda plan: plan.step_s, default=None)
    if fastest is not None and fastest.step_s < kept[0].step_s:
        lines.append(
            f"not first, though it is predicted to take {fastest.step_s:.3g} s: {_place(fastest)}. With its risk "
            f"{fastest.expected_s:.3g} s are to be expected: {'; '.join(risk.words for risk in fastest.risks)}"
        )
    return lines


def _place(plan: Plan) -> str:
    """`dp=32 pp=2 tp=1, zero1, interleaved of 8`: a plan without its numbers."""
    return str(plan).rsplit(": ", 1)[0]
