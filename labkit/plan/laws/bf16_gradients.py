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
from labkit.plan.laws.strategy import Moment, ReducedParameters
from labkit.plan.machine.hardware import Hardware
from labkit.plan.partition.stage import ShardedParameters


class InBf16:
    """Gradients in bf16: what they exclude, how wide they travel, and how long that takes."""

    name, coding_bytes = "bf16", 12

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

    def holds(self, group: ShardedParameters, moment: Moment) -> int:
        """A copy of each bucket that is full."""
        return 2 * group.sent(group.full(moment.arrived))

    def decoding(self, group: ShardedParameters) -> int:
        """Nothing: one bucket after another is widened where it will be summed."""
        return 0

    def one_s(self, state: ReducedParameters, machine: Hardware, n_bytes: float) -> float:
        """An all_reduce of the copies."""
        return state.seconds(machine, "all_reduce", n_bytes)
