"""The bytes that data-parallel strategies hold during a step only, for each turn of a rank: gathered weights of ZeRO-3,
buckets of gradients, windows that travel. Weights, gradients and state that stay between two steps are not in it.

These bytes depend neither on the sequences of a micro-batch nor on what is computed again in backward. A search tries
many recipes that differ in nothing else, and their ranks share one table (labkit.plan.step.rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from labkit.plan.job.recipe import Recipe
from labkit.plan.job.turns import Turn
from labkit.plan.laws.strategy import HeldBytes, Moment
from labkit.plan.partition.stage import ShardedParameters, edges

Stages = Sequence[Sequence[ShardedParameters]]
"""Of each stage of a rank the groups of its parameters."""


class StrategyBytes:
    """The bytes that the strategies of a rank's stages hold during each of its turns."""

    def __init__(self, recipe: Recipe, stages: Stages) -> None:
        self.recipe, self.stages = recipe, stages
        self._turns: dict[Turn, StrategyTurn] = {}

    def during(self, turn: Turn) -> StrategyTurn:
        """The bytes of this turn. Turns in which the strategies do the same share one table."""
        turn = turn.of_strategies
        if turn not in self._turns:
            self._turns[turn] = StrategyTurn(self.recipe, self.stages, turn)
        return self._turns[turn]


class StrategyTurn:
    """The bytes that the strategies of a rank's stages hold during one forward or backward of a micro-batch."""

    def __init__(self, recipe: Recipe, stages: Stages, turn: Turn) -> None:
        self.recipe, self.law, self.stages, self.turn = recipe, recipe.strategy_law, stages, turn
        self.groups = stages[turn.stage]
        self._held: dict[tuple[object, ...], HeldBytes] = {}

    @cached_property
    def beside(self) -> HeldBytes:
        """Bytes held of the stages that are not at work."""
        turn, held = self.turn, HeldBytes()
        for k, groups in enumerate(self.stages):
            for group in groups if k != turn.stage else ():
                whole = turn.held[k] > 0 and not self.recipe.reshard
                held = _plus(held, self.law.between(group, self.recipe, turn.done[k], turn.finished[k], whole))
        return held

    def held(self, k: int, arrived: Sequence[int], inside: bool = True, leaving: int | None = None) -> HeldBytes:
        """The bytes of all strategies while layer k computes.

        `arrived` is the number of gradient elements of each group that backward has made; `inside` says that the
        layer's experts compute; `leaving` is the group of which a bucket or unit has just been packed to be sent."""
        place = k, *arrived, inside, leaving
        if place not in self._held:
            self._held[place] = self._sum(k, arrived, inside, leaving)
        return self._held[place]

    def _sum(self, k: int, arrived: Sequence[int], inside: bool, leaving: int | None) -> HeldBytes:
        turn, held = self.turn, self.beside
        passes, shared = turn.done[turn.stage], turn.held[turn.stage] > 1
        for number, group in enumerate(self.groups):
            leaves = number == leaving
            at_work = leaves or (leaving is None and (inside or number == 0))
            moment = Moment(k, arrived[number], passes, turn.last, turn.then, turn.forward, leaves, at_work, shared)
            held = _plus(held, self.law.holds(group, self.recipe, moment))
        return held

    @cached_property
    def most(self) -> tuple[int, ...]:
        """Bytes that they hold at most while each layer at the ends of the stage is at work (`edges`), from the first
        layer to the last: what is held as it begins, and what may be added meanwhile."""
        bounds = []
        for k in edges(len(self.groups[0].params)):
            arrived = [0 if self.turn.forward else group.after[k] for group in self.groups]
            rises = 0 if self.turn.forward else sum(self.law.rises(group, self.recipe, k) for group in self.groups)
            bounds.append(sum(self.held(k, arrived)) + rises)
        return tuple(bounds)


def _plus(one: HeldBytes, other: HeldBytes) -> HeldBytes:
    """The bytes of two strategies added up, kind by kind."""
    return HeldBytes(one.weights + other.weights, one.gradients + other.gradients, one.other + other.other)
