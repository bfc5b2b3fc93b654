"""What one rank sends in one training step, axis by axis: the laws that the ledger is held against.

    dp    N = bytes of this rank's parameters
          ddp      2(n-1)/n N      one all_reduce of the gradients; in 8 bits an all_to_all and an all_gather of codes,
                                   where an element takes 1 + 4/256 bytes (labkit.plan.sent_gradients)
          zero1    2(n-1)/n N      reduce_scatter of gradients, all_gather of weights
          zero2    (m+1)(n-1)/n N  a reduce_scatter for each of m micro-batches: whole gradients cannot wait
          zero3    3m(n-1)/n N     two gathers and a reduce_scatter for each of m micro-batches; one gather where units
                                   stay whole from forward to backward, and one a step where the next micro-batch
                                   always comes before that
          hsdp     3m(s-1)/s N     along dp_shard, as zero3 in a group of s ranks, all of cp among them; and an
                   2(r-1)/r N/s    all_reduce along dp_replicate of this rank's part of the gradients, once a step, over
                                   r = n/s groups
          with fp8_gathers, C weights of linears are gathered in 1 byte and not 2: C (n-1)/n less for each gather, of
          experts along expert_dp
    tp    A = bytes of the activations of all rows of this rank, [rows, T, D]
          2(n-1)/n A for every all_reduce: two in forward and two in backward of each block, one more for the embedding
          (forward) and one for the head (backward); and 3 numbers a token for the loss. Checkpointing runs attention's
          closing all_reduce again, and not that of the MLP, with which a block ends; in sequence both gathers as well,
          which are half an all_reduce each, and are all that "gathers" and "selective" run again.
          A mixture of experts sends what an MLP does, and k numbers a token in backward, in fp32 at least
    ep    out, in = rows that leave for experts of other ranks, and rows of theirs that come, of all layers:
          2(out + in) D w, and half as much once more where forward runs again; if experts are equally busy,
          out = in = (n-1)/n k T for T tokens. What is sent over dp for N is sent over expert_dp for the experts' bytes;
          zero3 gathers them once more where a block runs again, because experts are a unit of their own inside of it
    muon, and what else needs whole matrices: pieces of these to their owners and answers back, along dp and tp, those
          of experts along expert_dp (labkit.plan.matrices); AdamW sends nothing
    cp    b, b' = keys and values of this rank's tokens, and their gradients, in fp32 at least (labkit.plan.context)
          (n-1)(2 b + b') a block and micro-batch by "ring" and "gather", 2(n-1)/n of q, k, v and y by "ulysses"; the
          forward's part again where all of a block is computed again. All other tokens above are those of one rank of
          cp; gradients are added up over dp x cp
    pp    A to the next rank for each stage boundary that leaves this rank forward, A back for each that came in
          With dualpipe each stage is on two ranks: half of the rows go through each, and gradients are added up over
          2 dp ranks

Padding of flat buffers and the few numbers of a norm or a loss come on top. Sources: the docstrings of
labkit/parallel; Rajbhandari 2020, arXiv:1910.02054, section 7; Narayanan 2021, arXiv:2104.04473, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.context import CutAttention, sent
from labkit.plan.layout import CUT_AXES, Layout
from labkit.plan.matrices import sent_over
from labkit.plan.rank import Rank
from labkit.plan.recipe import Recipe
from labkit.plan.shape import ModelShape

WHOLE = ("fp32", "fp64", "bf16", "fp8", "nvfp4")
"""Precisions in which weights and activations are sent in one width; gradients may be wider. Copies in 8 bits or
fewer stay, unless `coded_params` says how many weights are gathered as such."""


@dataclass(frozen=True)
class ExpertLoad:
    """How many experts there are, how many a token meets, bytes of those on this rank, and who got how many tokens.

    counts      [ranks of the ep group][E] rows of each rank for each expert that were not dropped, of all layers of
                this rank and of a whole step; None: all experts get as many
    capacity    as in the model, for the case of None
    coded       weights of these experts that ZeRO-3 gathers as 8-bit codes"""

    n_expert: int
    top_k: int
    parameter_bytes: int
    counts: Sequence[Sequence[int]] | None = None
    capacity: float | None = None
    coded: int = 0


def sent_per_step(
    layout: Layout, recipe: Recipe, rank: int, *, parameter_bytes: int, n_layer: int, d_model: int, seq: int,
    coded_params: int = 0, shape: Any = None, experts: ExpertLoad | None = None,
) -> Breakdown:  # fmt: skip
    """Bytes that `rank` sends in a step, by axis: `recipe.axes`, and cp if rows are cut.

    `parameter_bytes`, `n_layer`: those on this rank; so are `coded_params`, the weights that ZeRO-3 gathers as 8-bit
    codes. `shape`, a ModelShape or GPTConfig, is wanted for optimizers on whole matrices, whose pieces depend on
    their sizes, and for cp where query heads share key heads; without it each query head has a key head of its own.

    With `experts` and ep > 1 two axes more, "ep" and "expert_dp"; `parameter_bytes` are then those of all but experts.
    With tp a model's `experts` are wanted also where ep is 1.

    Raises ValueError for precisions whose activations travel in half the bytes on some edges only, and for Muon and
    its like without a shape."""
    if recipe.precision not in WHOLE:
        raise ValueError(f"the laws here are for {', '.join(WHOLE)}, got precision={recipe.precision!r}")
    word = recipe.weight_bytes
    place, rows = layout.coords(rank), recipe.batch_size // layout.dp // recipe.copies  # through each of its stages
    heads = ModelShape.of(shape) if shape is not None else None
    shared = heads.n_head // heads.kv_heads if heads else 1
    cut = [_cp(layout, recipe, n_layer, rows, seq, d_model, word, shared)] if layout.cp > 1 else []
    seq //= layout.cp
    items = [
        *_dp(layout, recipe, place["pp"], parameter_bytes, coded_params),
        _tp(layout, recipe, place["pp"], n_layer, rows * seq, d_model, word, experts.top_k if experts else 0),
        _pp(layout, recipe, place["pp"], rows * seq * d_model * word),
        *cut,
        *(_ep(layout, recipe, rank, experts, n_layer, rows * seq, d_model * word) if experts else []),
    ]
    if recipe.steps_by.by_matrix:
        name = recipe.optimizer.capitalize()
        if shape is None:
            raise ValueError(f"what {name} sends depends on the model's matrices: give shape=, such as a GPTConfig")
        held = Rank(ModelShape.of(shape), layout, recipe, rank, "cpu")
        (rest, over_tp), (experts_too, more_tp) = sent_over(held.matrix_steps(0)), sent_over(held.matrix_steps(1))
        rest_by_axis = {recipe.axes[0]: rest, "expert_dp": experts_too, "tp": over_tp + more_tp}
        items = [_with_pieces(item, rest_by_axis.get(item.name, 0), name) for item in items]
    return Breakdown(items)


def _with_pieces(item: Item, n_bytes: int, name: str) -> Item:
    if not n_bytes:
        return item
    return replace(item, value=item.value + n_bytes, formula=f"{item.formula} + {n_bytes:,} of pieces for {name}")


def expert_traffic(counts: Sequence[Sequence[int]], n_ranks: int) -> list[tuple[int, int]]:
    """(out, in) of each of n ranks: its rows for experts of others, and theirs for its own.   counts [n][E]"""
    n_own = len(counts[0]) // n_ranks
    to = [[sum(row[j * n_own : (j + 1) * n_own]) for j in range(n_ranks)] for row in counts]
    return [(sum(to[r]) - to[r][r], sum(row[r] for row in to) - to[r][r]) for r in range(n_ranks)]


def _ep(
    layout: Layout, recipe: Recipe, rank: int, load: ExpertLoad, n_layer: int, tokens: int, row_bytes: int
) -> list[Item]:
    n = layout.ep
    if n == 1:
        return []
    met = load.top_k * min(1.0, load.capacity or 1.0)
    both = 2 * (n - 1) / n * met * tokens * n_layer
    if load.counts is not None:
        both = sum(expert_traffic(load.counts, n)[layout.ranks("ep", rank).index(rank)])
    forward = 2 if recipe.recompute == "full" else 1
    # who sends how much is told first, 8 bytes for each expert, each time that forward runs
    counts_bytes = forward * recipe.n_micro * n_layer * (8 * load.n_expert * (n - 1) // n)
    value = (forward + 1) * both * row_bytes + counts_bytes
    formula = f"{forward + 1}(out + in) D w + counts, out + in = {both:,.0f}, D w = {row_bytes:,}"
    scatters, gathers = moves(recipe, layout.pp, layout.coords(rank)["pp"])
    if recipe.strategy == "zero3" and recipe.recompute == "full":
        # experts are a unit inside of the block that runs again: gathered for that, freed, and gathered for backward;
        # units that stay whole wait for the second run, too, and so for the end of the step
        gathers = gathers + recipe.n_micro if recipe.reshard else 1
    wider, m = recipe.sent_gradient_bytes / recipe.weight_bytes, layout.dp * layout.cp // n
    moved = scatters * wider + gathers * (wider if recipe.strategy == "ddp" else 1)
    shared = (moved * load.parameter_bytes - gathers * load.coded) * (m - 1) / m
    words = f"{moved:g}(m-1)/m X, m = {m} ranks with the same experts, X = {load.parameter_bytes:,}"
    words += f", {gathers:g}(m-1)/m of {load.coded:,} less" * bool(load.coded)
    return [
        Item("ep", value, "B", formula, "arXiv:2006.16668"),
        Item("expert_dp", shared, "B", words, "arXiv:1910.02054, 7"),
    ]


def dp_moves(strategy: str, n_micro: int) -> tuple[int, int]:
    """(reduce-scatters, all-gathers) of a rank's parameters in a step, (n-1)/n N each; an all_reduce is one of both."""
    return {"zero2": (n_micro, 1), "zero3": (n_micro, 2 * n_micro)}.get(strategy, (1, 1))


def moves(recipe: Recipe, n_stage_ranks: int = 1, place: int = 0) -> tuple[int, float]:
    """The same for a recipe on the rank at `place` of a pipeline, which counts where units stay whole for backward."""
    scatters, gathers = dp_moves(recipe.strategy, recipe.n_turns)
    if recipe.strategy != "zero3" or recipe.reshard:
        return scatters, gathers
    schedule = recipe.schedule_for(n_stage_ranks)
    under_way, times = dict.fromkeys(schedule.stages_of(place), 0), 0
    for action in schedule.programs[place]:
        times += action.kind == "F" and not under_way[action.stage]  # nobody has kept it whole
        under_way[action.stage] += {"F": 1, "B": -1}.get(action.kind, 0)
    return scatters, times / len(under_way)


def _dp(layout: Layout, recipe: Recipe, place: int, n_bytes: int, coded: int) -> list[Item]:
    n, axis = recipe.sharing(layout), recipe.axes[0]
    scatters, gathers = moves(recipe, layout.pp, place)
    wider = recipe.sent_gradient_bytes / recipe.weight_bytes  # 2 where bf16 gradients are added up in fp32
    moved = scatters * wider + gathers * (wider if recipe.strategy == "ddp" else 1)  # DDP gathers gradients, too
    formula = f"({scatters} + {gathers:g})(n-1)/n S, n={n}, S={n_bytes:,}"
    if wider != 1:
        formula = f"{moved:g}(n-1)/n S, n={n}, S={n_bytes:,} of weights, {wider:g} S of gradients"
    if coded:
        formula += f", {gathers:g}(n-1)/n C less, C={coded:,} weights in 1 byte"
    items = [Item(axis, (moved * n_bytes - gathers * coded) * (n - 1) / n, "B", formula, "arXiv:1910.02054, 7")]
    if recipe.shard_ranks is not None:
        r, part = layout.dp * layout.cp // n, wider * n_bytes / n
        crossing = f"2(r-1)/r G, r={r}, G={part:,.0f} of gradients, 1/{n}"
        items.append(Item(CUT_AXES[1], 2 * (r - 1) / r * part, "B", crossing, "arXiv:2304.11277, 3.2.2"))
    return items


def _tp(
    layout: Layout, recipe: Recipe, stage_rank: int, n_layer: int, tokens: int, d_model: int, word: int, top_k: int
) -> Item:
    n, stages = layout.tp, recipe.stages_on(stage_rank, layout.pp)
    last = recipe.n_stages(layout.pp) - 1 in stages
    reduces = (4 + sums_again(recipe, top_k > 0)) * n_layer + (0 in stages) + last
    loss = 3 * tokens * max(4, word) * last
    weights = n_layer * top_k * tokens * max(4, word)
    value = 2 * (n - 1) / n * (reduces * tokens * d_model * word + loss + weights)
    routed = " + gradients of experts' weights" * (top_k > 0)
    return Item("tp", value, "B", f"2(n-1)/n ({reduces:g} A + loss{routed}), n={n}", "arXiv:1909.08053, 3")


def _cp(
    layout: Layout, recipe: Recipe, n_layer: int, rows: int, seq: int, d_model: int, word: int, shared: int
) -> Item:
    """`shared`: the number of query heads to which one key head belongs."""
    heads = layout.cp * shared  # how wide a head is does not matter: heads x width, of this rank of tp, is d_model / tp
    layer = CutAttention(seq, layout.cp, heads, layout.cp, 1, rows, word)
    forward, backward = (part * d_model / layout.tp / heads for part in sent(recipe.context, layer))
    runs = 2 if recipe.recompute == "full" else 1
    formula = f"{n_layer} blocks x ({runs} x {forward:,.0f} + {backward:,.0f}) by {recipe.context}, n={layout.cp}"
    return Item("cp", n_layer * (runs * forward + backward), "B", formula, "labkit.plan.context")


def sums_again(recipe: Recipe, mixed: bool = False) -> float:
    """The all_reduces over tp that backward runs again in each block; a gather is half of one.

    `mixed`: a block with experts, which keep what was gathered for them unless all of the block runs again."""
    in_sequence, gathers = recipe.sequence_parallel, 1 if mixed else 2
    return {"none": 0.0, "full": 1.0 + 0.5 * in_sequence}.get(recipe.recompute, 0.5 * gathers * in_sequence)


def _pp(layout: Layout, recipe: Recipe, rank: int, n_bytes: int) -> Item:
    last, stages = recipe.n_stages(layout.pp) - 1, recipe.stages_on(rank, layout.pp)
    own_stages = stages if recipe.copies == 1 else ()  # a micro-batch never goes through two stages of a rank
    forward = sum(stage < last and stage + 1 not in own_stages for stage in stages)
    back = sum(stage > 0 and stage - 1 not in own_stages for stage in stages)
    value = (forward + back) * n_bytes / (layout.tp if recipe.sequence_parallel else 1)
    return Item("pp", value, "B", f"({forward} + {back}) A, A={n_bytes:,}", "arXiv:2104.04473, 3.2")
