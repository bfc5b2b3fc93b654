"""ZeRO-3's keeper: weights come when a unit needs them and go when it is done, gradients go to their owners.

    forward of    0      1      2        backward of    2      1      0
    whole         0 1    1 2    2                       2 1    1 0    0         prefetch=1
    gradients                                           2      2 1    1 0       one unit's appear, one is on its way

What is used in several layers (a tied table) is a unit that stays whole from its first use to the end of the backward.
Sizes are those of labkit.parallel.zero3 and .unit.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.plan.buckets import Bucket, Live, Params
from labkit.plan.keep import ZeRO2Keeper
from labkit.plan.tape import NOTHING, OTHER, PARAMETERS, Bytes, plus


class ZeRO3Keeper(ZeRO2Keeper):
    """One bucket a layer, and one for what `stays`. `gathered`: bytes of a weight that is whole."""

    def __init__(
        self, layers: Sequence[Params], n: int, width: int, gathered: int, prefetch: int, stays: frozenset[str]
    ) -> None:
        self.gathered, self.prefetch, self.stays = gathered, prefetch, stays
        super().__init__(layers, n, width, 0)
        self.staying = [bucket for bucket in self.buckets if any(name in stays for _, name in bucket.members)]
        self.units = {k: bucket for bucket in self.buckets for k, _ in bucket.members if bucket not in self.staying}
        self.whole: set[Bucket] = set()
        self.coming: set[Bucket] = set()

    def cut(self, bucket_bytes: int) -> list[Bucket]:
        """A bucket for each layer, first to last, and one for what is used in several."""
        found = []
        for layer in self.layers:
            own = [(name, size) for name, size in layer.sizes if name not in self.stays]
            if own:
                found.append(Bucket([(layer.layer, name) for name, _ in own], sum(size for _, size in own), self.n))
        both = [(layer.layer, name, size) for layer in self.layers for name, size in layer.sizes if name in self.stays]
        if both:
            found.append(Bucket([(k, name) for k, name, _ in both], sum(size for *_, size in both), self.n))
        return found

    @property
    def last(self) -> Bucket:
        """The first layer's, or what stays."""
        return self.staying[-1] if self.staying else self.buckets[0]

    def weights(self) -> int:
        """1/n of every unit."""
        return sum(self.owned) * self.width

    def pass_begins(self, sending: bool) -> None:
        """Units leave one by one, not when they are complete but when backward has left them."""
        super().pass_begins(sending)
        self.sending = False

    def need(self, live: Live, layer: int, ahead: Sequence[int], more: Bytes = NOTHING) -> None:
        """Gather a unit if it is not there, and start on those ahead."""
        for bucket in [*self.staying, *([self.units[layer]] if layer in self.units else [])]:
            self.start(live, bucket, more)
            if bucket in self.coming:
                self.coming.discard(bucket)
                live.add(OTHER, -self.cast(bucket))
        for each in [k for k in ahead if k in self.units][: self.prefetch]:
            self.start(live, self.units[each], more)

    def cast(self, bucket: Bucket) -> int:
        """Bytes of this rank's part in the width that travels, where that is a copy."""
        return bucket.numel // self.n * self.gathered if self.gathered != self.width else 0

    def start(self, live: Live, bucket: Bucket, more: Bytes) -> None:
        """A unit begins to come: its whole memory is there from now on."""
        if bucket in self.whole:
            return
        self.whole.add(bucket)
        live.add(PARAMETERS, bucket.numel * self.gathered)
        if self.n == 1:  # a group of one answers with a copy
            copy = self.cast(bucket) + bucket.numel * self.gathered
            live.see(plus(more, (0, 0, 0, 0, copy)), "gathering")
        else:
            self.coming.add(bucket)
            live.add(OTHER, self.cast(bucket))

    def free(self, live: Live, bucket: Bucket) -> None:
        """A unit's whole memory is given back."""
        if bucket in self.whole:
            self.whole.discard(bucket)
            live.add(PARAMETERS, -bucket.numel * self.gathered)
            if bucket in self.coming:
                self.coming.discard(bucket)
                live.add(OTHER, -self.cast(bucket))

    def left(self, live: Live, layer: int, more: Bytes = NOTHING) -> None:
        """Free, then reduce what has gradients."""
        if layer in self.units:
            self.free(live, self.units[layer])
            self.reduce(live, self.units[layer], more)

    def reduce(self, live: Live, bucket: Bucket, more: Bytes = NOTHING) -> None:
        """A unit's gradients leave."""
        if bucket.grads:
            self.send(live, bucket, more, "a unit's gradients leave")

    def pass_ends(self, live: Live) -> None:
        """What backward has not left (the first layer, what stays) is freed and reduced."""
        for bucket in self.buckets:
            self.free(live, bucket)
            self.reduce(live, bucket)
        super().pass_ends(live)
