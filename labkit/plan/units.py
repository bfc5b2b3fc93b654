"""ZeRO-3's keeper: weights come when a unit needs them and go when it is done, gradients go to their owners.

    forward of    0      1      2        backward of    2      1      0
    whole         0 1    1 2    2                       2 1    1 0    0         prefetch=1
    gradients                                           2      2 1    1 0       one unit's appear, one is on its way

A weight that several layers use (a tied table) is a unit that stays whole from its first use to the end of backward.
Without resharding all units do: they are gathered in the first forward, and freed one by one in the last backward.
Sizes are those of labkit.parallel.zero3.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.plan.buckets import ONE_GROUP, Bucket, Live, Params
from labkit.plan.groups import Grouping
from labkit.plan.keep import ZeRO2Keeper
from labkit.plan.ops import is_linear
from labkit.plan.tape import NOTHING, OTHER, PARAMETERS, Bytes, plus


class ZeRO3Keeper(ZeRO2Keeper):
    """One bucket for each layer, and one for the weights named in `stays`. `gathered`: bytes of an element of a
    gathered weight; `prefetch`: how many units are gathered ahead; `reshard`: False if they stay whole for backward;
    `codes`: True if the weights of a block's linears travel in 8 bits (labkit.parallel.eight_bit_weights)."""

    def __init__(
        self,
        layers: Sequence[Params],
        n: int,
        width: int,
        gathered: int,
        prefetch: int,
        stays: frozenset[str],
        sums: int = 0,
        widens: bool = False,
        reshard: bool = True,
        codes: bool = False,
        grouping: Grouping = ONE_GROUP,
    ) -> None:
        self.codes = codes
        self.gathered, self.prefetch, self.stays, self.reshard = gathered, prefetch, stays, reshard
        # whether units are not freed now, and will not be in backward; elements of blocks not walked that are whole
        self.keeps, self.behind, self.middle = not reshard, False, 0
        super().__init__(layers, n, width, 0, sums, widens, grouping)
        self.staying = [bucket for bucket in self.buckets if any(name in stays for _, name in bucket.members)]
        self.units = {k: bucket for bucket in self.buckets for k, _ in bucket.members if bucket not in self.staying}
        self.whole: set[Bucket] = set()
        self.coming: set[Bucket] = set()

    def cut(self, bucket_bytes: int) -> list[Bucket]:
        """A bucket for each layer, first to last, and one for what is used in several."""
        buckets = []
        for layer in self.layers:
            own = [(name, size) for name, size in layer.sizes if name not in self.stays]
            if own:
                buckets.append(Bucket([(layer.layer, name, size) for name, size in own], self.n, self.grouping))
        tied = [(layer.layer, name, size) for layer in self.layers for name, size in layer.sizes if name in self.stays]
        if tied:
            buckets.append(Bucket(tied, self.n, self.grouping))
        return buckets

    @property
    def last(self) -> Bucket:
        """The bucket that leaves last: the one that stays, or else the first layer's."""
        return self.staying[-1] if self.staying else self.buckets[0]

    def weights(self) -> int:
        """Bytes of weights between steps: 1/n of every unit."""
        return sum(size for _, size in self.owned) * self.width

    def turns(self, live: Live, ahead: bool, behind: bool, numel: int) -> None:
        """Without resharding, units are whole at the start if a micro-batch is ahead, at the end if one is behind."""
        self.behind = behind
        if ahead and not self.reshard:
            for bucket in self.buckets:
                if bucket not in self.whole:
                    self.whole.add(bucket)
                    live.add(PARAMETERS, bucket.numel * self.gathered)
            self.passed(live, numel)

    def passed(self, live: Live, numel: int) -> None:
        """Without resharding they are whole now."""
        if not self.reshard:
            live.add(PARAMETERS, (numel - self.middle) * self.gathered)
            self.middle = numel

    def between(self, live: Live, numel: int) -> None:
        """1/n of these gradients stays; their weights are freed."""
        super().between(live, numel)
        if not self.keeps:
            live.add(PARAMETERS, -self.middle * self.gathered)
            self.middle = 0

    def pass_begins(self, sending: bool) -> None:
        """A unit's gradients are sent when backward has left the unit, and not as soon as they are complete."""
        super().pass_begins(sending)
        self.sending, self.keeps = False, self.behind and not self.reshard

    def need(self, live: Live, layer: int, ahead: Sequence[int], more: Bytes = NOTHING) -> None:
        """Gather a unit that is not whole yet, and start to gather the next `prefetch` ones."""
        for bucket in [*self.staying, *([self.units[layer]] if layer in self.units else [])]:
            self.start(live, bucket, more)
            if bucket in self.coming:
                self.decode(live, bucket, more)
                self.coming.discard(bucket)
                live.add(OTHER, -self.cast(bucket))
        for upcoming in [k for k in ahead if k in self.units][: self.prefetch]:
            self.start(live, self.units[upcoming], more)

    def cast(self, bucket: Bucket) -> int:
        """Bytes of a copy of this rank's part in the width that is sent, 0 if sent as it is stored; and of codes."""
        coded = sum(self.coded(bucket))
        if coded:
            return coded // self.n * (self.n > 1) + coded
        return bucket.numel // self.n * self.gathered if self.gathered != self.width else 0

    def coded(self, bucket: Bucket) -> list[int]:
        """Elements of each weight that travels in 8 bits."""
        return [self.sizes[member] for member in bucket.members if self.codes and is_linear(member[1])]

    def decode(self, live: Live, bucket: Bucket, more: Bytes) -> None:
        """One weight after the other is decoded by way of fp32."""
        live.see(plus(more, (0, 0, 0, 0, 4 * max(self.coded(bucket), default=0))), "decoding")

    def start(self, live: Live, bucket: Bucket, more: Bytes) -> None:
        """Starts to gather a unit: from now on memory for all of it is held."""
        if bucket in self.whole:
            return
        self.whole.add(bucket)
        live.add(PARAMETERS, bucket.numel * self.gathered)
        # a group of one has its answer at once; a copy in another width lives until then
        if self.n == 1 and not self.coded(bucket):
            live.see(plus(more, (0, 0, 0, 0, self.cast(bucket))), "gathering")
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
        """Frees the unit, then reduces its gradients if there are any."""
        if layer in self.units:
            if not self.keeps:
                self.free(live, self.units[layer])
            self.reduce(live, self.units[layer], more)

    def reduce(self, live: Live, bucket: Bucket, more: Bytes = NOTHING) -> None:
        """A unit's gradients leave."""
        if bucket.grads:
            self.send(live, bucket, more, "a unit's gradients leave")

    def pass_ends(self, live: Live) -> None:
        """Frees and reduces what backward has not left yet: the first layer, and the unit that stays."""
        for bucket in self.buckets:
            if not self.keeps:
                self.free(live, bucket)
            self.reduce(live, bucket)
        self.keeps = not self.reshard
        super().pass_ends(live)

    def finish(self, live: Live) -> None:
        """Everything that is on its way arrives, and no weight stays whole."""
        for bucket in self.buckets:
            self.free(live, bucket)
        live.add(PARAMETERS, -self.middle * self.gathered)
        self.middle = 0
        super().finish(live)
