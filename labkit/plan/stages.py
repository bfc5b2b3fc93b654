"""How a model, a batch and a schedule fall on the ranks of a layout: blocks of a stage, rows of a micro-batch.

16 blocks on 4 stages      4 4 4 4        and 5 5 5 1 if the head, on the last stage, takes as long as 4 blocks
micro-batches in flight    of stage and micro-batch, on each rank: the law of each schedule (labkit.plan.schedule)
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from labkit.plan.layout import Layout
from labkit.plan.ops import Setting
from labkit.plan.recipe import NARROW, Recipe, check
from labkit.plan.schedule import rounds
from labkit.plan.shape import ModelShape


def check_plan(shape: ModelShape, recipe: Recipe, layout: Layout) -> None:
    """ValueError, with the numbers and the mend, for a combination of model, recipe and layout that cannot work.

    A tied head on several stages is let pass: each end has a copy of the table, as in Megatron-LM."""
    shape.check_cut(layout.tp, layout.pp * recipe.stages_per_rank, recipe.sequence_parallel)
    check(shape if not shape.tied else shape.changed(tied=False), recipe, layout)


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


def blocks_of(shape: ModelShape, n_stages: int) -> tuple[int, ...]:
    """Blocks of each stage: the head takes as long as the blocks that have as many weights to multiply with."""
    sizes = shape.parameters
    block = (sizes["attention"] + sizes["mlp"]) / shape.n_layer
    return cut(shape.n_layer, n_stages, shape.vocab * shape.d_model / block)


def micro_rows(recipe: Recipe, layout: Layout) -> int:
    """Rows of the largest micro-batch on a rank."""
    return -(-(recipe.batch_size // layout.dp) // recipe.n_micro)


def pairs_in_flight(recipe: Recipe, layout: Layout, place: int) -> list[int]:
    """The most micro-batches that a rank holds at once, for each of its stages; `place` is its position along pp.

    gpipe m; 1f1b min(m, p-r); zero_bubble min(m, p); interleaved min(v m, (v-1) a + 2(p-1-r) + 1) over its v stages,
    which get a round of micro-batches each in turn; a is the first round's, p if p divides m (labkit.plan.schedule)."""
    p, m, v = layout.pp, recipe.n_micro, recipe.stages_per_rank
    if p == 1 and v == 1 and recipe.schedule != "gpipe":
        return [1]
    if v == 1 and recipe.schedule != "interleaved":
        return [{"naive": 1, "gpipe": m, "1f1b": min(m, p - place)}.get(recipe.schedule, min(m, p))]
    sizes, counts = rounds(p, m), [0] * v
    left = min(v * m, (v - 1) * sizes[0] + 2 * (p - 1 - place) + 1)
    for size in sizes:
        for index in range(v):
            more = min(size, left)
            counts[index], left = counts[index] + more, left - more
    return counts


def fullest(shape: ModelShape, layout: Layout, recipe: Recipe) -> list[int]:
    """Some ranks of which one holds most: that of the first stages, with the most micro-batches in flight; of the last,
    with the logits; and between them, of those with as many blocks and a full pipeline or not, the first and the
    last."""
    p, v = layout.pp, recipe.stages_per_rank
    blocks = blocks_of(shape, p * v)

    def kind(place: int) -> tuple[int, bool]:
        return sum(blocks[place::p]), recipe.n_micro * v > sum(pairs_in_flight(recipe, layout, place))

    between = range(1, p - 1)
    firsts = {kind(place): place for place in reversed(between)}
    lasts = {kind(place): place for place in between}
    return [place * layout.tp for place in sorted({0, p - 1, *firsts.values(), *lasts.values()})]


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
    return Setting(rows, shape.seq, layout.tp, in_sequence, way, recipe.recompute, recipe.units)


@lru_cache(maxsize=1024)
def state_params(shape: ModelShape, tp: int, p: int, v: int) -> tuple[float, ...]:
    """Parameters on the ranks of each position along pp, a tensor-parallel part of every matrix counted as 1/tp."""
    sizes = shape.parameters
    block = (sizes["attention"] + sizes["mlp"] + sizes["norms"]) / shape.n_layer / tp
    table = shape.vocab * shape.d_model / tp
    params, counts = [0.0] * p, blocks_of(shape, p * v)
    for stage in range(p * v):
        params[stage % p] += block * counts[stage]
        params[stage % p] += (table + sizes["position embedding"]) * (stage == 0)
        params[stage % p] += table * (stage == p * v - 1 and not (shape.tied and p * v == 1))
    return tuple(params)
