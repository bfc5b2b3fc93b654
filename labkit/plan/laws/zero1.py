"""The law of ZeRO-1 (labkit.parallel.zero1): the optimizer's state is cut, gradients are summed once a step.

    holds      weights N, gradients N as autograd makes them, then 1/n of each bucket that has left; state 1/n
    sends      a reduce-scatter of gradients and an all-gather of weights: 2 (n-1)/n N
    waits      for the last bucket, and for all of the gather

Source: Rajbhandari et al., arXiv:1910.02054, sections 5.1 and 7.
"""

from __future__ import annotations

from labkit.plan.laws.choices import Choices, Cuts
from labkit.plan.laws.in_buckets import InBucketsLaw, left
from labkit.plan.laws.strategy import Amounts, HeldBytes, Moment
from labkit.plan.partition.stage import ShardedParameters


class ZeRO1Law(InBucketsLaw):
    """ZeRO-1: what it holds; the rest is as in_buckets.py says."""

    name = words = "zero1"
    title, cuts = "ZeRO-1", Cuts(False, False, True)
    every_pass_sends = False

    def holds(self, group: ShardedParameters, choices: Choices, moment: Moment) -> HeldBytes:
        """First pass a, later N; in the last pass a bucket leaves, and 1/n of it comes back: - s + s/n.

        a elements of N have arrived, s of them are in buckets that are full."""
        whole = group.numel if moment.passes else moment.arrived
        if not moment.last:
            return HeldBytes(gradients=whole * group.sums)
        sent, bucket = left(group, moment)
        other = bucket * (moment.leaves or group.n > 1)
        return HeldBytes(0, (whole - sent + sent // group.n) * group.sums, other * group.sums)

    def between(
        self, group: ShardedParameters, choices: Choices, passes: int, finished: bool, whole: bool
    ) -> HeldBytes:
        """All gradients: they are added up, and wait for the last; then 1/n of them."""
        elements = group.padded // group.n if finished else group.numel * (passes > 0)
        return HeldBytes(gradients=elements * group.sums)

    def most(self, amounts: Amounts, choices: Choices) -> int:
        """Whole gradients, this rank's part of them, and buckets on their way."""
        bucket = choices.bucket_bytes + amounts.param * choices.gradient_bytes
        return (amounts.numel + amounts.owned) * choices.gradient_bytes + 3 * bucket * amounts.groups

    def gradient_words(self, width: int, share: str) -> str:
        """Whole, then a part."""
        return f"{width} N, then {width} N{share}"
