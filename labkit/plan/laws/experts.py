"""The law of expert parallelism (labkit.parallel.expert): what cannot go with it, what it sends and waits for.

    sends    out, in = rows that leave for experts of other ranks, and rows of theirs that come, of all layers:
             2 (out + in) D w, and half as much once more where forward runs again; if experts are equally busy,
             out = in = (n-1)/n k T for T tokens. What is sent over dp for N is sent over expert_dp for the experts'
             bytes; zero3 gathers them once more where a block runs again, because experts are a unit inside of it
    waits    for all of it: experts need the tokens. `imbalance` is the load of the slowest rank's experts over the mean

Sources: Lepikhin et al., arXiv:2006.16668; Fedus et al., arXiv:2101.03961.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.plan.breakdown import Item
from labkit.plan.laws.choices import Choices
from labkit.plan.laws.data_parallel import experts_sent
from labkit.plan.laws.strategy import Strategy
from labkit.plan.laws.timing import PassSeconds, Timing
from labkit.plan.laws.traffic import StepTraffic
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.sizes import Sizes
from labkit.plan.partition.layout import Layout
from labkit.plan.words import multiples


def refuses(shape: Sizes, choices: Choices, layout: Layout) -> Iterator[str]:
    """Experts that cannot be dealt out, and what they cannot be put together with (yet)."""
    if not shape.n_expert:
        if layout.ep > 1:
            yield f"ep={layout.ep} deals experts out, and this model has none: ep=1, or n_expert={layout.ep}"
        return
    if layout.cp > 1 and counts_rows(shape):
        yield (
            f"the balance loss and the capacity of experts are counted by row, and with cp={layout.cp} no rank sees a "
            f"whole one; got balance={shape.balance!r}, capacity={shape.capacity}: take balance='bias' or 'none' and "
            "no capacity, or cp=1"
        )
    if shape.n_expert % layout.ep:
        mend = multiples("n_expert", shape.n_expert, layout.ep)
        yield f"n_expert={shape.n_expert} experts cannot be dealt out evenly to ep={layout.ep} ranks: {mend}"
    if choices.copies > 1:
        yield (
            f"{choices.schedule} keeps each stage on two ranks, and experts are dealt out along dp alone: "
            "use '1f1b' or 'zero_bubble'"
        )


def unscaled(shape: Sizes, choices: Choices) -> Iterator[str]:
    """A loss of the experts that labkit's loss scale does not reach: its program refuses it, and a plan need not."""
    if shape.n_expert and shape.balance == "loss" and choices.precision == "fp16":
        yield (
            "the balance loss enters in the middle of the model, where nobody multiplies it by the loss scale of "
            "precision='fp16': take balance='bias', or precision='amp'"
        )


def counts_rows(shape: Sizes) -> bool:
    """True for experts whose balance loss or capacity is counted by row, which cp would cut."""
    return shape.n_expert > 0 and (shape.balance == "loss" or shape.capacity is not None)


def sent(strategy: Strategy, traffic: StepTraffic) -> Iterator[Item]:
    """Along ep: tokens to their experts and back; along expert_dp: what their ranks share."""
    layout, choices, experts, n = traffic.layout, traffic.choices, traffic.experts, traffic.layout.ep
    if experts is None or n == 1:
        return
    met = experts.top_k * min(1.0, experts.capacity or 1.0)
    both = 2 * (n - 1) / n * met * traffic.tokens * traffic.n_layer
    if experts.counts is not None:
        both = sum(expert_traffic(experts.counts, n)[layout.ranks("ep", traffic.rank).index(traffic.rank)])
    forward = 2 if choices.recompute == "full" else 1
    # who sends how much is told first, 8 bytes for each expert, each time that forward runs
    counts_bytes = forward * choices.n_micro * traffic.n_layer * (8 * experts.n_expert * (n - 1) // n)
    row_bytes = traffic.d_model * traffic.word
    formula = f"{forward + 1}(out + in) D w + counts, out + in = {both:,.0f}, D w = {row_bytes:,}"
    yield Item("ep", (forward + 1) * both * row_bytes + counts_bytes, "B", formula, "arXiv:2006.16668")
    yield from experts_sent(strategy, traffic, layout.dp * layout.cp // n)


def expert_traffic(counts: Sequence[Sequence[int]], n_ranks: int) -> list[tuple[int, int]]:
    """(out, in) of each of n ranks: its rows for experts of others, and theirs for its own.   counts [n][E]"""
    n_own = len(counts[0]) // n_ranks
    to = [[sum(row[j * n_own : (j + 1) * n_own]) for j in range(n_ranks)] for row in counts]
    return [(sum(to[r]) - to[r][r], sum(row[r] for row in to) - to[r][r]) for r in range(n_ranks)]


def layer_s(timing: Timing, layer: str) -> tuple[PassSeconds, PassSeconds]:
    """Seconds of the tokens' way to the experts of one block and back, once in each direction."""
    shape, layout = timing.shape, timing.layout
    if layer != "block" or not shape.n_expert:
        return PassSeconds(), PassSeconds()
    n_bytes = timing.imbalance * timing.tokens * shape.top_k * shape.d_model * timing.narrow
    both = 2 * travel_s(timing.along("ep"), layout, n_bytes)
    return PassSeconds(ep=both), PassSeconds(ep=both)


def rows(timing: Timing, spent: PassSeconds) -> Iterator[Item]:
    """The seconds of all tokens on their way in a step, for a model with experts."""
    if timing.shape.n_expert:
        times = (
            "2 forward, 2 again and 2 backward" if timing.choices.recompute == "full" else "2 forward and 2 backward"
        )
        formula = f"{timing.layout.ep} ranks, all_to_alls of {timing.shape.top_k} B T D, {times} a block{load(timing)}"
        yield Item("ep", spent.ep, "s", formula, "arXiv:2006.16668")


def load(timing: Timing) -> str:
    """The load of the slowest experts, in words, for the formula of a model with experts."""
    return f"; the slowest experts have {timing.imbalance:g} times the mean load" * (timing.shape.n_expert > 0)


def travel_s(machine: Hardware, layout: Layout, n_bytes: float) -> float:
    """Seconds of one all_to_all of `n_bytes` of tokens, to the experts or back."""
    return machine.all_to_all_s(layout.ep, layout.tp * layout.cp * layout.pp, n_bytes)
