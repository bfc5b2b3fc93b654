"""What a strategy holds of weights and gradients while a step goes on, in bytes: DDP's, which the others extend.

              weights   gradients                                                         on their way
    DDP       N         N: the buckets                                                    nothing
    ZeRO1     N         N, as autograd makes them; then 1/n of each bucket that has left  one bucket
    ZeRO2     N         those of one bucket; then 1/n of each that has left               one bucket
    ZeRO3     N/n       those of one unit; then 1/n of each that has left                 one unit

A keeper is called when a unit is needed, a gradient arrives or a pass ends, and changes what is alive. The sizes are
those of labkit.parallel: parameters from last to first in buckets of `bucket_bytes` (the first of 1 MiB), flat, padded
so that n divides them; what leaves is packed into one buffer first, which lives until it has been reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.plan.model.tape import NOTHING, Bytes, minus, plus
from labkit.plan.partition.buckets import ONE_GROUP, Bucket, Live, Params, in_buckets
from labkit.plan.partition.groups import Grouping, ParamGroup


class Keeper:
    """DDP: the gradients live in the buckets, so a step changes nothing. All other keepers extend this one.

    grouping: which parameters share an optimizer's group;
    n: ranks that share the state; width: bytes of a weight; sums: bytes of a gradient that is added up and sent;
    widens: True if autograd makes gradients of half that width, and widens them as it adds them up."""

    in_place = True
    """True if gradients lie where they will be summed, so that one that arrives changes nothing."""
    last_differs = False
    """True if only the last micro-batch of a step makes buckets leave."""

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

    def weights(self, numel: int) -> int:
        """Bytes of weights between steps; `numel` are elements of blocks that are not walked."""
        return (self.numel + numel) * self.width

    def gradients(self, numel: int) -> int:
        """Bytes of gradients that are held all the time, between steps too; `numel` as above."""
        return (self.numel + numel) * self.sums

    def pass_begins(self, sending: bool) -> None:
        """A backward of one micro-batch begins; `sending` is True for the last of the step."""
        self.final, self.sending, self.next = sending, sending, 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.members)

    def need(self, live: Live, layer: int, ahead: Sequence[int], extra: Bytes = NOTHING) -> None:
        """A layer's weights are needed, those `ahead` next; `extra` is alive besides."""
        return None

    def left(self, live: Live, layer: int, extra: Bytes = NOTHING) -> None:
        """Nobody computes with the layer's weights any more; in backward its gradients have all arrived."""
        return None

    def enter(self, live: Live, layer: int, ahead: Sequence[int], extra: Bytes = NOTHING) -> None:
        """The layer's experts are entered: their weights are needed, if they are not the layer's (keeper_pair.py)."""
        return None

    def leave(self, live: Live, layer: int, extra: Bytes = NOTHING) -> None:
        """They are left."""
        return None

    def arrive(self, live: Live, extra: Bytes, member: tuple[int, str], fresh: int, when: str) -> None:
        """A gradient of `fresh` bytes arrives; `extra` is alive in its layer, the gradient included."""
        bucket = self.home[member]
        bucket.missing -= 1
        live.see(plus(extra, (0, 2 * fresh * self.widens, 0, 0, 0)), when)
        extra = self.take(live, extra, bucket, member, fresh)
        while self.sending and self.next < len(self.buckets) and not self.buckets[self.next].missing:
            self.next += 1
            self.send(live, self.buckets[self.next - 1], extra, when)

    def take(self, live: Live, extra: Bytes, bucket: Bucket, member: tuple[int, str], fresh: int) -> Bytes:
        """The gradient is copied into its bucket and freed. Returns what is left of `extra`."""
        return minus(extra, (0, fresh, 0, 0, 0))

    def send(self, live: Live, bucket: Bucket, extra: Bytes, when: str) -> None:
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
