"""What each strategy of data parallelism does with weights and gradients while a step goes on, in bytes.

              weights   gradients                                                         on their way
    DDP       N         N: the buckets                                                    nothing
    ZeRO1     N         N, as autograd makes them; then 1/n of each bucket that has left  one bucket
    ZeRO2     N         those of one bucket; then 1/n of each that has left               one bucket
    ZeRO3     N/n       those of one unit; then 1/n of each that has left                 one unit (see units.py)

A keeper is called when a unit is needed, a gradient arrives or a pass ends, and changes what is alive. The sizes are
those of labkit.parallel: parameters from last to first in buckets of `bucket_bytes` (the first of 1 MiB), flat, padded
so that n divides them; what leaves is packed into one buffer first, which lives until it has been reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.plan.buckets import ONE_GROUP, Bucket, Live, Params, in_buckets
from labkit.plan.groups import Grouping, ParamGroup
from labkit.plan.tape import GRADIENTS, NOTHING, OTHER, Bytes, minus, plus


class Keeper:
    """DDP: the gradients live in the buckets, so a step changes nothing. All other keepers extend this one.

    grouping: which parameters share an optimizer's group;
    n: ranks that share the state; width: bytes of a weight; sums: bytes of a gradient that is added up and sent;
    widens: True if autograd makes gradients of half that width, and widens them as it adds them up."""

    def __init__(
        self, layers: Sequence[Params], n: int, width: int, bucket_bytes: int, sums: int = 0, widens: bool = False,
        grouping: Grouping = ONE_GROUP,
    ) -> None:  # fmt: skip
        self.layers, self.n, self.width, self.sums, self.widens = layers, n, width, sums or width, widens
        self.grouping = grouping
        self.buckets = self.cut(bucket_bytes)
        self.sizes = {(layer.layer, name): size for layer in layers for name, size in layer.sizes}
        self.home = {member: bucket for bucket in self.buckets for member in bucket.members}
        self.final, self.sending, self.next, self.passes = True, True, 0, 0

    def cut(self, bucket_bytes: int) -> list[Bucket]:
        """The buckets; DDP's need no padding."""
        return in_buckets(self.layers, 1, self.sums, bucket_bytes, self.grouping)

    @property
    def numel(self) -> int:
        """Elements of all buckets, padding included."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def owned(self) -> list[tuple[ParamGroup, int]]:
        """The group and the elements of each tensor that this rank's optimizer steps on."""
        return [(self.grouping.of_weight(name), size) for layer in self.layers for name, size in layer.sizes]

    def weights(self) -> int:
        """Bytes of weights between steps."""
        return self.numel * self.width

    def gradients(self) -> int:
        """Bytes of gradients that are held all the time, between steps too."""
        return self.numel * self.sums

    def pass_begins(self, sending: bool) -> None:
        """A backward of one micro-batch begins; `sending` is True for the last of the step."""
        self.final, self.sending, self.next = sending, sending, 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.members)

    def need(self, live: Live, layer: int, ahead: Sequence[int], more: Bytes = NOTHING) -> None:
        """A layer's weights are needed, those `ahead` next; `more` is alive besides."""
        return None

    def left(self, live: Live, layer: int, more: Bytes = NOTHING) -> None:
        """Nobody computes with the layer's weights any more; in backward its gradients have all arrived."""
        return None

    def enter(self, live: Live, layer: int, ahead: Sequence[int], more: Bytes = NOTHING) -> None:
        """The layer's experts are entered: their weights are needed, if they are not the layer's (pair.py)."""
        return None

    def leave(self, live: Live, layer: int, more: Bytes = NOTHING) -> None:
        """They are left."""
        return None

    def arrive(self, live: Live, more: Bytes, member: tuple[int, str], fresh: int, when: str) -> None:
        """A gradient of `fresh` bytes arrives; `more` is what the layer's tape says is alive, the gradient included."""
        bucket = self.home[member]
        bucket.missing -= 1
        live.see(plus(more, (0, 2 * fresh * self.widens, 0, 0, 0)), when)
        more = self.take(live, more, bucket, member, fresh)
        while self.sending and self.next < len(self.buckets) and not self.buckets[self.next].missing:
            self.next += 1
            self.send(live, self.buckets[self.next - 1], more, when)

    def take(self, live: Live, more: Bytes, bucket: Bucket, member: tuple[int, str], fresh: int) -> Bytes:
        """The gradient is copied into its bucket and freed. Returns what is left of `more`."""
        return minus(more, (0, fresh, 0, 0, 0))

    def send(self, live: Live, bucket: Bucket, more: Bytes, when: str) -> None:
        """A bucket is complete and is reduced in place."""
        return None

    def turns(self, live: Live, ahead: bool, behind: bool, numel: int) -> None:
        """A micro-batch goes forward and one comes back; others are between the two when the first begins (`ahead`) and
        when the second has ended (`behind`). `numel` parameters are those of blocks that are not walked."""
        return None

    def passed(self, live: Live, numel: int) -> None:
        """Forward has been through blocks that are not walked, `numel` parameters."""
        return None

    def between(self, live: Live, numel: int) -> None:
        """The gradients of blocks that are not walked, `numel` parameters, have come and gone as the others did."""
        return None

    def pass_ends(self, live: Live) -> None:
        """The backward is over."""
        self.passes += 1

    def fill(self, live: Live, numel: int, times: int) -> None:
        """Adds the gradients that `times` earlier passes left, also for `numel` parameters that are not walked."""
        self.passes += 1

    def finish(self, live: Live) -> None:
        """The step's gradients are complete and reduced."""
        return None


class ZeRO1Keeper(Keeper):
    """ZeRO-1: gradients stay whole until the last pass; then each bucket leaves, and 1/n of it comes back."""

    leaving: Bucket | None = None

    def cut(self, bucket_bytes: int) -> list[Bucket]:
        """Padded buckets."""
        return in_buckets(self.layers, self.n, self.sums, bucket_bytes, self.grouping)

    @property
    def owned(self) -> list[tuple[ParamGroup, int]]:
        """A flat part of each bucket."""
        return [(group, numel // self.n) for bucket in self.buckets for group, numel in bucket.parts.items()]

    def gradients(self) -> int:
        """No gradients are held all the time."""
        return 0

    def take(self, live: Live, more: Bytes, bucket: Bucket, member: tuple[int, str], fresh: int) -> Bytes:
        """The first gradient stays, later ones are added to it."""
        if member not in bucket.here:
            bucket.here.add(member)
            bucket.grads += fresh * (1 + self.widens)
            live.add(GRADIENTS, fresh * (1 + self.widens))
        return minus(more, (0, fresh, 0, 0, 0))

    def send(self, live: Live, bucket: Bucket, more: Bytes, when: str) -> None:
        """Waits for the bucket before, packs this one's gradients and frees them. Memory for the answer, 1/n of the
        bucket, is allocated at once."""
        if self.leaving is not None:
            self.settle(live, self.leaving)
        self.leaving = bucket
        bucket.here.clear()
        bucket.packed = self.part
        grads, elements = bucket.grads, sum(size for run in bucket.runs.values() for *_, size in run)
        for group, numel in bucket.parts.items():
            live.add(OTHER, numel * self.sums)
            live.see(more, when)
            live.add(GRADIENTS, -(grads * sum(size for *_, size in bucket.runs[group]) // elements))
            live.add(bucket.packed, numel // self.n * self.sums)
            live.see(more, when)
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
            bucket.here = set(bucket.members)
            bucket.grads = sum(self.sizes[member] for member in bucket.members) * self.sums
            live.add(GRADIENTS, bucket.grads)
        live.add(GRADIENTS, numel * self.sums)
        self.passes += 1

    def finish(self, live: Live) -> None:
        """Everything that is on its way arrives."""
        for bucket in self.buckets:
            self.settle(live, bucket)


class ZeRO2Keeper(ZeRO1Keeper):
    """ZeRO-2: every pass sends its gradients, so that 1/n of them stays."""

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
