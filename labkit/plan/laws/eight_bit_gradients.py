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

from labkit.plan.laws.choices import Choices
from labkit.plan.laws.strategy import Moment, ReducedParameters
from labkit.plan.machine.hardware import Hardware
from labkit.plan.partition.stage import ShardedParameters

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


class EightBitGradientsLaw:
    """Gradients in 8 bits: what they exclude, how wide they travel, and how long that takes."""

    name, coding_bytes = "8bit", 140

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

    def holds(self, group: ShardedParameters, moment: Moment) -> int:
        """Codes of all buckets that are full, sent and coming. As one leaves, the bucket before is decoded, added up
        and sent on; then this one is encoded, one part after another in fp32."""
        coded = [Coded(bucket.numel, group.n) for bucket in group.buckets[: group.full(moment.arrived)]]
        codes = sum((group.n + 1) * one.message for one in coded[:-1])
        if not moment.leaves:
            return codes + sum(2 * group.n * one.message for one in coded[-1:])
        turned = [group.n * one.part + max(one.units, one.part) for one in coded[-2:-1]]
        encoded = [group.n * (one.part + one.message) + one.units for one in coded[-1:]]
        return codes + max([*encoded, *turned], default=0)

    def decoding(self, group: ShardedParameters) -> int:
        """Bucket after bucket is decoded in fp32, and its codes are freed."""
        coded = [Coded(bucket.numel, group.n) for bucket in group.buckets]
        codes = [(group.n + 1) * one.message for one in coded]
        turned = sum(codes) - coded[-1].message + group.n * coded[-1].part + max(coded[-1].units, coded[-1].part)
        decoded = [sum(codes[k:]) - one.message + group.n * one.part + one.units for k, one in enumerate(coded)]
        return max(turned, *decoded)

    def one_s(self, state: ReducedParameters, machine: Hardware, n_bytes: float) -> float:
        """Codes cannot be added on their way: each rank gets its part of all, adds it up, and sends the sum to all."""
        return machine.all_to_all_s(state.share, state.stride, n_bytes) + state.seconds(machine, "all_gather", n_bytes)
