"""Two keepers side by side: with expert parallelism a stage's experts and all else are sharded in different groups.

    experts    n_expert/ep of them are on this rank; gradients and state are shared along expert_dp, dp cp/ep ranks
    the rest   whole on each rank, and shared along all of dp x cp

Each keeper sees its own parameters; what both hold is alive together (labkit.plan.laws.keeper).
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.plan.laws.keeper import Keeper
from labkit.plan.model.tape import NOTHING, Bytes
from labkit.plan.partition.buckets import Live
from labkit.plan.partition.groups import ParamGroup


class KeeperPair(Keeper):
    """The keepers of the rest and of the experts of one stage. Of `numel` parameters of blocks that are not walked,
    `shares` says how many belong to each: they are (elements of the rest, elements of the experts) of one block."""

    def __init__(self, keepers: Sequence[Keeper], shares: Sequence[int]) -> None:
        self.keepers, self.shares, self.widens = tuple(keepers), tuple(shares), keepers[0].widens
        self.in_place, self.last_differs = keepers[0].in_place, keepers[0].last_differs

    def by_keeper(self, numel: int) -> list[tuple[Keeper, int]]:
        """Each keeper with its part of `numel` parameters of whole blocks."""
        blocks = numel // max(1, sum(self.shares))
        return [(keeper, blocks * share) for keeper, share in zip(self.keepers, self.shares, strict=True)]

    @property
    def numel(self) -> int:
        """Elements of all buckets of both."""
        return sum(keeper.numel for keeper in self.keepers)

    @property
    def owned(self) -> list[tuple[ParamGroup, int]]:
        """Group and elements of each tensor that this rank's optimizer steps on."""
        return [size for keeper in self.keepers for size in keeper.owned]

    def weights(self, numel: int) -> int:
        """Bytes of weights between steps."""
        return sum(keeper.weights(part) for keeper, part in self.by_keeper(numel))

    def gradients(self, numel: int) -> int:
        """Bytes of gradients that are held all the time."""
        return sum(keeper.gradients(part) for keeper, part in self.by_keeper(numel))

    def pass_begins(self, sending: bool) -> None:
        """A backward of one micro-batch begins."""
        for keeper in self.keepers:
            keeper.pass_begins(sending)

    def need(self, live: Live, layer: int, ahead: Sequence[int], extra: Bytes = NOTHING) -> None:
        """A layer's weights are needed, but for those of its experts."""
        self.keepers[0].need(live, layer, ahead, extra)

    def left(self, live: Live, layer: int, extra: Bytes = NOTHING) -> None:
        """Nobody computes with the layer's weights any more."""
        self.keepers[0].left(live, layer, extra)

    def enter(self, live: Live, layer: int, ahead: Sequence[int], extra: Bytes = NOTHING) -> None:
        """Those of its experts are needed."""
        self.keepers[1].need(live, layer, ahead, extra)

    def leave(self, live: Live, layer: int, extra: Bytes = NOTHING) -> None:
        """Nobody computes with them any more."""
        self.keepers[1].left(live, layer, extra)

    def arrive(self, live: Live, extra: Bytes, member: tuple[int, str], fresh: int, when: str) -> None:
        """A gradient arrives at the keeper whose parameter it is."""
        next(keeper for keeper in self.keepers if member in keeper.sizes).arrive(live, extra, member, fresh, when)

    def turns(self, live: Live, ahead: bool, behind: bool, numel: int) -> None:
        """A micro-batch goes forward and one comes back."""
        for keeper, part in self.by_keeper(numel):
            keeper.turns(live, ahead, behind, part)

    def passed(self, live: Live, numel: int) -> None:
        """Forward has been through blocks that are not walked."""
        for keeper, part in self.by_keeper(numel):
            keeper.passed(live, part)

    def between(self, live: Live, numel: int) -> None:
        """The gradients of blocks that are not walked have come and gone."""
        for keeper, part in self.by_keeper(numel):
            keeper.between(live, part)

    def pass_ends(self, live: Live) -> None:
        """The backward is over."""
        for keeper in self.keepers:
            keeper.pass_ends(live)

    def fill(self, live: Live, numel: int, times: int) -> None:
        """Adds the gradients that earlier passes left."""
        for keeper, part in self.by_keeper(numel):
            keeper.fill(live, part, times)

    def finish(self, live: Live) -> None:
        """The step's gradients are complete and reduced."""
        for keeper in self.keepers:
            keeper.finish(live)
