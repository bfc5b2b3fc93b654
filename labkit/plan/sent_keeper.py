"""What DDP holds while its gradients travel in fewer bytes than they are added up in.

    bucket 0    |copy or codes ......................................|        in bf16: a copy of 2 bytes an element
    bucket 1            |copy or codes ..............................|        8 bits: codes on their way, sent and
    bucket 2                     |copy or codes .....................|        coming; then those of the sums
                backward                              finish, one by one

The gradients themselves stay in their buckets (keep.py). In 8 bits the bucket before is decoded, added up and sent on
when the next one leaves, and each is in fp32 for a moment while it is encoded or decoded: what it needs then are the
moments below, in the order in which labkit.parallel.eight_bit_gradients has them. What is remembered between steps is
`remembered_bytes` of sent_gradients.py.
"""

from __future__ import annotations

from typing import NamedTuple

from labkit.plan.buckets import Bucket, Live
from labkit.plan.keep import Keeper
from labkit.plan.sent_gradients import TILE, UNIT_BYTES, element_bytes, message_bytes
from labkit.plan.tape import NOTHING, OTHER, Bytes, plus


class Coded(NamedTuple):
    """Bytes of one bucket of `numel` elements on `n` ranks: of a rank's message, of all units, of a part in fp32."""

    numel: int
    n: int

    @property
    def message(self) -> int:
        """Codes and units for one rank."""
        return message_bytes(-(-self.numel // self.n))

    @property
    def units(self) -> int:
        """The units of all parts."""
        return self.n * UNIT_BYTES * self.tiles

    @property
    def part(self) -> int:
        """One part in fp32, in whole tiles."""
        return 4 * min(TILE, -(-self.numel // self.n)) * self.tiles

    @property
    def tiles(self) -> int:
        """Tiles of one part."""
        return -(-self.numel // self.n // TILE)


class SentKeeper(Keeper):
    """DDP over more than one rank with gradients that travel in 16 or 8 bits (`way`)."""

    way = "bf16"
    leaving: Bucket | None = None
    longer: tuple[Bucket, int] | None = None
    middle = 0

    def cut(self, bucket_bytes: int) -> list[Bucket]:
        """The buckets, as DDP's; `most` elements fill one."""
        self.most = bucket_bytes // self.sums
        return super().cut(bucket_bytes)

    def numel_of(self, bucket: Bucket) -> int:
        """Elements of a bucket, those of blocks that are not walked included."""
        return bucket.numel + (self.longer[1] if self.longer and self.longer[0] is bucket else 0)

    def coded(self, bucket: Bucket) -> Coded:
        """The sizes of a bucket's codes."""
        return Coded(self.numel_of(bucket), self.n)

    def send(self, live: Live, bucket: Bucket, more: Bytes, when: str) -> None:
        """A bucket is complete: its copy, or its codes, are made and leave; `more` is alive besides."""
        if self.way == "bf16":
            live.add(OTHER, 2 * self.numel_of(bucket))
            live.see(more, when)
            return
        self.turn(live, more, when)
        coded, self.leaving = self.coded(bucket), bucket
        _see(live, more, self.n * (coded.part + coded.message) + coded.units, when)
        live.add(OTHER, 2 * self.n * coded.message)
        live.see(more, when)

    def turn(self, live: Live, more: Bytes, when: str) -> None:
        """The codes of the bucket before have come: they are decoded and added up, and the sum leaves as codes."""
        if self.leaving is None:
            return
        coded, self.leaving = self.coded(self.leaving), None
        live.add(OTHER, -self.n * coded.message)  # what was sent
        _see(live, more, self.n * coded.part + max(coded.units, coded.part), when)
        live.add(OTHER, coded.message)

    def between(self, live: Live, numel: int) -> None:
        """Blocks that are not walked fill the bucket that is open now; others of theirs have left, and wait."""
        if self.sending:
            bucket = self.buckets[min(self.next, len(self.buckets) - 1)]
            fit = min(numel, max(0, self.most - bucket.numel))
            self.longer = bucket, fit
            self.middle = int((numel - fit) * element_bytes(self.way, self.sums))
            live.add(OTHER, self.middle)

    def finish(self, live: Live) -> None:
        """Bucket after bucket arrives and is widened; its copy or its codes are freed."""
        when = "the gradients' way"
        self.turn(live, NOTHING, when)
        for bucket in self.buckets:
            if self.way == "bf16":
                live.add(OTHER, -2 * self.numel_of(bucket))
                continue
            coded = self.coded(bucket)
            live.add(OTHER, -coded.message)
            _see(live, NOTHING, self.n * coded.part + coded.units, when)
            live.add(OTHER, -self.n * coded.message)
        live.add(OTHER, -self.middle)
        self.middle = 0


class CodedKeeper(SentKeeper):
    """Gradients in 8 bits."""

    way = "8bit"


def _see(live: Live, more: Bytes, n_bytes: int, when: str) -> None:
    live.see(plus(more, (0, 0, 0, 0, n_bytes)), when)


def sent_keeper(way: str, n: int) -> type[Keeper]:
    """DDP's keeper for gradients that travel this way over `n` ranks."""
    if way == "exact" or n == 1:
        return Keeper
    return SentKeeper if way == "bf16" else CodedKeeper
