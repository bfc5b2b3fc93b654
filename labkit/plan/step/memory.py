"""predict_memory: what one rank holds at the highest of a few named moments of a step, each a sum of a few terms.

    between steps                 base: parameters, the optimizer's state, gradients that stay           rank.py
    forward, the loss             base + activations of all layers so far + the layer's own
    backward of the head,         base + activations of the layers before + the layer's own, row by row,
      of the last blocks,              + what the strategy holds of gradients and whole weights    laws/strategy.py
      of the first blocks,
      of the embedding
    the optimizer's step          base + gradients + two temporaries

    bytes of N parameters in fp32 with AdamW     parameters   gradients          optimizer
    ddp                                          4 N          4 N                8 N
    zero1                                        4 N          4 N, then 4 N/n    8 N/n
    zero2                                        4 N          4 N/n + buckets    8 N/n
    zero3                                        4 N/n        4 N/n + units      8 N/n      + units on their way

Blocks are alike: what is held falls, or rises, from one to the next by the same amount, so that the highest moment is
in the first ones or in the last ones. `EDGE` of them are looked at, since the first bucket may leave in the second one.

A pipeline's rank holds several micro-batches at once: the turns of its schedule. With dualpipe it holds two stages,
whose gradients and state are shared with the rank that has copies of them, too. All numbers are those of labkit's own
strategies (labkit.parallel) with torch's optimizers, counted as MemoryProbe counts: the batch itself, the buffers of
gloo or NCCL and the allocator's rounding are not in them. What is held between steps is exact; the peak is so for most
jobs, for others it is not (benchmarks/foretold.py): labkit.rehearse finds it to the byte.

With cp a rank holds T/cp tokens of each row; its state is shared by the dp x cp ranks that have the same weights.
While attention reaches the other tokens it holds blocks of keys and values of theirs (plan.model.context_memory).

With experts each rank has n_expert/ep of each block's, and 1/tp of each of these. Their gradients and state are shared
by the dp x cp / ep ranks of expert_dp, and those of the rest by all of dp x cp. What is held of their tokens depends on
the router: it is taken as balanced, k B T/cp copies on each rank. A router that is not holds more on some.

Sources: Rajbhandari et al., arXiv:1910.02054, section 3; Korthikanti et al., arXiv:2205.05198, section 4;
Narayanan et al., arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Any

from labkit.plan.breakdown import KINDS, Breakdown, Item
from labkit.plan.job.recipe import Recipe
from labkit.plan.job.stages import pairs_in_flight
from labkit.plan.job.turns import Turn
from labkit.plan.laws.strategy import HeldBytes
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.partition.stage import ShardedParameters, StageTable, edges
from labkit.plan.step.optimizer_moments import Sum
from labkit.plan.step.rank import Rank
from labkit.plan.step.strategy_bytes import StrategyTurn
from labkit.plan.words import plural

SOURCES = (
    "arXiv:1910.02054, 5.3", "arXiv:1910.02054, 5.2", "arXiv:1910.02054, 5.1", "arXiv:2205.05198, 4",
    "labkit.plan.laws.strategy",
)  # fmt: skip


def predict_memory(shape: Any, layout: Layout, recipe: Recipe, rank: int = 0, device: str = "cpu") -> Breakdown:
    """Bytes that `rank` holds at the highest moment of a step, by kind: parameters, gradients, optimizer, ...

    `shape` is a ModelShape or a GPTConfig; `device` "cpu" or "cuda" says how torch's optimizers step (one tensor after
    another, or all at once) and whether offloaded state is on the device. Compare with `MemoryProbe().peak`:
    `predict_memory(...).against(probe.peak)`. ValueError for what cannot be cut or run."""
    local = Rank(ModelShape.of(shape), layout, recipe, rank, device)
    top, laws = highest(local), formulas(local)
    weights, gradients, state, activations, other = local.base()
    held = (
        weights + top.weights, gradients + top.gradients, state, activations + top.activations, other + top.other
    )  # fmt: skip
    return Breakdown(
        Item(kind, n_bytes, "B", laws[kind] + f"; at the peak: {top.when}" * (kind in ("activations", "other")), source)
        for kind, n_bytes, source in zip(KINDS, held, SOURCES, strict=True)
    )


def peak_bytes(rank: Rank) -> int:
    """Bytes at the highest moment."""
    return sum(rank.base()) + highest(rank).total


def highest(rank: Rank, room: float = 0) -> Sum:
    """The highest moment: between steps, of forward and backward, or of the optimizer's step; of equals the first.

    A rank that needs no more than `room` bytes is not looked through to the end: then any moment is the answer."""
    top, base = of_passes(rank, room), sum(rank.base())
    if rank.step_bound <= max(room, base + top.total):
        return top
    return max((top, *rank.optimizer_moments), key=_total)


def of_passes(rank: Rank, room: float = 0) -> Sum:
    """The highest moment of forward and backward, in each turn of the rank's program that may be the fullest; or that
    between steps, if there is none higher. `room` as in `highest`.

    Bounds are refined where the highest moment may be: a bound of a whole pass, then one for each of its layers, then
    the moments of a layer, row by row."""
    passes, base = [MicroBatchPass(rank, turn) for turn in rank.turns], sum(rank.base())
    top, first = Sum("between steps"), (-2, 0)  # of equals the first: between halves, then by pass and by layer
    queue = [(-one.most, place, -1) for place, one in enumerate(passes)]
    heapify(queue)
    while queue:
        below, place, at = heappop(queue)
        if -below < top.total or base - below <= room:
            break  # no moment of this pass or layer is the highest, nor of those that are left; or all these fit
        one = passes[place]
        if at < 0:
            for at, k in enumerate(one.layers):
                heappush(queue, (-one.bounds[k], place, at))
            moment, order = one.between_halves(), (-1, place)
        else:
            moment, order = max(one.moments(one.layers[at]), key=_total), (place, at)
        if moment is not None and (moment.total > top.total or (moment.total == top.total and order < first)):
            top, first = moment, order
    return top


def _total(moment: Sum) -> int:
    return moment.total


@dataclass(frozen=True)
class MicroBatchPass:
    """A micro-batch on its way through one stage of a rank, and all that is alive around it."""

    rank: Rank
    turn: Turn

    @cached_property
    def stage(self) -> StageTable:
        """The stage at work."""
        return self.rank.stages[self.turn.stage]

    @cached_property
    def groups(self) -> tuple[ShardedParameters, ...]:
        """The groups of its parameters."""
        return self.rank.groups[self.turn.stage]

    @cached_property
    def others(self) -> int:
        """Bytes of activations of all other micro-batches in flight, and of those on their way to the next stage."""
        return self.turn.weigh(self.rank.sizes, 0) - self.stage.held + self.turn.onward * self.rank.boundary

    @cached_property
    def waits(self) -> int:
        """Bytes of gradients on their way to the stage before, and of this rank's part of rows."""
        return self.turn.back * self.rank.boundary + self.rank.cut_rows

    @cached_property
    def strategies(self) -> StrategyTurn:
        """The bytes that the data-parallel strategies of all stages of this rank hold during this turn, beyond those
        that stay between two steps: gathered units or buckets, for example."""
        return self.rank.strategies.during(self.turn)

    def sum(self, when: str, held: HeldBytes, activations: int, other: int, gradients: int = 0) -> Sum:
        """The sum of what strategies hold, of what is alive around this pass, and of these bytes."""
        return Sum(
            when, held.weights, held.gradients + gradients, self.others + activations, self.waits + held.other + other
        )

    @cached_property
    def onward(self) -> bool:
        """True for a forward."""
        return self.turn.forward

    @property
    def most(self) -> int:
        """Bytes that no moment exceeds, by what the strategies hold at most and by the fullest layer."""
        between = self.stage.held + self.rank.kept[self.turn.stage] + 2 * self.rank.boundary
        return self.others + self.waits + self.rank.state_bounds.comes + max(*self.by_layers, between)

    @property
    def by_layers(self) -> tuple[int, ...]:
        """Bytes that no moment of each of `layers`, first to last, exceeds, without what is around and strategies."""
        return self.stage.most_forward if self.onward else self.stage.most_backward[self.wide - 1]

    @cached_property
    def layers(self) -> Sequence[int]:
        """The layers at both ends, in the order in which they are at work."""
        ends = edges(len(self.stage.layers))
        return ends if self.onward else ends[::-1]

    def moments(self, k: int) -> Iterator[Sum]:
        """The moments of layer k that may be the highest."""
        return self.forward(k) if self.onward else self.backward(k)

    @cached_property
    def bounds(self) -> dict[int, int]:
        """Bytes that no moment of each of `layers` exceeds: what is held as the layer begins, and what may be added
        meanwhile, by its strategies and by itself."""
        around, held = self.others + self.waits, self.strategies.most
        rows = zip(edges(len(self.stage.layers)), held, self.by_layers, strict=True)
        return {k: around + by_strategies + by_layer for k, by_strategies, by_layer in rows}

    def arrived(self, k: int) -> list[int]:
        """Elements of each group whose gradients have arrived before layer k is at work."""
        return [0 if self.onward else group.after[k] for group in self.groups]

    def forward(self, k: int) -> Iterator[Sum]:
        """Forward through one layer."""
        layer, before = self.stage.layers[k], self.stage.held_before[k] + self.stage.cached_before[k]
        if layer.kind == "loss":  # which runs outside of autocast
            before = self.stage.held_before[k]
        when = "the loss" if layer.kind == "loss" else "forward"
        yield self.sum(when, self.strategies.held(k, self.arrived(k)), before + layer.forward, 0)

    def between_halves(self) -> Sum | None:
        """The moment between the halves of a backward that is cut in two; None for any other pass."""
        kept = self.rank.kept[self.turn.stage]
        if not kept or self.onward:
            return None
        when, nothing = "between B and W of the last micro-batch in flight", (0,) * len(self.groups)
        both = 2 * self.rank.boundary  # the gradient that came, and the one that goes to the stage before
        return self.sum(when, self.strategies.held(0, nothing, False), self.stage.held, kept + both)

    def name_of(self, k: int) -> str:
        """`block 4`, by its number in the model, or `the head`."""
        kind = self.stage.layers[k].kind
        if kind not in ("block", "dense"):
            return f"the {kind}"
        before = sum(self.rank.blocks[: self.rank.numbers[self.turn.stage]])
        return f"block {before + k - self.stage.count('embedding')}"

    @property
    def wide(self) -> int:
        """The width of a gradient while it arrives, in widths in which it is made: 2 where it is widened to fp32."""
        return 1 + self.rank.recipe.fp32_gradients

    def backward(self, k: int) -> Iterator[Sum]:
        """Back through one layer, row by row; a layer that kept its input alone first runs forward again."""
        layer, before, zero3 = self.stage.layers[k], self.stage.held_before[k], self.rank.recipe.cuts.weights
        when, wide = f"backward of {self.name_of(k)}", self.wide
        arrived, inside, saved = self.arrived(k), True, before + layer.saved
        held = self.strategies.held(k, arrived)
        # the tied head's gradient waits for the table's
        waiting = self.stage.tied_bytes * wide if layer.kind not in ("loss", "head") else 0
        if layer.kept is not None:
            yield self.sum(f"{when}, run again", held, before + layer.again, layer.result, waiting)
        for row in reversed(layer.rows):
            if row.part != inside and len(self.groups) > 1:
                inside, held = row.part, self.strategies.held(k, arrived, row.part)
            yield self.sum(when, held, saved, row.backward - row.fresh, waiting + row.fresh)
            saved -= row.saved
            if not row.weights:
                continue
            yield self.sum(when, held, saved, row.after, waiting + row.fresh * (2 * wide - 1))
            if row.name == "token" and self.stage.tied:
                yield self.sum(when, held, saved, row.after, waiting + 2 * wide * row.fresh)
                waiting = 0
            number = int(row.part and len(self.groups) > 1)
            full = self.groups[number].full(arrived[number])
            arrived[number] += row.numel * (not (self.stage.tied and row.name == "logits"))
            if not zero3 and self.groups[number].full(arrived[number]) > full:
                leaves = self.strategies.held(k, arrived, row.part, number)
                yield self.sum(when, leaves, saved, row.after, waiting)
            held = self.strategies.held(k, arrived, row.part)
        for number, group in enumerate(self.groups):
            if zero3 and group.units[k]:
                leaves = self.strategies.held(k, arrived, False, number)
                yield self.sum("a unit's gradients leave", leaves, before, layer.result * (k > 0), waiting)


def formulas(rank: Rank) -> dict[str, str]:
    """The formula of each kind of memory, in words."""
    r, n = rank.recipe, rank.n
    w, g = r.weight_bytes, r.gradient_bytes
    routed = ""
    share = "/n" if n > 1 else ""
    law, by_matrix = r.steps_by, r.steps_by.by_matrix
    state = f"{law.state_words(r.state_bytes, r.has_masters)} N{share * r.cuts.state}"
    if by_matrix and law.elementwise > by_matrix.elements:
        rest = sum(size for group, size in rank.owned() if not group.by_matrix)
        wider = (law.elementwise - by_matrix.elements) * r.state_bytes
        state += f" + {wider} x {rest:,} of what is no hidden matrix"
    if by_matrix and by_matrix.words:
        state += f" + {by_matrix.words}"
    whole = f"N = {rank.numel:,} parameters here" + (f", n = {n}" if n > 1 else "")
    if rank.shape.n_expert:
        experts = sum(one.numel for stage in rank.stages for one in stage.part(True))
        whole += f"; {experts:,} of them are experts', of which n = {n // rank.layout.ep}" * (rank.layout.ep > 1)
        routed = f"; routing is taken as balanced, {rank.shape.top_k} copies of each token"
    cut = f", {rank.setting.seq:,} tokens of each by {r.context}" * (rank.layout.cp > 1)
    widened = ""
    if r.has_masters and not r.fp32_gradients:  # see of_optimizer
        size = f"{r.state_bytes} N{share * r.cuts.state}"
        widened = f", then {size} in fp32" if r.cuts.state else f", and {size} in fp32 for the masters"
    flying = plural(sum(pairs_in_flight(r, rank.layout, rank.coords["pp"])), "micro-batch")
    weights = f"{w} N{share} + gathered units, {whole}" if r.cuts.weights else f"{w} N, {whole}"
    return {
        "parameters": weights,
        "gradients": r.strategy_law.gradient_words(g, share) + widened,
        "optimizer": f"{state} ({r.optimizer}{', masters' * r.has_masters})",
        "activations": f"{flying} of {plural(rank.setting.rows, 'row')} in flight{cut}{routed}",
        "other": "gradients of activations, buckets and units in use, temporaries",
    }
