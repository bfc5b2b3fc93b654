"""How a model, a batch and a schedule fall on the ranks of a layout: blocks of a stage, rows of a micro-batch.

16 blocks on 4 stages      4 4 4 4        and 5 5 5 1 if the head, on the last stage, takes as long as 4 blocks
micro-batches in flight    of stage and micro-batch, on each rank: the law of each schedule (labkit.plan.schedule)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from labkit.plan.layout import Layout
from labkit.plan.ops import Setting
from labkit.plan.recipe import NARROW, Recipe, check
from labkit.plan.schedule import rounds
from labkit.plan.shape import ModelShape


def check_plan(shape: ModelShape, recipe: Recipe, layout: Layout) -> None:
    """ValueError, with the numbers and the mend, for a combination of model, recipe and layout that cannot work.

    A tied head on several stages is let pass: each end has a copy of the table, as in Megatron-LM.

    What labkit's planner does not know is refused in words: context parallelism beside experts or latent attention,
    and with experts tensor parallelism, HSDP and zero_bubble."""
    _check_experts(shape, recipe, layout)
    shape.check_cut(layout.tp, layout.pp * recipe.stages_per_rank, recipe.sequence_parallel)
    check(shape if not shape.tied else shape.changed(tied=False), recipe, layout)
    _check_context(shape, recipe, layout)


def _check_context(shape: ModelShape, recipe: Recipe, layout: Layout) -> None:
    """ValueError for an attention that is not cut over ranks."""
    if layout.cp == 1:
        return
    if shape.kv_lora is not None:
        raise ValueError(
            f"labkit's planner does not know cp beside latent attention yet, got cp={layout.cp}: take cp=1"
        )


def _check_experts(shape: ModelShape, recipe: Recipe, layout: Layout) -> None:
    """ValueError for experts that cannot be dealt out, and for what cannot be predicted with experts."""
    if not shape.n_expert:
        if layout.ep > 1:
            raise ValueError(f"ep={layout.ep} deals experts out, and this model has none: ep=1")
        return
    if layout.cp > 1:
        raise ValueError(
            f"labkit's planner does not know cp beside experts yet, got cp={layout.cp}: take cp=1, and ep or pp"
        )
    if shape.n_expert % layout.ep:
        raise ValueError(f"n_expert={shape.n_expert} experts cannot be dealt out evenly to ep={layout.ep} ranks")
    if layout.tp > 1:
        raise ValueError(
            f"labkit's planner does not know tensor parallelism beside experts yet, got tp={layout.tp}: "
            "take tp=1, and ep or pp"
        )
    if recipe.optimizer == "muon" or recipe.decay_on != "all":
        raise ValueError(
            f"labkit's planner does not know optimizer={recipe.optimizer!r} with decay_on={recipe.decay_on!r} beside "
            "experts yet: take adamw, and decay_on='all'"
        )
    if recipe.fp8_gathers:
        raise ValueError("labkit's planner does not know 8-bit gathers beside experts yet: fp8_gathers=False")
    if layout.ep > 1 and recipe.shard_ranks is not None:
        raise ValueError(
            f"with ep={layout.ep} experts are sharded along expert_dp and the rest along dp: leave "
            f"shard_ranks={recipe.shard_ranks} out"
        )
    if recipe.schedule == "zero_bubble":
        raise ValueError("what zero_bubble keeps for the weights of experts depends on the routing: use '1f1b'")


@lru_cache(maxsize=1024)
def cut(n_layer: int, n_stages: int, head: float) -> tuple[int, ...]:
    """Blocks of each stage, so that the slowest stage is as fast as can be: the last one has the head, which takes as
    long as `head` blocks, and gets fewer of them. The others share the rest evenly."""
    even = _evenly(n_layer, n_stages)
    if n_stages == 1:
        return even

    def slowest(last: int) -> float:
        return max(last + head, -(-(n_layer - last) // (n_stages - 1)))

    last = min(range(even[-1], -1, -1), key=slowest)  # of equals the nearest to an even cut
    return even if last == even[-1] else (*_evenly(n_layer - last, n_stages - 1), last)


def _evenly(n_layer: int, n_stages: int) -> tuple[int, ...]:
    ends = [n_layer * stage // n_stages for stage in range(n_stages + 1)]
    return tuple(end - begin for begin, end in pairwise(ends))


@lru_cache(maxsize=1024)
def blocks_of(shape: ModelShape, n_stages: int) -> tuple[int, ...]:
    """Blocks of each stage: the head takes as long as the blocks that have as many weights to multiply with."""
    sizes = shape.active
    names = ("attention", "mlp", *(("router", "experts", "shared experts") if shape.n_expert else ()))
    block = sum(sizes[name] for name in names) / shape.n_layer
    return cut(shape.n_layer, n_stages, shape.vocab * shape.d_model / block)


def micro_rows(recipe: Recipe, layout: Layout) -> int:
    """Rows of the largest micro-batch on a rank."""
    return -(-(recipe.batch_size // layout.dp) // recipe.n_micro)


def pairs_in_flight(recipe: Recipe, layout: Layout, place: int) -> list[int]:
    """The most micro-batches that a rank holds at once, for each of its stages; `place` is its position along pp.

    gpipe m; 1f1b min(m, p-r); zero_bubble min(m, p); interleaved min(v m, (v-1) a + 2(p-1-r) + 1) over its v stages,
    which get a round of micro-batches each in turn; a is the first round's, p if p divides m (labkit.plan.schedule)."""
    p, m, v = layout.pp, recipe.n_micro, recipe.stages_per_rank
    if recipe.splits and recipe.schedule != "zero_bubble":
        return list(fullest_moments(recipe.schedule, p, m, v, place)[0].held)
    if p == 1 and v == 1 and recipe.schedule != "gpipe":
        return [1]
    if v == 1 and recipe.schedule != "interleaved":
        return [{"naive": 1, "gpipe": m, "1f1b": min(m, p - place)}.get(recipe.schedule, min(m, p))]
    return list(_interleaved(p, m, v, place))


@lru_cache(maxsize=4096)
def _interleaved(p: int, m: int, v: int, place: int) -> tuple[int, ...]:
    sizes, counts = rounds(p, m), [0] * v
    left = min(v * m, (v - 1) * sizes[0] + 2 * (p - 1 - place) + 1)
    for size in sizes:
        for index in range(v):
            more = min(size, left)
            counts[index], left = counts[index] + more, left - more
    return tuple(counts)


class Moment(NamedTuple):
    """What a rank holds as it begins an action, for each of its stages: micro-batches between F and W, those of them
    that wait for W, and those that are done. `stage` is the index of the action's stage."""

    held: tuple[int, ...]
    waiting: tuple[int, ...]
    done: tuple[int, ...]
    stage: int

    def weigh(self, weights: Iterable[tuple[int, int]]) -> int:
        """The bytes of it, where `weights` has those of a held one and what a waiting one holds more, by stage."""
        rows = zip(self.held, self.waiting, weights, strict=True)
        return sum(held * each + waiting * more for held, waiting, (each, more) in rows)


@lru_cache(maxsize=1024)
def fullest_moments(
    schedule: str, p: int, m: int, v: int, place: int, weights: tuple[tuple[int, int], ...] = ()
) -> tuple[Moment, tuple[Moment, ...]]:
    """(the fullest moment of a forward, that of a backward of each stage) in the program of a rank.

    For schedules that cut a backward in two; `weights` as in `Moment.weigh`, otherwise pairs count. A forward is
    weighed with its own micro-batch. Of the first stage, whose B has nothing to do, the backward is its W. More
    micro-batches than fill the pipeline change nothing, so that no more are looked at."""
    if schedule == "zero_bubble":  # its law, since a search asks for thousands
        most_held = Moment((min(m, p),), (min(place, m - 1),), (max(0, m - p),), 0)
        return most_held, (most_held,)
    m = min(m, 6 * p)
    recipe = Recipe(schedule=schedule, n_micro=m, batch_size=m, stages_per_rank=v)
    stages, weights = list(recipe.stages_on(place, p)), weights or ((1, 0),) * v
    held, waiting, done = [0] * v, [0] * v, [0] * v
    moments: dict[tuple[str, int], list[Moment]] = defaultdict(list)
    for kind, stage, _ in recipe.schedule_for(p).programs[place]:
        k = stages.index(stage)
        held[k] += kind == "F"
        waiting[k] -= kind == "W"
        moments[kind, k].append(Moment(tuple(held), tuple(waiting), tuple(done), k))
        waiting[k] += kind == "B"
        held[k] -= kind == "W"
        done[k] += kind == "W"

    def most(among: Iterable[Moment]) -> Moment:
        return max(among, key=lambda moment: (moment.weigh(weights), moment.done))  # of equals the one with gradients

    forward = most(moment for k in range(v) for moment in moments["F", k])
    return forward, tuple(most(moments["B" if stage else "W", k]) for k, stage in enumerate(stages))


def fullest(shape: ModelShape, layout: Layout, recipe: Recipe) -> list[int]:
    """Some ranks of which one holds most: that of the first stages, with the most micro-batches in flight; of the last,
    with the logits; and between them, of those with as many blocks and a full pipeline or not, the first and the
    last."""
    p, v = layout.pp, recipe.stages_per_rank
    blocks = blocks_of(shape, p * v)

    def kind(place: int) -> tuple[int, bool]:
        return sum(blocks[stage] for stage in recipe.stages_on(place, p)), recipe.n_micro * v > sum(
            pairs_in_flight(recipe, layout, place)
        )

    kinds = [(kind(place), place) for place in range(1, p - 1)]
    firsts, lasts = dict(reversed(kinds)), dict(kinds)
    return [layout.rank(pp=place) for place in sorted({0, p - 1, *firsts.values(), *lasts.values()})]


def way_of(recipe: Recipe) -> str:
    """The name of the way in which layers are run, one of labkit.plan.ops.WAYS."""
    if recipe.precision in ("amp", "fp16"):
        return "half" if recipe.strategy == "zero3" else "autocast"
    return "half" if recipe.precision in NARROW else recipe.precision


def linear_params(shape: ModelShape, tp: int) -> int:
    """Weights of a block's linears on one of `tp` ranks, without biases: what may be multiplied in 8 bits."""
    d, a, k = shape.d_model, shape.n_head * shape.width, shape.kv_heads * shape.width
    return d * (2 * a + 2 * k + (3 if shape.gated else 2) * shape.hidden) // tp


def setting_of(shape: ModelShape, layout: Layout, recipe: Recipe) -> Setting:
    """The setting in which this recipe runs a layer on one rank."""
    in_sequence = recipe.sequence_parallel and layout.tp > 1
    rows = micro_rows(recipe, layout)
    way = way_of(recipe)
    return Setting(
        rows, shape.seq // layout.cp, layout.tp, in_sequence, way, recipe.recompute, recipe.units,
        ep=layout.ep, cp=layout.cp, context=recipe.context,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def state_params(shape: ModelShape, tp: int, p: int, v: int, in_v: bool = False) -> tuple[float, ...]:
    """Parameters on the ranks of each position along pp, a tensor-parallel part of every matrix counted as 1/tp.
    Routed experts are not among them: see expert_params.

    `in_v`: the second stage of a rank is on the way back."""
    sizes = shape.parameters
    block = shape.rest_of_block / tp
    table = shape.vocab * shape.d_model / tp
    params, counts = [0.0] * p, blocks_of(shape, p * v)
    for stage in range(p * v):
        place = min(stage, p * v - 1 - stage) if in_v else stage % p
        params[place] += block * counts[stage]
        params[place] += (table + sizes["position embedding"]) * (stage == 0)
        params[place] += table * (stage == p * v - 1 and not (shape.tied and p * v == 1))
    return tuple(params)


@lru_cache(maxsize=1024)
def expert_params(shape: ModelShape, ep: int, p: int, v: int, in_v: bool = False) -> tuple[float, ...]:
    """Parameters of this rank's routed experts, 1/ep of them, at each position along pp; zeros for a dense model."""
    params, first = [0.0] * p, 0
    for stage, count in enumerate(blocks_of(shape, p * v)):
        mixed = count - dense_of(shape, first, count)
        if mixed:
            place = min(stage, p * v - 1 - stage) if in_v else stage % p
            params[place] += mixed * shape.n_expert / ep * shape.mlp_size(shape.expert_hidden)
        first += count
    return tuple(params)


def dense_of(shape: ModelShape, first: int, count: int) -> int:
    """Of `count` blocks from number `first` on, those that keep a dense MLP."""
    return min(count, max(0, shape.n_layer - shape.n_mixed - first))
