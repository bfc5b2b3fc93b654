"""Where each rank sits on the dp x pp x tp grid.

Rank order is dp-major, tp-minor: neighbours in rank are neighbours in tp, the axis that sends most, so that a
tensor-parallel group lies on one node (Megatron-LM, arXiv:2104.04473, section 3).

    rank = (dp_index * pp + pp_index) * tp + tp_index

    Layout(dp=2, pp=2, tp=2)      pp=0       pp=1
                          dp=0   [0 1]      [2 3]        brackets: one tp group
                          dp=1   [4 5]      [6 7]
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

AXES = ("dp", "pp", "tp")
CUT_AXES = ("dp_shard", "dp_replicate")
"""The two axes that dp is cut into where state is sharded in groups of its ranks and copied from group to group."""
SHORT = MappingProxyType({"dp": "dp", "pp": "pp", "tp": "tp", "dp_shard": "shard", "dp_replicate": "copies"})
"""A short word for each axis, for tables and pictures."""


@dataclass(frozen=True)
class Layout:
    """The number of ranks along each axis. Raises ValueError for a size below 1."""

    dp: int = 1
    pp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{axis} must be a whole number of ranks, at least 1, got {size!r}")

    @property
    def size(self) -> int:
        """Number of ranks, dp * pp * tp."""
        return self.dp * self.pp * self.tp

    def coords(self, rank: int) -> dict[str, int]:
        """The position of `rank` along each axis. Raises ValueError for a rank outside the layout."""
        if not 0 <= rank < self.size:
            raise ValueError(f"ranks of {self} are 0 to {self.size - 1}, got {rank}")
        return {"dp": rank // (self.pp * self.tp), "pp": rank // self.tp % self.pp, "tp": rank % self.tp}

    def rank(self, dp: int = 0, pp: int = 0, tp: int = 0) -> int:
        """The rank at a position; the inverse of `coords`. Raises ValueError for a position outside the layout."""
        for axis, index in zip(AXES, (dp, pp, tp), strict=True):
            if not 0 <= index < getattr(self, axis):
                raise ValueError(f"positions along {axis} of {self} are 0 to {getattr(self, axis) - 1}, got {index}")
        return (dp * self.pp + pp) * self.tp + tp

    def ranks(self, axis: str, of: int) -> tuple[int, ...]:
        """The ranks that differ from `of` along `axis` alone, in axis order: its group. ValueError for another axis."""
        if axis not in AXES:
            raise ValueError(f"the axes of a layout are {', '.join(AXES)}, got {axis!r}")
        position = self.coords(of)
        return tuple(self.rank(**{**position, axis: index}) for index in range(getattr(self, axis)))

    def cut(self, shard: int, of: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The two groups of rank `of` when dp is cut into groups of `shard`: its neighbours along dp, with whom it
        shares one copy of the state; and those who hold in other copies what it holds in its own.

            Layout(dp=4).cut(2, of=1)      [0 1] [2 3]  ->  (0, 1), (1, 3)

        Raises ValueError if dp is no multiple of `shard`."""
        if not isinstance(shard, int) or isinstance(shard, bool) or shard < 1 or self.dp % shard:
            raise ValueError(f"dp={self.dp} ranks do not cut into groups of {shard!r}: take a divisor of {self.dp}")
        ranks, index = self.ranks("dp", of), self.coords(of)["dp"]
        first = index - index % shard
        return ranks[first : first + shard], ranks[index % shard :: shard]
