"""What laws of time look at: one micro-batch on a rank, and the machine. Each says what it adds to a layer.

compute     every op, and the host that issues it        labkit.plan.step.compute_time
tp          sums of activations                          labkit.plan.laws.tensor
cp          keys and values, or tokens for heads         labkit.plan.laws.context_time
ep          tokens to their experts and back             labkit.plan.laws.experts
pp          messages between stages, bubbles             labkit.plan.laws.pipeline
dp          gradients and weights, once a step           labkit.plan.laws.data_parallel, and the strategy's own file
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from labkit.plan.laws.choices import Choices
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.setting import Setting
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout

LAYERS = ("embedding", "block", "dense", "head")
"""The kinds of layers: a "dense" block has no experts, in a model whose other blocks have some."""


class PassSeconds(NamedTuple):
    """Seconds of one direction of a layer or a stage, for one micro-batch.

    compute   of the device;   tp   of sums over tp;   host   in which the device waits for Python;   ep   of
    all_to_alls;   cp   in which attention waits for other ranks;   hidden   of their exchange, behind compute"""

    compute: float = 0.0
    tp: float = 0.0
    host: float = 0.0
    ep: float = 0.0
    cp: float = 0.0
    hidden: float = 0.0

    @property
    def total(self) -> float:
        """Seconds from its begin to its end; what is hidden makes it no longer."""
        return self.compute + self.tp + self.host + self.ep + self.cp

    def plus(self, other: PassSeconds, times: float = 1) -> PassSeconds:
        """This, and the other one so many times behind it."""
        return PassSeconds(*[own + times * added for own, added in zip(self, other, strict=True)])


@dataclass(frozen=True)
class Timing:
    """One micro-batch of `setting` on a rank of `layout`, and the machine that computes it.

    products    the precision whose rate the large products reach;   imbalance   rows of the slowest rank's experts over
    the mean;   links   the machine as some axes see it, where these have links of their own"""

    shape: ModelShape
    layout: Layout
    choices: Choices
    setting: Setting
    products: str
    machine: Hardware
    imbalance: float = 1.0
    links: Mapping[str, Hardware] = field(default_factory=dict)

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank."""
        return self.setting.rows * self.setting.seq

    @cached_property
    def wide(self) -> int:
        """Bytes of an activation between layers."""
        return {"fp64": 8, "half": 2}.get(self.setting.way, 4)

    @cached_property
    def narrow(self) -> int:
        """Bytes of an activation that goes into products."""
        return 2 if self.setting.way == "autocast" else self.wide

    def along(self, axis: str) -> Hardware:
        """The machine with the links of an axis."""
        return self.links.get(axis, self.machine)
