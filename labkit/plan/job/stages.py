"""How a model, a batch and a schedule fall on the ranks of a layout: blocks of a stage, rows of a micro-batch.

16 blocks on 4 stages      4 4 4 4        and 5 5 5 1 if the head, on the last stage, takes as long as 4 blocks
micro-batches in flight    of stage and micro-batch, on each rank: the law of each schedule (plan.schedules.schedule)
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from labkit.plan.job.recipe import Recipe, refusals
from labkit.plan.job.turns import turns
from labkit.plan.laws import expert_tensor, experts
from labkit.plan.laws.schedules import LAWS
from labkit.plan.model.setting import Setting
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout


@lru_cache(maxsize=64)  # a step is asked for its memory on several ranks, and then for its seconds
def check_plan(shape: ModelShape, recipe: Recipe, layout: Layout) -> None:
    """ValueError, with the numbers and the mend, for a combination of model, recipe and layout that cannot work.

    A tied head on several stages is let pass: each end has a copy of the table, as in Megatron-LM.

    Besides what the laws refuse (labkit.plan.job.recipe), what labkit's planner does not know: tp beside latent
    attention."""
    if shape.kv_lora is not None and layout.tp > 1:
        raise ValueError(
            f"labkit's planner does not know tp beside latent attention yet, got tp={layout.tp}: take tp=1"
        )
    for reason in (*experts.refuses(shape, recipe, layout), *expert_tensor.refuses(shape, layout)):
        raise ValueError(reason)
    shape.check_cut(layout.tp, recipe.n_stages(layout.pp), recipe.sequence_parallel)
    for reason in refusals(shape, recipe, layout, tied=False):
        raise ValueError(reason)


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


def pairs_in_flight(recipe: Recipe, layout: Layout, place: int) -> tuple[int, ...]:
    """The most micro-batches that a rank holds at once, for each of its stages; `place` is its position along pp."""
    return in_flight(recipe.schedule, layout.pp, recipe.n_micro, recipe.stages_per_rank, place)


@lru_cache(maxsize=4096)
def in_flight(schedule: str, p: int, m: int, v: int, place: int) -> tuple[int, ...]:
    """The most micro-batches that the rank at `place` holds at once, for each of its `v` stages, of `m` on `p` ranks:
    by the law of the schedule (labkit.plan.laws.schedules), or at the fullest moment of its program."""
    if (held := LAWS[schedule].held) is not None:
        return held(p, m, v, place)
    return max((turn.held for turn in turns(schedule, p, m, v, place)), key=sum)


def fullest_places(shape: ModelShape, layout: Layout, recipe: Recipe) -> list[int]:
    """Some ranks of which one holds most, without what owners of whole matrices keep: that of the first stages, with
    the most micro-batches in flight; of the last, with the logits; and between them, of those with as many blocks and a
    full pipeline or not, the first and the last."""
    places = _fullest_places(shape, recipe.schedule, layout.pp, recipe.n_micro, recipe.stages_per_rank)
    return [place * layout.cp * layout.tp for place in places]


@lru_cache(maxsize=1024)
def _fullest_places(shape: ModelShape, schedule: str, p: int, m: int, v: int) -> list[int]:
    law = LAWS[schedule]
    blocks = blocks_of(shape, p * v // law.copies)

    def kind(place: int) -> tuple[int, bool]:
        full = m // law.copies * v > sum(in_flight(schedule, p, m, v, place))
        return sum(blocks[stage] for stage in law.stages_on(place, p, v)), full

    kinds = [(kind(place), place) for place in range(1, p - 1)]
    firsts, lasts = dict(reversed(kinds)), dict(kinds)
    return sorted({0, p - 1, *firsts.values(), *lasts.values()})


def lighter_ranks(shape: ModelShape, layout: Layout, recipe: Recipe) -> list[int]:
    """Of the ranks of `fullest_places` those that hold no more than rank 0, whatever the strategy: they have no more
    blocks in any stage, no more micro-batches, and no embedding. A bound of rank 0 is a bound of theirs, too.

    None where blocks differ (experts in some of them), where backward is cut in two (the first rank keeps nothing for
    W), and where an optimizer's owners of whole matrices are not alike."""
    if shape.n_expert or recipe.splits or recipe.steps_by.by_matrix is not None:
        return []
    places = _lighter_places(shape, recipe.schedule, layout.pp, recipe.n_micro, recipe.stages_per_rank)
    return [place * layout.cp * layout.tp for place in places]


@lru_cache(maxsize=1024)
def _lighter_places(shape: ModelShape, schedule: str, p: int, m: int, v: int) -> list[int]:
    law, blocks = LAWS[schedule], blocks_of(shape, p * v // LAWS[schedule].copies)

    def loads(place: int) -> list[int]:
        return [*(blocks[stage] for stage in law.stages_on(place, p, v)), *in_flight(schedule, p, m, v, place)]

    middle = [place for place in _fullest_places(shape, schedule, p, m, v) if 0 < place < p - 1]
    return [place for place in middle if all(map(int.__le__, loads(place), loads(0)))]


@lru_cache(maxsize=1024)
def stages_by_kind(shape: ModelShape, n_stages: int) -> tuple[tuple[int, int, bool, bool], ...]:
    """Of each stage its blocks, how many of them have no experts in a model whose others have, and whether it is the
    first or the last one: stages of one kind take as long."""
    blocks, kinds = blocks_of(shape, n_stages), []
    for stage, count in enumerate(blocks):
        dense = dense_of(shape, sum(blocks[:stage]), count) if shape.n_expert else 0
        kinds.append((count, dense, stage == 0, stage == n_stages - 1))
    return tuple(kinds)


@lru_cache(maxsize=1024)
def ranks_by_kind(shape: ModelShape, schedule: str, p: int, v: int) -> tuple[range, ...]:
    """The stages of ranks of a pipeline of which no two are alike."""
    law = LAWS[schedule]
    kinds = stages_by_kind(shape, p * v // law.copies)
    stages = [law.stages_on(place, p, v) for place in reversed(range(p))]
    return tuple(reversed({tuple(kinds[stage] for stage in own): own for own in stages}.values()))


def way_of(recipe: Recipe) -> str:
    """The name of the way in which layers are run, one of labkit.plan.model.setting.WAYS."""
    casts = recipe.precision_law.casts and recipe.strategy_law.computes_gathered
    return "half" if casts else recipe.precision_law.way


def linear_params(shape: ModelShape, tp: int, ep: int = 1) -> tuple[float, float]:
    """Weights of a block's linears on one of `tp` ranks, without biases: what may be multiplied in 8 bits. Those of
    routed experts, n_expert/ep of them, come apart; a router is never multiplied so. The mean of all blocks."""
    attention, mats = sum(inside * out for inside, out in shape.attention_products), 3 if shape.gated else 2
    mixed = shape.n_mixed / shape.n_layer
    expert = mixed * mats * shape.d_model * shape.expert_hidden
    rest = attention + (1 - mixed) * mats * shape.d_model * shape.hidden + expert * shape.n_shared
    return rest / tp, expert * shape.n_expert / ep / tp


def setting_of(shape: ModelShape, layout: Layout, recipe: Recipe, ep_rank: int = 0) -> Setting:
    """The setting in which this recipe runs a layer on one rank, of which experts are number `ep_rank`."""
    in_sequence = recipe.sequence_parallel and layout.tp > 1
    rows = micro_rows(recipe, layout)
    way = way_of(recipe)
    return Setting(
        rows, shape.seq // layout.cp, layout.tp, in_sequence, way, recipe.recompute, recipe.units,
        ep=layout.ep, ep_rank=ep_rank, cp=layout.cp, context=recipe.context,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def state_params(shape: ModelShape, tp: int, p: int, v: int, schedule: str = "interleaved") -> tuple[float, ...]:
    """Parameters on the ranks of each position along pp, a tensor-parallel part of every matrix counted as 1/tp.
    Routed experts are not among them: see expert_params. `schedule` says which `v` stages a rank has."""
    sizes, recipe = shape.parameters, Recipe(schedule=schedule, stages_per_rank=v)
    block = shape.rest_of_block / tp
    table = shape.vocab * shape.d_model / tp
    params, counts = [0.0] * p, blocks_of(shape, recipe.n_stages(p))
    for place, stage in _homes(recipe, p):
        params[place] += block * counts[stage]
        params[place] += (table + sizes["position embedding"]) * (stage == 0)
        params[place] += table * (stage == len(counts) - 1 and not (shape.tied and len(counts) == 1))
    return tuple(params)


def _homes(recipe: Recipe, p: int) -> list[tuple[int, int]]:
    """(position along pp, stage) for each stage of each rank."""
    return [(place, stage) for place in range(p) for stage in recipe.stages_on(place, p)]


@lru_cache(maxsize=1024)
def expert_params(
    shape: ModelShape, tp: int, ep: int, p: int, v: int, schedule: str = "interleaved"
) -> tuple[float, ...]:
    """Parameters of this rank's routed experts, 1/ep of them and 1/tp of each, at each position along pp; zeros for a
    dense model."""
    params, recipe = [0.0] * p, Recipe(schedule=schedule, stages_per_rank=v)
    counts = blocks_of(shape, recipe.n_stages(p))
    for place, stage in _homes(recipe, p):
        mixed = counts[stage] - dense_of(shape, sum(counts[:stage]), counts[stage])
        params[place] += mixed * shape.n_expert / ep * shape.mlp_size(shape.expert_hidden) / tp
    return tuple(params)


def dense_of(shape: ModelShape, first: int, count: int) -> int:
    """Of `count` blocks from number `first` on, those that keep a dense MLP."""
    return min(count, max(0, shape.n_layer - shape.n_mixed - first))
