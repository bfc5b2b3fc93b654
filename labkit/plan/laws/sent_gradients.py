"""How DDP's gradients travel: the ways that a recipe can name, each with its law.

                bytes an element on the wire    remembered             read and written to code and decode
    exact       as they are added up            nothing                nothing
    bf16        2                               nothing                a copy in bf16, and back
    8bit        1 + 4/256                       4 + 4/n an element     see labkit.parallel.eight_bit_gradients

Only DDP has these choices. What they do to numbers: labkit.parallel.compress (bf16),
labkit.parallel.eight_bit_gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

from labkit.plan.laws.bf16_gradients import InBf16
from labkit.plan.laws.choices import Choices
from labkit.plan.laws.eight_bit_gradients import EightBitGradientsLaw
from labkit.plan.laws.strategy import Moment, ReducedParameters
from labkit.plan.machine.hardware import Hardware
from labkit.plan.partition.stage import ShardedParameters


class Way(Protocol):
    """The law of one way."""

    @property
    def name(self) -> str:
        """Its name in a recipe."""

    @property
    def coding_bytes(self) -> int:
        """Bytes that a device reads and writes for an element of fp32, all operations of both halves together."""

    def holds(self, group: ShardedParameters, moment: Moment) -> int:
        """Bytes that DDP holds over several ranks in the last pass, beside the gradients themselves."""

    def decoding(self, group: ShardedParameters) -> int:
        """Bytes at the highest moment when all buckets have left."""

    def excludes(self, choices: Choices) -> Iterator[str]:
        """Why it cannot be combined with these choices, and the mend."""

    def element_bytes(self, width: int) -> float:
        """Bytes on the wire for an element that is added up in `width` bytes."""

    def remembered_bytes(self, numel: int, n: int, width: int) -> int:
        """Bytes that are kept between steps for `numel` elements over n ranks."""

    def one_s(self, state: ReducedParameters, machine: Hardware, n_bytes: float) -> float:
        """Seconds until a bucket of `n_bytes` has been summed over all ranks."""


class Exact:
    """Gradients travel as they are added up."""

    name, coding_bytes = "exact", 0

    def excludes(self, choices: Choices) -> Iterator[str]:
        """Nothing."""
        return iter(())

    def element_bytes(self, width: int) -> float:
        """As many as it is added up in."""
        return float(width)

    def remembered_bytes(self, numel: int, n: int, width: int) -> int:
        """None: nothing is cut off."""
        return 0

    def holds(self, group: ShardedParameters, moment: Moment) -> int:
        """Nothing: they are summed where they are."""
        return 0

    def decoding(self, group: ShardedParameters) -> int:
        """Nothing."""
        return 0

    def one_s(self, state: ReducedParameters, machine: Hardware, n_bytes: float) -> float:
        """An all_reduce."""
        return state.seconds(machine, "all_reduce", n_bytes)


WAYS: Mapping[str, Way] = MappingProxyType({way.name: way for way in (Exact(), InBf16(), EightBitGradientsLaw())})
"""The ways by their names in a recipe."""
