"""What ddp, zero1, zero2 and zero3 share: all ranks that have the same weights are one group, on every layout."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.plan.laws.choices import Choices
from labkit.plan.partition.layout import Layout
from labkit.plan.partition.stage import ShardedParameters


class OneGroup:
    """The answers of a law whose strategy talks in one group of ranks."""

    options: tuple[str, ...] = ()
    axes: tuple[str, ...] = ("dp",)

    def decoding(self, group: ShardedParameters, choices: Choices) -> int:
        """None: only DDP's gradients may be coded."""
        return 0

    def refuses(self, layout: Layout) -> Iterator[str]:
        """No layout."""
        return iter(())

    def sharing(self, layout: Layout, copies: int) -> int:
        """All ranks that have the same weights."""
        return layout.dp * layout.cp * copies

    def across(self, layout: Layout, copies: int) -> tuple[int, int]:
        """There is one group."""
        return 1, 1

    def expert_gathers(self, gathers: float, choices: Choices) -> float:
        """As those of all else: weights are whole while blocks run again."""
        return gathers
