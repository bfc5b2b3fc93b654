"""The law of pipeline parallelism (labkit.parallel.pipeline): what its stages send, and how long a message takes.

    sends    A to the next rank for each stage boundary that leaves this rank forward, A back for each that came in;
             A = bytes of the activations of all rows of this rank, [rows, T, D], 1/tp of it in sequence
    waits    as long as its schedule says (labkit.plan.laws.schedules)

With dualpipe each stage is on two ranks: half of the rows go through each. Source: Narayanan et al., arXiv:2104.04473,
sections 2.2 and 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from labkit.plan.breakdown import Item
from labkit.plan.laws.choices import Choices
from labkit.plan.laws.schedules import LAWS
from labkit.plan.laws.strategy import Waits
from labkit.plan.laws.timing import PassSeconds, Timing
from labkit.plan.laws.traffic import StepTraffic
from labkit.plan.machine.hardware import line_of
from labkit.plan.model.sizes import Sizes
from labkit.plan.partition.layout import Layout
from labkit.plan.schedules.schedule import simulate


def refuses(shape: Sizes, choices: Choices, layout: Layout, tied: bool) -> Iterator[str]:
    """Stages without blocks; a weight that is `tied` and would be on two stages; micro-batches without rows."""
    n_stages, rows = choices.n_stages(layout.pp), choices.batch_size // layout.dp
    if n_stages > shape.n_layer:
        yield (
            f"{shape.n_layer} blocks cannot fill {n_stages} stages ({layout.pp} ranks x {n_stages // layout.pp}): "
            f"n_layer={n_stages}, or fewer stages"
        )
    if tied and n_stages > 1:
        yield f"a tied head is one weight on two stages, the first and the last of {n_stages}: GPTConfig(tied=False)"
    if rows < choices.n_micro:
        yield (
            f"{rows} rows a rank (batch_size={choices.batch_size} / dp={layout.dp}) are fewer than n_micro="
            f"{choices.n_micro}: batch_size={layout.dp * choices.n_micro} would do"
        )


def sent(traffic: StepTraffic) -> Iterator[Item]:
    """Along pp: activations forward and their gradients back."""
    choices, layout, stages = traffic.choices, traffic.layout, traffic.stages
    last, n_bytes = choices.n_stages(layout.pp) - 1, traffic.tokens * traffic.d_model * traffic.word
    own_stages = stages if choices.copies == 1 else ()  # a micro-batch never goes through two stages of a rank
    forward = sum(stage < last and stage + 1 not in own_stages for stage in stages)
    back = sum(stage > 0 and stage - 1 not in own_stages for stage in stages)
    value = (forward + back) * n_bytes / (layout.tp if choices.sequence_parallel else 1)
    yield Item("pp", value, "B", f"({forward} + {back}) A, A={n_bytes:,}", "arXiv:2104.04473, 3.2")


class Lasts(NamedTuple):
    """Seconds of a pipeline.

    whole   from its first to its last action, without messages;   own   the actions of the busiest rank
    sends   what messages add to the whole"""

    whole: float
    own: float
    sends: float


def lasts(
    timing: Timing, passes: Sequence[tuple[PassSeconds, PassSeconds]], own: float, weights: float, simulated: int
) -> Lasts:
    """How long the schedule takes with these forwards and backwards of all stages; `own`: seconds of the busiest rank's
    actions; `weights`: W's share of a backward.

    A schedule of at most `simulated` actions is simulated, a longer one follows its law."""
    choices, p, send = timing.choices, timing.layout.pp, message_s(timing)
    if len(passes) == 1:
        return Lasts(own, own, 0.0)
    if 2 * choices.n_micro * len(passes) <= simulated:
        schedule = choices.schedule_for(p)
        forward, backward = [one.total for one, _ in passes], [one.total for _, one in passes]
        plain, sending = (
            max(span.end for span in simulate(schedule, forward, backward, seconds, weights)) for seconds in (0.0, send)
        )
        return Lasts(plain, own, sending - plain)
    slowest = max(((ahead.total, back.total) for ahead, back in set(passes)), key=sum)
    law = LAWS[choices.schedule]
    # p micro-batches are under way, so that a round trip through all stages may take p forwards and backwards, and the
    # messages of it come on top
    sends = 2 * (len(passes) - 1) * send * (1 + choices.n_turns / p * law.in_turn)
    # with two directions, half of the ranks are on the way to where micro-batches enter
    return Lasts(own + (p / choices.copies - 1) * law.idle_s(*slowest, weights), own, sends)


def waiting_s(timing: Timing, seconds: Lasts) -> tuple[Waits, float]:
    """The messages of a rank, and those that make the step longer; and the seconds in which the slowest rank waits."""
    turns = timing.choices.n_turns * timing.choices.stages_per_rank
    talk = 2 * turns * message_s(timing)
    idle = max(0.0, seconds.whole - seconds.own) + max(0.0, seconds.sends - talk)
    return Waits(talk, min(talk, seconds.sends)), idle + late_s(timing, turns)


def message_s(timing: Timing) -> float:
    """Seconds of one activation from stage to stage; 0 for one rank."""
    layout, machine = timing.layout, timing.along("pp")
    if layout.pp == 1:
        return 0.0
    n_bytes = timing.tokens * timing.shape.d_model * timing.wide / (layout.tp if timing.setting.in_sequence else 1)
    inside = layout.pp * layout.cp * layout.tp <= machine.node_size
    return line_of(machine.intra if inside else machine.inter).seconds(n_bytes / machine.practice.wire)


def late_s(timing: Timing, turns: int) -> float:
    """Seconds of a pipeline that starts its messages late.

    `turns`: micro-batches times stages on a rank."""
    layout, machine = timing.layout, timing.machine
    return messages_started(layout, turns) * machine.practice.late(-(-layout.size // machine.node_size))


def messages_started(layout: Layout, turns: int) -> int:
    """Messages that are started one after another in a step: a rank in the middle starts four for a micro-batch, one of
    two ranks two; none without a pipeline. `turns`: micro-batches times stages on a rank."""
    return {1: 0, 2: 2}.get(layout.pp, 4) * (turns + layout.pp - 1)
