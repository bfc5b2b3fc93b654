"""The law of ZeRO-2 (labkit.parallel.zero2): state and gradients are cut, so gradients leave after each micro-batch.

    holds      weights N, gradients of the bucket that fills, 1/n of all others; state 1/n
    sends      a reduce-scatter for each of m micro-batches, an all-gather of weights: (m + 1) (n-1)/n N
    waits      for the last bucket of each micro-batch, and for all of the gather

Source: Rajbhandari et al., arXiv:1910.02054, sections 5.2 and 7.
"""

from __future__ import annotations

from labkit.plan.laws.choices import Choices, Cuts
from labkit.plan.laws.in_buckets import InBucketsLaw, left, waiting_gradients
from labkit.plan.laws.strategy import Amounts, HeldBytes, Moment
from labkit.plan.partition.stage import ShardedParameters


class ZeRO2Law(InBucketsLaw):
    """ZeRO-2: what it holds; the rest is as in_buckets.py says."""

    name = words = "zero2"
    title, cuts = "ZeRO-2", Cuts(False, True, True)
    every_pass_sends = True

    def holds(self, group: ShardedParameters, choices: Choices, moment: Moment) -> HeldBytes:
        """a - s of the bucket that fills, 1/n of those that have left; of a later pass 1/n of the one on its way, too.

        a elements have arrived, s of them are in buckets that are full."""
        n, passes, full = group.n, moment.passes, group.full(moment.arrived)
        sent, bucket = left(group, moment)
        if not full and passes:  # the last one of the pass before
            bucket = group.buckets[-1].padded
        stays = group.padded if passes else sent
        other = bucket * (moment.leaves or n > 1)
        part = bucket // n * (passes > (not full) and not moment.leaves)
        return HeldBytes(0, (moment.arrived - sent + stays // n) * group.sums, (other + part) * group.sums)

    def between(
        self, group: ShardedParameters, choices: Choices, passes: int, finished: bool, whole: bool
    ) -> HeldBytes:
        """1/n of the gradients, and the last bucket on its way."""
        return waiting_gradients(group, group.buckets[-1].padded, passes, finished)

    def most(self, amounts: Amounts, choices: Choices) -> int:
        """This rank's part of the gradients, and buckets that fill and that are on their way; two of each stage that is
        not at work."""
        bucket = choices.bucket_bytes + amounts.param * choices.gradient_bytes
        return amounts.owned * choices.gradient_bytes + bucket * (4 * amounts.groups + 2 * amounts.others)

    def gradient_words(self, width: int, share: str) -> str:
        """A part, and what has just been made."""
        return f"{width} N{share} + fresh ones"
