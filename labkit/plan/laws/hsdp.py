"""The law of HSDP (labkit.parallel.hsdp): ZeRO-3 inside groups of ranks, and copies of the state from group to group.

    sends      inside a group of s ranks as ZeRO-3, 3 m (s-1)/s N; across r = n/s groups an all-reduce of this rank's
               part of the gradients, once a step: 2 (r-1)/r N/s
    waits      as ZeRO-3; what goes across hides behind the last backward

Where cp cuts rows, all ranks of cp are in a group. Source: Zhao et al., arXiv:2304.11277, section 3.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from labkit.plan.laws.choices import Choices
from labkit.plan.laws.zero3 import ZeRO3Law
from labkit.plan.partition.layout import CUT_AXES, Layout


@dataclass(frozen=True)
class HSDPLaw(ZeRO3Law):
    """HSDP: state is cut in groups of `shard_ranks` ranks of dp, and each group has a copy."""

    shard_ranks: int
    axes = CUT_AXES

    @property
    def words(self) -> str:
        """`hsdp of 8`"""
        return f"hsdp of {self.shard_ranks}"

    @property
    def title(self) -> str:
        """`HSDP of 8`"""
        return f"HSDP of {self.shard_ranks}"

    def excludes(self, choices: Choices) -> Iterator[str]:
        """What ZeRO-3 excludes, and the other strategies."""
        if choices.strategy != self.name:
            yield (
                f"shard_ranks={self.shard_ranks} is a choice for strategy={self.name!r}, got {choices.strategy!r}: "
                "leave it out"
            )
        yield from super().excludes(choices)

    def sharing(self, layout: Layout, copies: int) -> int:
        """The ranks of a group."""
        return self.shard_ranks * layout.cp

    def refuses(self, layout: Layout) -> Iterator[str]:
        """A group that does not divide dp, and one that ep cuts in another way."""
        if layout.dp % self.shard_ranks:
            near = max(size for size in range(1, self.shard_ranks + 1) if layout.dp % size == 0)
            yield f"dp={layout.dp} ranks do not cut into groups of shard_ranks={self.shard_ranks}: {near} would do"
        if layout.ep > 1:
            yield (
                f"with ep={layout.ep} experts are sharded along expert_dp and the rest along dp: leave "
                f"shard_ranks={self.shard_ranks} out"
            )

    def across(self, layout: Layout, copies: int) -> tuple[int, int]:
        """The groups, and how far apart the ranks are that have the same part."""
        size = self.sharing(layout, copies)
        return layout.dp * layout.cp // size, size * layout.tp * layout.pp
