"""The law of pipeline parallelism (labkit.parallel.pipeline): what its stages send, and how long a message takes.

    sends    A to the next rank for each stage boundary that leaves this rank forward, A back for each that came in;
             A = bytes of the activations of all rows of this rank, [rows, T, D], 1/tp of it in sequence
    waits    as long as its schedule says (labkit.plan.laws.schedules)

With dualpipe each stage is on two ranks: half of the rows go through each. Source: Narayanan et al., arXiv:2104.04473,
sections 2.2 and 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from labkit.plan.breakdown import Item
from labkit.plan.laws.choices import Choices
from labkit.plan.laws.traffic import Traffic
from labkit.plan.machine.hardware import Hardware, line_of
from labkit.plan.model.sizes import Sizes
from labkit.plan.partition.layout import Layout


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


def sent(traffic: Traffic) -> Iterator[Item]:
    """Along pp: activations forward and their gradients back."""
    choices, layout, stages = traffic.choices, traffic.layout, traffic.stages
    last, n_bytes = choices.n_stages(layout.pp) - 1, traffic.tokens * traffic.d_model * traffic.word
    own_stages = stages if choices.copies == 1 else ()  # a micro-batch never goes through two stages of a rank
    forward = sum(stage < last and stage + 1 not in own_stages for stage in stages)
    back = sum(stage > 0 and stage - 1 not in own_stages for stage in stages)
    value = (forward + back) * n_bytes / (layout.tp if choices.sequence_parallel else 1)
    yield Item("pp", value, "B", f"({forward} + {back}) A, A={n_bytes:,}", "arXiv:2104.04473, 3.2")


def message_s(machine: Hardware, layout: Layout, n_bytes: float) -> float:
    """Seconds of one activation from stage to stage; 0 for one rank."""
    if layout.pp == 1:
        return 0.0
    inside = layout.pp * layout.cp * layout.tp <= machine.node_size
    return line_of(machine.intra if inside else machine.inter).seconds(n_bytes / machine.practice.wire)


def late_s(machine: Hardware, layout: Layout, n_turns: int) -> float:
    """Seconds of a pipeline that starts its messages late; a rank in the middle starts four for a micro-batch.

    `n_turns`: micro-batches times stages on a rank."""
    n_nodes = -(-layout.size // machine.node_size)
    count = {1: 0, 2: 2}.get(layout.pp, 4) * (n_turns + layout.pp - 1)
    return count * machine.practice.late(n_nodes)
