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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from labkit.plan.breakdown import KINDS, Breakdown, Item
from labkit.plan.job.recipe import Recipe
from labkit.plan.job.stages import pairs_in_flight
from labkit.plan.job.turns import Turn
from labkit.plan.laws.strategy import Held, Moment
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.groups import ParamGroup
from labkit.plan.partition.layout import Layout
from labkit.plan.partition.stage import Group, Stage
from labkit.plan.step.rank import Rank
from labkit.plan.words import plural

EDGE = 3
"""Blocks at each end of a stage that are looked at one by one."""
SOURCES = (
    "arXiv:1910.02054, 5.3", "arXiv:1910.02054, 5.2", "arXiv:1910.02054, 5.1", "arXiv:2205.05198, 4",
    "labkit.plan.laws.strategy",
)  # fmt: skip


class Sum(NamedTuple):
    """Bytes on top of what is held between steps, by kind, at one moment."""

    when: str
    weights: int = 0
    gradients: int = 0
    activations: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.activations + self.other


def predict_memory(shape: Any, layout: Layout, recipe: Recipe, rank: int = 0, device: str = "cpu") -> Breakdown:
    """Bytes that `rank` holds at the highest moment of a step, by kind: parameters, gradients, optimizer, ...

    `shape` is a ModelShape or a GPTConfig; `device` "cpu" or "cuda" says how torch's optimizers step (one tensor after
    another, or all at once) and whether offloaded state is on the device. Compare with `MemoryProbe().peak`:
    `predict_memory(...).against(probe.peak)`. ValueError for what cannot be cut or run."""
    local = Rank(ModelShape.of(shape), layout, recipe, rank, device)
    top, laws = max(moments(local), key=lambda moment: moment.total), formulas(local)
    return Breakdown(
        Item(kind, n_bytes, "B", laws[kind] + f"; at the peak: {top.when}" * (kind in ("activations", "other")), source)
        for kind, n_bytes, source in zip(KINDS, plus(local.base(), top), SOURCES, strict=True)
    )


def plus(base: tuple[int, ...], top: Sum) -> tuple[int, int, int, int, int]:
    """Bytes by kind at a moment, on top of those between two steps."""
    weights, gradients, state, activations, other = base
    return weights + top.weights, gradients + top.gradients, state, activations + top.activations, other + top.other


def peak_bytes(rank: Rank) -> int:
    """Bytes at the highest moment."""
    return sum(rank.base()) + max(moment.total for moment in moments(rank))


def moments(rank: Rank) -> Iterator[Sum]:
    """All moments that may be the highest."""
    yield Sum("between steps")
    yield from of_passes(rank)
    yield from of_optimizer(rank)


def of_passes(rank: Rank) -> Iterator[Sum]:
    """Those of forward and backward, in each turn of the rank's program that may be the fullest."""
    for turn in rank.turns:
        one = Pass(rank, turn)
        yield from one.onward() if turn.kind == "F" else one.backward()


@dataclass(frozen=True)
class Pass:
    """A micro-batch on its way through one stage of a rank, and all that is alive around it."""

    rank: Rank
    turn: Turn

    @cached_property
    def stage(self) -> Stage:
        """The stage at work."""
        return self.rank.stages[self.turn.stage]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
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
    def beside(self) -> Held:
        """Bytes that the strategies of the other stages of this rank hold."""
        turn, r = self.turn, self.rank.recipe
        return together(
            r.strategy_law.between(group, r, turn.done[k], turn.finished[k], turn.held[k] > 0 and not r.reshard)
            for k, groups in enumerate(self.rank.groups)
            if k != turn.stage
            for group in groups
        )

    def held(self, k: int, arrived: Sequence[int], inside: bool = True, leaving: int | None = None) -> Held:
        """What all strategies hold while layer k is at work: so many elements of each group have arrived; `inside`: its
        experts are at work; `leaving`: the group of which a bucket or a unit has just been packed."""
        turn, r = self.turn, self.rank.recipe
        law, onward, passes = r.strategy_law, turn.kind == "F", turn.done[turn.stage]
        shared = turn.held[turn.stage] > 1
        states = [self.beside]
        for number, (group, count) in enumerate(zip(self.groups, arrived, strict=True)):
            leaves = number == leaving
            at_work = leaves or (leaving is None and (inside or number == 0))
            moment = Moment(k, count, passes, turn.last, turn.then, onward, leaves, at_work, shared)
            states.append(law.holds(group, r, moment))
        return together(states)

    def total(self, when: str, held: Held, activations: int, other: int, gradients: int = 0) -> Sum:
        """The sum of what strategies hold, of what is alive around this pass, and of these bytes."""
        return Sum(
            when, held.weights, held.gradients + gradients, self.others + activations, self.waits + held.other + other
        )

    def onward(self) -> Iterator[Sum]:
        """Forward through the layers at both ends."""
        layers, cached, nothing = self.stage.layers, 0, (0,) * len(self.groups)
        ends = edges(len(layers))
        for k, layer in enumerate(layers):
            if k in ends:
                beside = cached * (layer.kind != "loss")  # which runs outside of autocast
                when = "the loss" if layer.kind == "loss" else "forward"
                yield self.total(when, self.held(k, nothing), self.stage.held_before[k] + beside + layer.forward, 0)
            cached += layer.cached

    def backward(self) -> Iterator[Sum]:
        """Back through the layers at both ends."""
        if kept := self.rank.kept[self.turn.stage]:
            when, nothing = "between B and W of the last micro-batch in flight", (0,) * len(self.groups)
            both = 2 * self.rank.boundary  # the gradient that came, and the one that goes to the stage before
            yield self.total(when, self.held(0, nothing, False), self.stage.held, kept + both)
        for k in reversed(edges(len(self.stage.layers))):
            yield from self.layer_back(k)

    def name_of(self, k: int) -> str:
        """`block 4`, by its number in the model, or `the head`."""
        kind = self.stage.layers[k].kind
        if kind not in ("block", "dense"):
            return f"the {kind}"
        before = sum(self.rank.blocks[: self.rank.numbers[self.turn.stage]])
        return f"block {before + k - self.stage.count('embedding')}"

    def layer_back(self, k: int) -> Iterator[Sum]:
        """Back through one layer, row by row; a layer that kept its input alone first runs forward again."""
        layer, before, zero3 = self.stage.layers[k], self.stage.held_before[k], self.rank.recipe.cuts.weights
        when = f"backward of {self.name_of(k)}"
        arrived, inside, saved = [group.after[k] for group in self.groups], True, before + layer.saved
        held = self.held(k, arrived)
        # the tied head's gradient waits for the table's
        wide = 1 + self.rank.recipe.fp32_gradients  # gradients are made half as wide, and widened
        waiting = self.stage.tied_bytes * wide if layer.kind not in ("loss", "head") else 0
        if layer.kept is not None:
            yield self.total(f"{when}, run again", held, before + layer.again, layer.result, waiting)
        for row in reversed(layer.rows):
            if row.part != inside and len(self.groups) > 1:
                inside, held = row.part, self.held(k, arrived, row.part)
            yield self.total(when, held, saved, row.backward - row.fresh, waiting + row.fresh)
            saved -= row.saved
            if not row.weights:
                continue
            yield self.total(when, held, saved, row.after, waiting + row.fresh * (2 * wide - 1))
            if row.name == "token" and self.stage.tied:
                yield self.total(when, held, saved, row.after, waiting + 2 * wide * row.fresh)
                waiting = 0
            number = int(row.part and len(self.groups) > 1)
            full = self.groups[number].full(arrived[number])
            arrived[number] += row.numel * (not (self.stage.tied and row.name == "logits"))
            if not zero3 and self.groups[number].full(arrived[number]) > full:
                leaves = self.held(k, arrived, row.part, number)
                yield self.total(when, leaves, saved, row.after, waiting)
            held = self.held(k, arrived, row.part)
        for number, group in enumerate(self.groups):
            if zero3 and group.units[k]:
                leaves = self.held(k, arrived, False, number)
                yield self.total("a unit's gradients leave", leaves, before, layer.result * (k > 0), waiting)


def edges(count: int) -> list[int]:
    """The layers at both ends that are looked at, first to last."""
    side = EDGE + 2
    return [*range(min(side, count)), *range(max(side, count - side), count)]


def together(states: Iterable[Held]) -> Held:
    """The sum of what several hold."""
    weights = gradients = other = 0
    for state in states:
        weights, gradients, other = weights + state.weights, gradients + state.gradients, other + state.other
    return Held(weights, gradients, other)


def of_optimizer(rank: Rank) -> Iterator[Sum]:
    """The optimizer's step: gradients, 1/n of them where they are cut, and temporaries.

    For Adam the square root of the variance, and that over its correction, one tensor after another on a CPU. Each
    stage has an optimizer of its own, and so have experts that are dealt out; they step one after another."""
    r, law = rank.recipe, rank.recipe.strategy_law
    groups = [pair for one in rank.groups for pair in enumerate(one)]
    gradients = sum(group.padded // group.n for _, group in groups) * r.gradient_bytes * r.cuts.state
    for _, group in groups:
        if decoded := law.decoding(group, r):
            yield Sum("the gradients' way", other=rank.cut_rows + decoded)
    if r.offload and rank.device != "cpu":
        return
    for number, group in groups:
        kinds: dict[ParamGroup, list[int]] = {}
        for kind, size in law.owned(group):
            kinds.setdefault(kind, []).append(size * r.state_bytes)
        step = rank.matrix_step(number, group)
        scratch = 0 if step is None else step.temporaries(not r.cuts.state)
        for kind, sizes in kinds.items():
            if r.steps_by.adam and not kind.by_matrix:
                one_by_one = max(2 * size + before for size, before in zip(sizes, [0, *sizes], strict=False))
                scratch = max(scratch, one_by_one if rank.device == "cpu" else sum(sizes))
        widened, stepped = 0, [size for sizes in kinds.values() for size in sizes]
        if r.has_masters and not r.fp32_gradients:  # fp32 gradients for the masters
            widened = sum(stepped) // 2 if r.cuts.state else sum(stepped)  # ZeRO's bf16 ones are freed
            if r.clip_norm is not None and stepped:  # one after another is squared in fp32
                yield Sum("the gradients' norm", gradients=gradients, other=rank.cut_rows + max(stepped))
        yield Sum("the optimizer's step", gradients=gradients + widened, other=rank.cut_rows + scratch)
        if r.cuts.state:
            gradients -= widened  # as many bytes of narrow gradients are gone


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
