"""What a rank sends along dp, whatever its strategy is, and which of the rank's parameters move together.

    moves of a strategy    (scatters + gathers) (n-1)/n N, weights and gradients each in their own width
    across groups          2 (r-1)/r N/s, once a step, over r groups of s ranks that each have a copy of the state
    8-bit gathers          C weights of linears are gathered in 1 byte and not 2: C (n-1)/n less for each gather

Source: Rajbhandari et al., arXiv:1910.02054, section 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from labkit.plan.breakdown import Item
from labkit.plan.laws.choices import Choices
from labkit.plan.laws.strategy import ConcurrentWork, ReducedParameters, Strategy, Waits
from labkit.plan.laws.timing import Timing
from labkit.plan.laws.traffic import StepTraffic
from labkit.plan.partition.layout import Layout
from labkit.plan.words import multiples

SOURCE = "arXiv:1910.02054, 7"


def refuses(choices: Choices, layout: Layout) -> Iterator[str]:
    """A batch that does not cut evenly."""
    if choices.batch_size % layout.dp:
        yield (
            f"a batch of {choices.batch_size} rows does not cut evenly for dp={layout.dp}: "
            + multiples("batch_size", choices.batch_size, layout.dp)
        )


def sent(strategy: Strategy, traffic: StepTraffic) -> Iterator[Item]:
    """Along the axes of the strategy: parameters and gradients of this rank."""
    choices, layout, n_bytes = traffic.choices, traffic.layout, traffic.parameter_bytes
    n = strategy.sharing(layout, choices.copies)
    scatters, gathers, gathered = strategy.moves(choices, layout.pp, traffic.place)
    wider = choices.sent_gradient_bytes / choices.weight_bytes  # 2 where bf16 gradients are added up in fp32
    moved = scatters * wider + gathers * gathered / choices.weight_bytes
    formula = f"({scatters} + {gathers:g})(n-1)/n S, n={n}, S={n_bytes:,}"
    if moved != scatters + gathers:
        formula = f"{moved:g}(n-1)/n S, n={n}, S={n_bytes:,} of weights, {wider:g} S of gradients"
    if traffic.coded_params:
        formula += f", {gathers:g}(n-1)/n C less, C={traffic.coded_params:,} weights in 1 byte"
    value = (moved * n_bytes - gathers * traffic.coded_params) * (n - 1) / n
    yield Item(strategy.axes[0], value, "B", formula, SOURCE)
    for axis in strategy.axes[1:]:
        r, part = strategy.across(layout, choices.copies)[0], wider * n_bytes / n
        crossing = f"2(r-1)/r G, r={r}, G={part:,.0f} of gradients, 1/{n}"
        yield Item(axis, 2 * (r - 1) / r * part, "B", crossing, "arXiv:2304.11277, 3.2.2")


def experts_sent(strategy: Strategy, traffic: StepTraffic, n: int) -> Iterator[Item]:
    """Along expert_dp: parameters and gradients of the experts of this rank, over the `n` ranks that have the same."""
    choices, experts = traffic.choices, traffic.experts
    assert experts is not None
    scatters, gathers, gathered = strategy.moves(choices, traffic.layout.pp, traffic.place)
    if choices.recompute == "full":
        gathers = strategy.expert_gathers(gathers, choices)
    wider = choices.sent_gradient_bytes / choices.weight_bytes
    moved = scatters * wider + gathers * gathered / choices.weight_bytes
    value = (moved * experts.parameter_bytes - gathers * experts.coded) * (n - 1) / n
    words = f"{moved:g}(m-1)/m X, m = {n} ranks with the same experts, X = {experts.parameter_bytes:,}"
    words += f", {gathers:g}(m-1)/m of {experts.coded:,} less" * bool(experts.coded)
    yield Item("expert_dp", value, "B", words, SOURCE)


def waiting_s(strategy: Strategy, states: Iterable[ReducedParameters], work: ConcurrentWork, timing: Timing) -> Waits:
    """The seconds of the communication of all states in a step, and those by which it makes the step longer."""
    machine, choices = timing.along("dp"), timing.choices
    by_state = [strategy.waits(state, work, choices, machine) for state in states if state.ranks > 1]
    return Waits(sum(state.talk for state in by_state), sum(state.longer for state in by_state))


def adding_s(strategy: Strategy, timing: Timing, params: float) -> float:
    """Seconds in which the gradients of one micro-batch, of so many parameters, are added to those before it."""
    choices = timing.choices
    if strategy.every_pass_sends or (choices.n_turns == 1 and not choices.fp32_gradients):
        return 0.0
    return params * (2 * choices.gradient_bytes + choices.weight_bytes) / timing.machine.reachable_bytes_per_s
