"""The law of DDP's gradients on their way in 8 bits (labkit.parallel.eight_bit_gradients).

    sends      1 byte an element and 4 for a unit of 256 of them: an all_to_all of codes, and an all_gather of the sums'
    holds      codes on their way, sent and coming; between steps what rounding has cut off, 4 + 4/n bytes an element
    computes   140 bytes an element of fp32 are read and written to code and decode

    bucket 0    |codes ......................................|        then those of the sums
    bucket 1            |codes ..............................|
    bucket 2                     |codes .....................|
                backward                    finish, one by one

The bucket before is decoded, added up and sent on when the next one leaves, and each is in fp32 for a moment while it
is encoded or decoded: what it needs then are the moments below, in the order of the real code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from labkit.plan.laws.bf16_gradients import SentKeeper
from labkit.plan.laws.choices import Choices
from labkit.plan.laws.strategy import State
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.tape import NOTHING, OTHER, Bytes, plus
from labkit.plan.partition.buckets import Bucket, Live

TILE = 256
"""Numbers that share a unit."""
UNIT_BYTES = 4
"""Bytes of a unit, in fp32."""


def message_bytes(k: int, tile: int = TILE) -> int:
    """Bytes of k codes and of the units of their tiles, of which the last may be shorter."""
    return k + UNIT_BYTES * -(-k // tile)


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


class CodedKeeper(SentKeeper):
    """DDP over more than one rank with gradients that travel in 8 bits."""

    element_bytes = 1 + UNIT_BYTES / TILE
    leaving: Bucket | None = None

    def coded(self, bucket: Bucket) -> Coded:
        """The sizes of a bucket's codes."""
        return Coded(self.numel_of(bucket), self.n)

    def send(self, live: Live, bucket: Bucket, extra: Bytes, when: str) -> None:
        """A bucket is complete: its codes are made and leave; `extra` is alive besides."""
        self.turn(live, extra, when)
        coded, self.leaving = self.coded(bucket), bucket
        _see(live, extra, self.n * (coded.part + coded.message) + coded.units, when)
        live.add(OTHER, 2 * self.n * coded.message)
        live.see(extra, when)

    def turn(self, live: Live, extra: Bytes, when: str) -> None:
        """The codes of the bucket before have come: they are decoded and added up, and the sum leaves as codes."""
        if self.leaving is None:
            return
        coded, self.leaving = self.coded(self.leaving), None
        live.add(OTHER, -self.n * coded.message)  # what was sent
        _see(live, extra, self.n * coded.part + max(coded.units, coded.part), when)
        live.add(OTHER, coded.message)

    def finish(self, live: Live) -> None:
        """Bucket after bucket arrives and is decoded; its codes are freed."""
        when = "the gradients' way"
        self.turn(live, NOTHING, when)
        for bucket in self.buckets:
            coded = self.coded(bucket)
            live.add(OTHER, -coded.message)
            _see(live, NOTHING, self.n * coded.part + coded.units, when)
            live.add(OTHER, -self.n * coded.message)
        live.add(OTHER, -self.middle)
        self.middle = 0


def _see(live: Live, extra: Bytes, n_bytes: int, when: str) -> None:
    live.see(plus(extra, (0, 0, 0, 0, n_bytes)), when)


class InEightBits:
    """Gradients in 8 bits: what they exclude, how wide they travel, and how long that takes."""

    name, coding_bytes, keeper = "8bit", 140, CodedKeeper

    def excludes(self, choices: Choices) -> Iterator[str]:
        """A loss scale that changes between two steps."""
        if choices.precision == "fp16":
            yield (
                "gradients='8bit' adds what rounding has cut off to the next step's gradients, and with "
                "precision='fp16' these may have another loss scale: precision='amp', or gradients='bf16'"
            )

    def element_bytes(self, width: int) -> float:
        """A code, and its share of a unit."""
        return 1 + UNIT_BYTES / TILE

    def remembered_bytes(self, numel: int, n: int, width: int) -> int:
        """Bytes of what rounding has cut off so far: of a rank's gradients, and of its 1/n of the sums."""
        return (numel + -(-numel // n)) * max(4, width)

    def one_s(self, state: State, machine: Hardware, n_bytes: float) -> float:
        """Codes cannot be added on their way: each rank gets its part of all, adds it up, and sends the sum to all."""
        return machine.all_to_all_s(state.share, state.stride, n_bytes) + state.seconds(machine, "all_gather", n_bytes)
