"""The law of DDP (labkit.parallel.ddp): each rank has all of the state, and gradients are summed in buckets.

    holds      weights N, gradients N in their buckets, state whole
    sends      an all_reduce of the gradients, 2 (n-1)/n N, or what is left of them where they travel in fewer bytes
    waits      for the last bucket: the others travel while backward goes on

How gradients travel is a choice of its own: sent_gradients.py. Source: Li et al., arXiv:2006.15704, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from labkit.plan.laws.choices import Choices, Cuts
from labkit.plan.laws.in_buckets import buckets_of, waits_of_buckets
from labkit.plan.laws.one_group import OneGroup
from labkit.plan.laws.sent_gradients import WAYS
from labkit.plan.laws.strategy import Amounts, ConcurrentWork, HeldBytes, Moment, Moves, ReducedParameters, Waits
from labkit.plan.machine.hardware import Hardware
from labkit.plan.partition.groups import ParamGroup
from labkit.plan.partition.stage import ShardedParameters


class DDPLaw(OneGroup):
    """DDP: what it excludes, holds, sends and waits for."""

    name = words = "ddp"
    title, cuts = "DDP", Cuts(False, False, False)
    options: tuple[str, ...] = ("gradients",)
    computes_gathered = in_buckets = every_pass_sends = False

    def excludes(self, choices: Choices) -> Iterator[str]:
        """Offloading, which moves a shard; and what the gradients' way excludes."""
        if choices.offload:
            yield "offload moves the shard that a rank steps on, and ddp has none: take a strategy that cuts the state"
        yield from WAYS[choices.gradients].excludes(choices)

    def holds(self, group: ShardedParameters, choices: Choices, moment: Moment) -> HeldBytes:
        """Nothing: its buckets are there all the time. In the last pass copies of those that travel in fewer bytes."""
        if not moment.last or group.n == 1:
            return HeldBytes()
        return HeldBytes(other=WAYS[choices.gradients].holds(group, moment))

    def rises(self, group: ShardedParameters, choices: Choices, layer: int) -> int:
        """0, or if gradients travel in fewer bytes the copies of all that may be coded meanwhile."""
        return self.copies(group.numel, group.largest_bucket * group.sums, choices)

    def between(
        self, group: ShardedParameters, choices: Choices, passes: int, finished: bool, whole: bool
    ) -> HeldBytes:
        """Nothing."""
        return HeldBytes()

    def decoding(self, group: ShardedParameters, choices: Choices) -> int:
        """Bytes of buckets that are decoded, if gradients travel in fewer bytes than they are added up in; else 0."""
        return WAYS[choices.gradients].decoding(group) if group.n > 1 else 0

    def owned(self, group: ShardedParameters) -> tuple[tuple[ParamGroup, int], ...]:
        """Every parameter."""
        return group.tensors

    def most(self, amounts: Amounts, choices: Choices) -> int:
        """The gradient that was made last, and copies of all that travel in fewer bytes."""
        bucket = choices.bucket_bytes + amounts.param * choices.gradient_bytes
        return amounts.param * choices.gradient_bytes + self.copies(amounts.numel, bucket, choices)

    def copies(self, numel: int, bucket: int, choices: Choices) -> int:
        """Bytes at most of copies of `numel` gradients that travel in fewer bytes, in buckets of so many bytes."""
        return 2 * numel + 12 * bucket if WAYS[choices.gradients].coding_bytes else 0

    def moves(self, choices: Choices, n_ranks: int = 1, place: int = 0) -> Moves:
        """An all_reduce is a reduce-scatter and an all-gather of gradients."""
        return Moves(1, 1, choices.sent_gradient_bytes)

    def waits(self, state: ReducedParameters, work: ConcurrentWork, choices: Choices, machine: Hardware) -> Waits:
        """Behind the last backward. To code and decode is work of the device itself, which goes on beside no other."""
        way = WAYS[choices.gradients]
        n_bytes = state.params * way.element_bytes(choices.gradient_bytes) / buckets_of(state, choices)
        coding = state.params * way.coding_bytes / machine.reachable_bytes_per_s
        one = way.one_s(state, machine, n_bytes)
        return waits_of_buckets(state, work, choices, machine, one, 1, coding)

    def gradient_words(self, width: int, share: str) -> str:
        """Whole."""
        return f"{width} N"
