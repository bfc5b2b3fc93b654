"""The law of DDP's gradients on their way in bf16 (labkit.parallel.compress), added up in more bytes.

    holds      a copy of 2 bytes an element of each bucket, from when it is full until it has been widened again
    sends      2 bytes an element
    computes   12 bytes an element of fp32 are read and written: a copy in bf16, and back

    bucket 0    |copy ...............................|
    bucket 1            |copy .......................|
    bucket 2                     |copy ..............|
                backward                    finish, one by one

The gradients themselves stay in their buckets.
"""

from __future__ import annotations

from collections.abc import Iterator

from labkit.plan.laws.choices import Choices
from labkit.plan.laws.keeper import Keeper
from labkit.plan.laws.strategy import State
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.tape import OTHER, Bytes
from labkit.plan.partition.buckets import Bucket, Live


class SentKeeper(Keeper):
    """DDP over more than one rank with gradients that travel as a copy of `element_bytes` each."""

    in_place, last_differs = False, True
    element_bytes = 2.0
    longer: tuple[Bucket, int] | None = None
    middle = 0

    def cut(self, bucket_bytes: int) -> list[Bucket]:
        """The buckets, as DDP's; `most` elements fill one."""
        self.most = bucket_bytes // self.sums
        return super().cut(bucket_bytes)

    def numel_of(self, bucket: Bucket) -> int:
        """Elements of a bucket, those of blocks that are not walked included."""
        return bucket.numel + (self.longer[1] if self.longer and self.longer[0] is bucket else 0)

    def send(self, live: Live, bucket: Bucket, extra: Bytes, when: str) -> None:
        """A bucket is complete: its copy is made and leaves; `extra` is alive besides."""
        live.add(OTHER, 2 * self.numel_of(bucket))
        live.see(extra, when)

    def between(self, live: Live, numel: int) -> None:
        """Blocks that are not walked fill the bucket that is open now; others of theirs have left, and wait."""
        if self.sending:
            bucket = self.buckets[min(self.next, len(self.buckets) - 1)]
            fit = min(numel, max(0, self.most - bucket.numel))
            self.longer = bucket, fit
            self.middle = int((numel - fit) * self.element_bytes)
            live.add(OTHER, self.middle)

    def finish(self, live: Live) -> None:
        """Bucket after bucket arrives and is widened; its copy is freed."""
        for bucket in self.buckets:
            live.add(OTHER, -2 * self.numel_of(bucket))
        live.add(OTHER, -self.middle)
        self.middle = 0


class InBf16:
    """Gradients in bf16: what they exclude, how wide they travel, and how long that takes."""

    name, coding_bytes, keeper = "bf16", 12, SentKeeper

    def excludes(self, choices: Choices) -> Iterator[str]:
        """Gradients that are no wider."""
        if choices.gradient_bytes <= 2:
            yield (f"with precision={choices.precision!r} gradients are in bf16 already: gradients='exact', or '8bit'")

    def element_bytes(self, width: int) -> float:
        """Two."""
        return 2.0

    def remembered_bytes(self, numel: int, n: int, width: int) -> int:
        """None: what rounding cuts off is lost."""
        return 0

    def one_s(self, state: State, machine: Hardware, n_bytes: float) -> float:
        """An all_reduce of the copies."""
        return state.seconds(machine, "all_reduce", n_bytes)
