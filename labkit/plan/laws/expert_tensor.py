"""The law of experts that tp cuts (labkit.parallel.expert_tensor): 1/n of the hidden units of each on each rank.

    sends    along tp, backward: 2 (n-1)/n N k numbers, in fp32 at least, for the gradients of the weights of N tokens'
             copies, which are terms of a sum. All else that a mixture sends along tp an MLP does, too (laws/tensor.py)
    waits    for all of it
    holds    weights, gradients and state of the experts / n (model/mixture.py)

Source: Shoeybi et al., arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

from labkit.plan.breakdown import Item
from labkit.plan.laws.timing import PassSeconds, Timing
from labkit.plan.laws.traffic import StepTraffic
from labkit.plan.model.sizes import Sizes
from labkit.plan.partition.layout import Layout


def refuses(shape: Sizes, layout: Layout) -> Iterator[str]:
    """Experts whose hidden units cannot be cut evenly."""
    if shape.n_expert and shape.expert_hidden % layout.tp:
        yield f"experts are {shape.expert_hidden:,} wide inside, which has no tp={layout.tp} equal parts"


def sent(traffic: StepTraffic) -> Iterator[Item]:
    """Along tp: the gradients of the weights of each token's copies."""
    if traffic.top_k:
        n, numbers = traffic.layout.tp, traffic.n_layer * traffic.top_k * traffic.tokens
        value = 2 * (n - 1) / n * numbers * max(4, traffic.word)
        yield Item("tp", value, "B", "gradients of experts' weights", "labkit.parallel.expert_tensor")


def layer_s(timing: Timing, layer: str) -> tuple[PassSeconds, PassSeconds]:
    """Seconds of these gradients in the backward of one block."""
    if layer != "block" or not timing.shape.n_expert:
        return PassSeconds(), PassSeconds()
    n_bytes = timing.tokens * timing.shape.top_k * max(4, timing.narrow)
    return PassSeconds(), PassSeconds(tp=timing.along("tp").collective_s("all_reduce", timing.layout.tp, 1, n_bytes))
