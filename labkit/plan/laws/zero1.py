"""The law of ZeRO-1 (labkit.parallel.zero1): the optimizer's state is cut, gradients are summed once a step.

    holds      weights N, gradients N as autograd makes them, then 1/n of each bucket that has left; state 1/n
    sends      a reduce-scatter of gradients and an all-gather of weights: 2 (n-1)/n N
    waits      for the last bucket, and for all of the gather

Source: Rajbhandari et al., arXiv:1910.02054, sections 5.1 and 7.
"""

from __future__ import annotations

from labkit.plan.laws.choices import Choices, Cuts
from labkit.plan.laws.in_buckets import InBuckets
from labkit.plan.laws.keeper import Keeper
from labkit.plan.laws.strategy import Amounts
from labkit.plan.model.tape import GRADIENTS, OTHER, Bytes, minus
from labkit.plan.partition.buckets import Bucket, Live, in_buckets
from labkit.plan.partition.groups import ParamGroup


class ZeRO1Keeper(Keeper):
    """ZeRO-1: gradients stay whole until the last pass; then each bucket leaves, and 1/n of it comes back."""

    in_place, last_differs = False, True
    leaving: Bucket | None = None

    def cut(self, bucket_bytes: int) -> list[Bucket]:
        """Padded buckets."""
        return in_buckets(self.layers, self.n, self.sums, bucket_bytes, self.grouping)

    @property
    def owned(self) -> list[tuple[ParamGroup, int]]:
        """A flat part of each bucket."""
        return [(group, numel // self.n) for bucket in self.buckets for group, numel in bucket.parts.items()]

    def gradients(self, numel: int) -> int:
        """No gradients are held all the time."""
        return 0

    def take(self, live: Live, extra: Bytes, bucket: Bucket, member: tuple[int, str], fresh: int) -> Bytes:
        """The first gradient stays, later ones are added to it."""
        if member not in bucket.arrivals:
            bucket.arrivals.add(member)
            bucket.grads += fresh * (1 + self.widens)
            live.add(GRADIENTS, fresh * (1 + self.widens))
        return minus(extra, (0, fresh, 0, 0, 0))

    def send(self, live: Live, bucket: Bucket, extra: Bytes, when: str) -> None:
        """Waits for the bucket before, packs this one's gradients and frees them. Memory for the answer, 1/n of the
        bucket, is allocated at once."""
        if self.leaving is not None:
            self.settle(live, self.leaving)
        self.leaving = bucket
        bucket.arrivals.clear()
        bucket.packed = self.part
        grads, elements = bucket.grads, sum(size for run in bucket.runs.values() for *_, size in run)
        for group, numel in bucket.parts.items():
            live.add(OTHER, numel * self.sums)
            live.see(extra, when)
            live.add(GRADIENTS, -(grads * sum(size for *_, size in bucket.runs[group]) // elements))
            live.add(bucket.packed, numel // self.n * self.sums)
            live.see(extra, when)
            if self.n == 1:  # the answer is a copy, made at once
                live.add(OTHER, -numel * self.sums)
        bucket.grads = 0

    def settle(self, live: Live, bucket: Bucket) -> None:
        """A bucket has arrived: its buffer is freed, and a part of a later pass is added to that of the first pass."""
        if bucket.packed is not None:
            live.add(OTHER, -bucket.numel * self.sums if self.n > 1 else 0)
            if bucket.packed == OTHER:
                live.add(OTHER, -(bucket.numel // self.n * self.sums))
            bucket.packed = None

    @property
    def part(self) -> int:
        """The kind of memory of an arriving 1/n: it is this rank's gradient."""
        return GRADIENTS

    def between(self, live: Live, numel: int) -> None:
        """These gradients stay whole until the last pass, which leaves 1/n of them."""
        n_bytes = numel * self.sums
        if not self.passes:
            live.add(GRADIENTS, n_bytes)
        if self.sending:
            live.add(GRADIENTS, n_bytes // self.n - n_bytes)

    def pass_ends(self, live: Live) -> None:
        """At the end of the last pass everything arrives; after earlier passes a bucket may still be on its way."""
        if self.final:
            self.finish(live)
        super().pass_ends(live)

    def fill(self, live: Live, numel: int, times: int) -> None:
        """Earlier passes have left whole gradients, as autograd made them."""
        for bucket in self.buckets:
            bucket.arrivals = set(bucket.members)
            bucket.grads = sum(self.sizes[member] for member in bucket.members) * self.sums
            live.add(GRADIENTS, bucket.grads)
        live.add(GRADIENTS, numel * self.sums)
        self.passes += 1

    def finish(self, live: Live) -> None:
        """Everything that is on its way arrives."""
        for bucket in self.buckets:
            self.settle(live, bucket)


class ZeRO1Law(InBuckets):
    """ZeRO-1: what it holds; the rest is as in_buckets.py says."""

    name = words = "zero1"
    title, cuts = "ZeRO-1", Cuts(False, False, True)
    every_pass_sends, kept = False, ZeRO1Keeper

    def left(self, n: int) -> float:
        """All: they are added up, and wait for the last."""
        return 1.0

    def most(self, amounts: Amounts, choices: Choices) -> int:
        """Whole gradients, this rank's part of them, and buckets on their way."""
        bucket = choices.bucket_bytes + amounts.param * choices.gradient_bytes
        return (amounts.numel + amounts.owned) * choices.gradient_bytes + 3 * bucket * amounts.groups

    def gradient_words(self, width: int, share: str) -> str:
        """Whole, then a part."""
        return f"{width} N, then {width} N{share}"
