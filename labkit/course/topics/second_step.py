"""The second step of a plan on real ranks: what labs 14 and 14b hold beside the planner's bytes and seconds.

    cluster.run(second_step, config, layout, recipe)      on each rank (bytes at the peak by kind, seconds)

The first step makes what stays: connections, the optimizer's state, and the order in which ZeRO-3 needs its units. The
planner's laws are those of every later step, so the first one is taken and not counted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from labkit.assemble import assemble
from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.plan.breakdown import Breakdown
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.probe.clock import Clock
from labkit.probe.memory import MemoryProbe
from labkit.train.config import GPTConfig


class StepCosts(NamedTuple):
    """What a training step cost this rank: bytes at its highest moment by kind, and seconds."""

    peak: Breakdown
    seconds: float


def second_step(group: Group, config: GPTConfig, layout: Layout, recipe: Recipe) -> StepCosts:
    """Build the training step of this plan, take two of them on random tokens, and give what the second one cost.

    Every rank of the group calls it, and `layout` has as many ranks as the group. Sends what two steps send, and some
    messages of a few bytes for the clock. Raises what `assemble` raises, and VirtualOutOfMemory under a cap."""
    mesh = Mesh.connect(layout, group)
    with MemoryProbe(device=torch.device(group.device).type) as probe:
        step = assemble(config, recipe, mesh)
        tokens, targets = torch.randint(
            config.vocab, (2, recipe.batch_size // layout.dp, config.seq), device=group.device
        )
        step(tokens, targets, 0)  # makes connections, and the optimizer's state
        probe.reset_peak()
        with Clock(group) as clock:
            step(tokens, targets, 1)
    return StepCosts(probe.peak, clock.recording.seconds)
