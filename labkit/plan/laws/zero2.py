"""The law of ZeRO-2 (labkit.parallel.zero2): state and gradients are cut, so gradients leave after each micro-batch.

    holds      weights N, gradients of the bucket that fills, 1/n of all others; state 1/n
    sends      a reduce-scatter for each of m micro-batches, an all-gather of weights: (m + 1) (n-1)/n N
    waits      for the last bucket of each micro-batch, and for all of the gather

Source: Rajbhandari et al., arXiv:1910.02054, sections 5.2 and 7.
"""

from __future__ import annotations

from labkit.plan.laws.choices import Choices, Cuts
from labkit.plan.laws.in_buckets import InBuckets
from labkit.plan.laws.strategy import Amounts
from labkit.plan.laws.zero1 import ZeRO1Keeper
from labkit.plan.model.tape import GRADIENTS, OTHER
from labkit.plan.partition.buckets import Bucket, Live


class ZeRO2Keeper(ZeRO1Keeper):
    """ZeRO-2: every pass sends its gradients, so that 1/n of them stays."""

    last_differs = False

    @property
    def part(self) -> int:
        """The first pass's part is the gradient; a part of a later pass is a temporary that is added to it."""
        return OTHER if self.passes else GRADIENTS

    def pass_begins(self, sending: bool) -> None:
        """Every pass sends its gradients, also one that is not the last of the step."""
        super().pass_begins(sending)
        self.sending = True

    def between(self, live: Live, numel: int) -> None:
        """1/n of these gradients stays."""
        if not self.passes:
            live.add(GRADIENTS, numel * self.sums // self.n)

    def fill(self, live: Live, numel: int, times: int) -> None:
        """Earlier passes have left 1/n of each bucket, and the last bucket is still on its way."""
        live.add(GRADIENTS, (self.numel + numel) * self.sums // self.n)
        self.passes = times
        self.leaving = self.last
        self.leaving.packed = GRADIENTS if times == 1 else OTHER
        live.add(OTHER, (self.n > 1) * self.leaving.numel * self.sums)  # a group of one has its answer at once
        live.add(OTHER, (times > 1) * self.leaving.numel // self.n * self.sums)

    @property
    def last(self) -> Bucket:
        """The bucket that leaves last."""
        return self.buckets[-1]


class ZeRO2Law(InBuckets):
    """ZeRO-2: what it holds; the rest is as in_buckets.py says."""

    name = words = "zero2"
    title, cuts = "ZeRO-2", Cuts(False, True, True)
    every_pass_sends, kept = True, ZeRO2Keeper

    def left(self, n: int) -> float:
        """This rank's part."""
        return 1 / n

    def most(self, amounts: Amounts, choices: Choices) -> int:
        """This rank's part of the gradients, and buckets that fill and that are on their way."""
        bucket = choices.bucket_bytes + amounts.param * choices.gradient_bytes
        return amounts.owned * choices.gradient_bytes + 4 * bucket * amounts.groups

    def gradient_words(self, width: int, share: str) -> str:
        """A part, and what has just been made."""
        return f"{width} N{share} + fresh ones"
