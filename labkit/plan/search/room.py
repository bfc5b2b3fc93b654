"""Sentences beside a plan's numbers: the machine that is assumed, what else wants its memory, and how sure a fit is.

Memory is foretold for labkit's own strategies, and others' runs differ from it: four of five published runs lie within
`EDGE` of it (labkit.plan.search.search). A plan that holds so nearly what a device has is at the edge: it may fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from labkit.plan.search.search import EDGE, HEADROOM, Plan, gb
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
    """Lines if the fastest plan, or where none fits the nearest one, is at the edge; and the fastest that is not."""
    if not plans:
        return []
    words = f"within the {EDGE:.0%} to which four of five published runs are foretold"
    if plans[0].kept:
        if not plans[0].at_edge:
            return []
        held, has = plans[0].memory.total, plans[0].hardware.memory_bytes.value
        fast = [plan for plan in plans[:LOOKED_AT] if plan.kept]
        safe = next((plan for plan in fast if not plan.at_edge), None)
        mend = (
            f"Out of it: {safe}"
            if safe
            else f"None of the fastest {len(fast)} is out of it: more devices, or shorter rows"
        )
        return [f"at the edge: the fastest plan holds {gb(held)} of {gb(has)}, {words}: it may not fit. {mend}"]
    near = min(plans, key=lambda plan: plan.needs_bytes or math.inf)
    if not near.at_edge:
        return []
    has = near.hardware.memory_bytes.value
    return [
        f"at the edge: nothing fits, and what comes nearest needs {gb(near.needs_bytes)} of {gb(has)}, {words}: it may "
        "run. Out of it: more devices, fewer or shorter rows, or more recomputation"
    ]
