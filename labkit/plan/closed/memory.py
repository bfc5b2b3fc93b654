"""predict_memory: what one rank holds at the highest of a few named moments of a step, each a sum of a few terms.

    the loss                      base + activations of all layers + logits and log-probabilities
    backward of the head,         base + activations of the layers before + the layer's own, row by row (rows.py)
      of the last blocks,              + what the strategy holds of gradients and whole weights (held.py)
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
All numbers are those of labkit's own strategies (labkit.parallel) with torch's optimizers, counted as MemoryProbe does.

Sources: Rajbhandari et al., arXiv:1910.02054, section 3; Korthikanti et al., arXiv:2205.05198, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from labkit.plan.breakdown import KINDS, Breakdown, Item
from labkit.plan.closed.flight import Turn
from labkit.plan.closed.held import HOLDS, Held, Moment, between, decoding
from labkit.plan.closed.job import Job
from labkit.plan.groups import ParamGroup
from labkit.plan.layout import Layout
from labkit.plan.recipe import Recipe
from labkit.plan.shape import ModelShape
from labkit.plan.stages import check_plan

EDGE = 3
"""Blocks at each end of a stage that are looked at one by one."""
SOURCES = (
    "arXiv:1910.02054, 5.3", "arXiv:1910.02054, 5.2", "arXiv:1910.02054, 5.1", "arXiv:2205.05198, 4",
    "labkit.plan.closed.held",
)  # fmt: skip


class Sum(NamedTuple):
    """Bytes on top of what is held between steps, by kind, at one moment."""

    when: str
    weights: int
    gradients: int
    activations: int
    other: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.activations + self.other


def predict_memory(shape: Any, layout: Layout, recipe: Recipe, rank: int = 0, device: str = "cpu") -> Breakdown:
    """Bytes that `rank` holds at the highest moment of a step, by kind: parameters, gradients, optimizer, ...

    `shape` is a ModelShape or a GPTConfig; `device` "cpu" or "cuda" says how torch's optimizers step (one tensor after
    another, or all at once) and whether offloaded state is on the device. ValueError for what cannot be cut or run."""
    sizes = ModelShape.of(shape)
    check_plan(sizes, recipe, layout)
    job = Job(sizes, layout, recipe, rank, device)
    base = job.base()
    top = max(moments(job), key=lambda moment: moment.total)
    numbers = (base[0] + top.weights, base[1] + top.gradients, base[2], base[3] + top.activations, base[4] + top.other)
    return Breakdown(
        Item(kind, n_bytes, "B", top.when, source)
        for kind, n_bytes, source in zip(KINDS, numbers, SOURCES, strict=True)
    )


def moments(job: Job) -> Iterator[Sum]:
    """All moments that may be the highest."""
    yield Sum("between steps", 0, 0, 0, 0)
    for turn in job.turns:
        yield from onward(job, turn) if turn.kind == "F" else backward(job, turn)
    yield from optimizer(job)


def others_hold(job: Job, turn: Turn) -> Held:
    """What the strategies of the other stages of this rank hold."""
    states = [
        between(group, job.recipe, turn.done[k], turn.finished[k], turn.held[k] > 0 and not job.recipe.reshard)
        for k, groups in enumerate(job.groups)
        if k != turn.stage
        for group in groups
    ]
    return Held(*(sum(numbers) for numbers in zip(Held(), *states, strict=True)))


def onward(job: Job, turn: Turn) -> Iterator[Sum]:
    """A micro-batch forward through a stage."""
    index, r = turn.stage, job.recipe
    stage, groups, holds = job.stages[index], job.groups[index], HOLDS[r.strategy]
    others = turn.weigh(job.sizes, 0) - stage.held + turn.onward * job.boundary
    waits, rest, cached = turn.back * job.boundary + job.cut_rows, others_hold(job, turn), 0
    looked_at = set(edges(len(stage.layers)))
    for k, layer in enumerate(stage.layers):
        if k in looked_at:
            at = Moment(k, 0, turn.done[index], False, True, ahead=turn.held[index] > 1)
            states = [holds(group, r, at) for group in groups]
            beside = others + stage.held_before[k] + cached * (layer.kind != "loss")  # it runs outside of autocast
            name = "the loss" if layer.kind == "loss" else "forward"
            yield total(name, (rest, *states), beside + layer.forward, waits)
        cached += layer.cached


def edges(count: int) -> list[int]:
    """The layers at both ends that are looked at."""
    side = EDGE + 2
    return [*range(min(side, count)), *range(max(side, count - side), count)]


def total(when: str, states: tuple[Held, ...], activations: int, other: int, gradients: int = 0) -> Sum:
    """The sum of what strategies hold and of these bytes."""
    return Sum(
        when, sum(state.weights for state in states), gradients + sum(state.gradients for state in states), activations,
        other + sum(state.other for state in states),
    )  # fmt: skip


def backward(job: Job, turn: Turn) -> Iterator[Sum]:
    """A micro-batch back through a stage, row by row of the layers at both ends."""
    index, r, last = turn.stage, job.recipe, turn.last
    stage, groups, holds, passes = job.stages[index], job.groups[index], HOLDS[r.strategy], turn.done[index]
    others = turn.weigh(job.sizes, 0) - stage.held + turn.onward * job.boundary
    waits, rest = turn.back * job.boundary + job.cut_rows, others_hold(job, turn)
    behind = turn.held[index] > 1
    if kept := job.kept[index]:
        states = tuple(holds(group, r, Moment(0, 0, passes, last, inside=False)) for group in groups)
        when = "between B and W of the last micro-batch in flight"
        yield total(when, (rest, *states), others + stage.held, waits + kept + 2 * job.boundary)
    tied = next((row.fresh for layer in stage.layers for row in layer.rows if row.name == "logits"), 0) * stage.tied
    where = set(edges(len(stage.layers)))
    for k in sorted(where, reverse=True):
        layer, before = stage.layers[k], others + stage.held_before[k]
        when = {"block": f"backward of block {k - 1}", "dense": f"backward of block {k - 1}"}.get(
            layer.kind, f"backward of the {layer.kind}"
        )
        saved = before + layer.saved
        waiting = tied if layer.kind not in ("loss", "head") else 0  # the tied head's gradient waits for the table's
        yield from again(job, layer, before, when, k, groups, rest, waits, passes, last, behind, waiting)
        arrived = [group.after[k] for group in groups]
        for row in reversed(layer.rows):
            numels = [0] * len(groups)
            for name, size in row.weights:
                if not (stage.tied and name == "logits"):
                    numels[len(groups) > 1 and name.startswith("experts.")] += size
            ats = [
                Moment(k, count, passes, last, inside=number == 0 or row.part, behind=behind)
                for number, count in enumerate(arrived)
            ]
            now = tuple(holds(group, r, at) for group, at in zip(groups, ats, strict=True))
            yield total(when, (rest, *now), saved, waits + row.backward - row.fresh, waiting + row.fresh)
            saved -= row.saved
            if not row.numel:
                continue
            if row.name == "token" and stage.tied:
                yield total(when, (rest, *now), saved, waits + row.after, waiting + 2 * row.fresh)
                waiting = 0
            yield total(when, (rest, *now), saved, waits + row.after, waiting + row.fresh * (1 + 2 * r.fp32_gradients))
            arrived = [count + numel for count, numel in zip(arrived, numels, strict=True)]
            if r.strategy == "zero3":
                continue
            for number, group in enumerate(groups):  # a bucket may be full now
                if group.full(arrived[number]) > group.full(arrived[number] - numels[number]):
                    leaving = ats[number]._replace(arrived=arrived[number], leaves=True)
                    states = (*now[:number], holds(group, r, leaving), *now[number + 1 :])
                    yield total(when, (rest, *states), saved, waits + row.after, waiting)
        if r.strategy == "zero3":
            for number, group in enumerate(groups):
                if group.units[k]:
                    at = Moment(k, arrived[number], passes, last, leaves=True, behind=behind)
                    others_now = tuple(
                        holds(one, r, at._replace(leaves=False, inside=False, arrived=one.after[k] + one.units[k]))
                        for other, one in enumerate(groups)
                        if other != number
                    )
                    yield total(
                        "a unit's gradients leave", (rest, *others_now, holds(group, r, at)), before,
                        waits + (layer.result if k else 0), waiting,
                    )  # fmt: skip


def again(
    job: Job, layer: Any, before: int, when: str, k: int, groups: Any, rest: Held, waits: int, passes: int, last: bool,
    behind: bool, waiting: int,
) -> Iterator[Sum]:  # fmt: skip
    """A block of which only the input was kept runs forward again, beside the gradient of its result."""
    if layer.kept is None:
        return
    highest, saved = 0, 0
    for row in layer.rows:
        saved += row.saved
        highest = max(highest, saved + row.forward)
    holds = HOLDS[job.recipe.strategy]
    states = tuple(holds(group, job.recipe, Moment(k, group.after[k], passes, last, behind=behind)) for group in groups)
    yield total(f"{when}, run again", (rest, *states), before + highest, waits + layer.result, waiting)


def optimizer(job: Job) -> Iterator[Sum]:
    """The optimizer's step: gradients, 1/n of them where they are cut, and temporaries.

    For Adam the square root of the variance, and that over its correction, one tensor after another on a CPU. Experts
    that are dealt out have an optimizer of their own, which steps after that of the rest."""
    r = job.recipe
    gradients = (
        sum(group.padded // group.n for groups in job.groups for group in groups) * r.gradient_bytes * r.cuts.state
    )
    waits = job.cut_rows
    if r.gradients == "8bit":
        for group in (group for groups in job.groups for group in groups if group.n > 1):
            yield Sum("the gradients' way", 0, 0, 0, waits + decoding(group))
    if r.offload and job.device != "cpu":
        return
    for place in (None,) if job.layout.ep == 1 else (0, 1):
        owned = job.owned(place)
        kinds: dict[ParamGroup, list[int]] = {}
        for kind, size in owned:
            kinds.setdefault(kind, []).append(size * r.state_bytes)
        scratch = max((step.temporaries(not r.cuts.state) for step in job.matrix_steps(place)), default=0)
        for kind, sizes in kinds.items():
            if r.steps_by.adam and not kind.by_matrix:
                pairs = zip(sizes, [0, *sizes], strict=False)
                scratch = max(
                    scratch, max(2 * size + before for size, before in pairs) if job.device == "cpu" else sum(sizes)
                )
        widened, stepped = 0, [size for sizes in kinds.values() for size in sizes]
        if r.has_masters and not r.fp32_gradients:  # fp32 gradients for the masters
            widened = sum(stepped) // 2 if r.cuts.state else sum(stepped)  # ZeRO's bf16 ones are freed
            if r.clip_norm is not None and stepped:
                yield Sum("the gradients' norm", 0, gradients, 0, waits + max(stepped))
        yield Sum("the optimizer's step", 0, gradients + widened, 0, waits + scratch)
        if r.cuts.state:
            gradients -= widened  # as many bytes of narrow gradients are gone
