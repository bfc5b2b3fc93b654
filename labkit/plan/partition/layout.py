"""Where each rank sits on the dp x pp x cp x tp grid, and which of its neighbours along dp share experts.

Rank order is dp-major, tp-minor: neighbours in rank are neighbours in tp, the axis that sends most, so that a
tensor-parallel group lies on one node (Megatron-LM, arXiv:2104.04473, section 3).

    rank = ((dp_index * pp + pp_index) * cp + cp_index) * tp + tp_index

    Layout(dp=2, pp=2, tp=2)      pp=0       pp=1
                          dp=0   [0 1]      [2 3]        brackets: one tp group
                          dp=1   [4 5]      [6 7]

Two groups follow from these axes:

    data          dp x cp: ranks that hold the same weights and see different tokens, other rows or other parts of a
                  row. They add up their gradients.
    ep            runs of ep neighbours along dp, between whom the experts of a layer are dealt out; `expert_dp` are
                  the ranks of `data` that hold the same experts. ep is no axis of its own: it adds no ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from labkit.plan.checks import is_whole

AXES = ("dp", "pp", "tp")
"""The axes that every model has a use for."""
GRID = ("dp", "pp", "cp", "tp")
"""All axes that multiply the number of ranks, in rank order."""
GROUPS = (*GRID, "data", "ep", "expert_dp")
"""All groups that a rank is in, besides the world."""
CUT_AXES = ("dp_shard", "dp_replicate")
"""The two axes that dp is cut into where state is sharded in groups of its ranks and copied from group to group."""
SHORT = MappingProxyType(dict(zip((*GRID, *CUT_AXES), (*GRID, "shard", "copies"), strict=True)))
"""A short word for each axis, for tables and pictures."""


@dataclass(frozen=True)
class Layout:
    """The number of ranks along each axis; `cp` cuts each row into parts (context parallelism), `ep` deals experts out.

    Raises ValueError for a size below 1, and for an ep that does not divide dp."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in (*GRID, "ep"):
            size = getattr(self, axis)
            if not is_whole(size):
                raise ValueError(f"{axis} must be a whole number of ranks, at least 1, got {size!r}")
        if self.dp % self.ep:
            raise ValueError(f"ep={self.ep} deals experts out along dp={self.dp}: take a divisor of {self.dp}")

    def __repr__(self) -> str:
        """`Layout(dp=2, pp=1, tp=4)`; cp and ep only where there is something to cut or to deal out."""
        sizes = [(axis, getattr(self, axis)) for axis in (*AXES, "cp", "ep")]
        return f"Layout({', '.join(f'{axis}={size}' for axis, size in sizes if axis in AXES or size > 1)})"

    @property
    def size(self) -> int:
        """Number of ranks, dp * pp * cp * tp."""
        return self.dp * self.pp * self.cp * self.tp

    def coords(self, rank: int) -> dict[str, int]:
        """The position of `rank` along dp, pp and tp, and along cp where there is one.

        ValueError for a rank outside the layout."""
        if not is_whole(rank, 0) or rank >= self.size:
            raise ValueError(f"ranks of {self} are 0 to {self.size - 1}, got {rank!r}")
        position, rest = dict[str, int](), rank
        for axis in reversed(GRID):
            rest, position[axis] = divmod(rest, getattr(self, axis))
        return {axis: position[axis] for axis in (*AXES, "cp") if axis in AXES or self.cp > 1}

    def rank(self, dp: int = 0, pp: int = 0, tp: int = 0, cp: int = 0) -> int:
        """The rank at a position; the inverse of `coords`. Raises ValueError for a position outside the layout."""
        number = 0
        for axis, index in zip(GRID, (dp, pp, cp, tp), strict=True):
            size = getattr(self, axis)
            if not is_whole(index, 0) or index >= size:
                raise ValueError(f"positions along {axis} of {self} are 0 to {size - 1}, got {index!r}")
            number = number * size + index
        return number

    def ranks(self, axis: str, of: int) -> tuple[int, ...]:
        """The group of rank `of` along an axis, in axis order: the ranks that differ from it along that axis alone. And
        those of "data" (dp-major), "ep" and "expert_dp", see above. ValueError for another word."""
        position = self.coords(of)
        if axis in GRID:
            return tuple(self.rank(**{**position, axis: index}) for index in range(getattr(self, axis)))
        if axis == "data":
            return tuple(rank for other in self.ranks("dp", of) for rank in self.ranks("cp", other))
        if axis == "ep":
            return self.cut(self.ep, of)[0]
        if axis == "expert_dp":
            return tuple(rank for other in self.cut(self.ep, of)[1] for rank in self.ranks("cp", other))
        raise ValueError(f"the groups of a layout are {', '.join(GROUPS)}, got {axis!r}")

    def both_ends(self, of: int) -> tuple[int, ...]:
        """The "data" group of rank `of` and that of its mirror image along pp, in rank order: they have the same stages
        where each stage is on two ranks, and micro-batches enter a pipeline at both ends (DualPipe).

            Layout(dp=2, pp=4).both_ends(of=1)      [0 1 2 3] [4 5 6 7]  ->  (1, 2, 5, 6)"""
        position = self.coords(of)
        mirror = self.rank(**{**position, "pp": self.pp - 1 - position["pp"]})
        return tuple(sorted({*self.ranks("data", of), *self.ranks("data", mirror)}))

    def cut(self, shard: int, of: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The two groups of rank `of` when dp is cut into groups of `shard`: its neighbours along dp, with whom it
        shares one copy of the state; and those who hold in other copies what it holds in its own.

            Layout(dp=4).cut(2, of=1)      [0 1] [2 3]  ->  (0, 1), (1, 3)

        Raises ValueError if dp is no multiple of `shard`."""
        if not is_whole(shard) or self.dp % shard:
            raise ValueError(f"dp={self.dp} ranks do not cut into groups of {shard!r}: take a divisor of {self.dp}")
        ranks, index = self.ranks("dp", of), self.coords(of)["dp"]
        first = index - index % shard
        return ranks[first : first + shard], ranks[index % shard :: shard]
