"""What one rank sends in one training step, axis by axis: the sum of what each law says. The ledger is held against it.

    dp    a strategy's reduce-scatters and gathers        labkit.plan.laws.data_parallel, and the strategy's own file
    tp    sums of activations                             labkit.plan.laws.tensor, expert_tensor
    pp    activations and their gradients                 labkit.plan.laws.pipeline
    cp    keys and values, or tokens for heads            labkit.plan.laws.context
    ep    tokens to their experts, expert_dp their state  labkit.plan.laws.experts
    muon, and what else needs whole matrices: pieces of these to their owners and answers back, along dp and tp, those
          of experts along expert_dp (labkit.plan.partition.matrices); AdamW sends nothing

Padding of flat buffers and the few numbers of a norm or a loss come on top. Sources: the docstrings of
labkit/parallel; Rajbhandari 2020, arXiv:1910.02054, section 7; Narayanan 2021, arXiv:2104.04473, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.job.recipe import Recipe
from labkit.plan.laws import context, data_parallel, expert_tensor, experts as expert_law, pipeline, tensor
from labkit.plan.laws.traffic import ExpertLoad, StepTraffic
from labkit.plan.model.cut_attention import window_of
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.partition.matrices import sent_over
from labkit.plan.step.rank import Rank


def sent_per_step(
    layout: Layout, recipe: Recipe, rank: int, *, parameter_bytes: int, n_layer: int, d_model: int, seq: int,
    coded_params: int = 0, shape: Any = None, experts: ExpertLoad | None = None,
) -> Breakdown:  # fmt: skip
    """Bytes that `rank` sends in a step, by axis: `recipe.axes`, and cp if rows are cut.

    `parameter_bytes`, `n_layer`: those on this rank; so are `coded_params`, the weights that ZeRO-3 gathers as 8-bit
    codes. `shape`, a ModelShape or GPTConfig, is wanted for optimizers on whole matrices, whose pieces depend on
    their sizes, and for cp where query heads share key heads or look at a window; without it each query head has a key
    head of its own and looks at all keys before it.

    With `experts` and ep > 1 two axes more, "ep" and "expert_dp"; `parameter_bytes` are then those of all but experts.
    With tp a model's `experts` are wanted also where ep is 1.

    Raises ValueError for precisions whose activations travel in half the bytes on some edges only, and for Muon and
    its like without a shape."""
    if recipe.precision_law.casts:
        raise ValueError(f"the laws here are for precisions of one width, got precision={recipe.precision!r}")
    heads = ModelShape.of(shape) if shape is not None else None
    shared = heads.n_head // heads.kv_heads if heads else 1
    traffic = StepTraffic(
        layout, recipe, rank, parameter_bytes, n_layer, d_model, seq, coded_params, shared, experts,
        window_of(heads) if heads else 0,
    )  # fmt: skip
    items = [
        *data_parallel.sent(recipe.strategy_law, traffic),
        *tensor.sent(traffic),
        *pipeline.sent(traffic),
        *context.sent_in_step(traffic),
        *expert_law.sent(recipe.strategy_law, traffic),
    ]
    for item in expert_tensor.sent(traffic):
        items = [_plus(own, item.value, item.formula) if own.name == item.name else own for own in items]
    if recipe.steps_by.by_matrix:
        if heads is None:
            raise ValueError(
                f"what {recipe.optimizer.capitalize()} sends depends on the model's matrices: give shape=, such as a "
                "GPTConfig"
            )
        items = with_pieces(items, heads, layout, recipe, rank)
    return Breakdown(items)


def with_pieces(items: Iterable[Item], shape: ModelShape, layout: Layout, recipe: Recipe, rank: int) -> list[Item]:
    """The items, with the pieces of matrices that travel to their owners, and answers back, added to their axes."""
    held, name = Rank(shape, layout, recipe, rank, "cpu"), recipe.optimizer.capitalize()
    (rest, over_tp), (of_experts, of_experts_over_tp) = (sent_over(held.matrix_steps(part)) for part in (0, 1))
    pieces = {recipe.axes[0]: rest, "expert_dp": of_experts, "tp": over_tp + of_experts_over_tp}
    return [_plus(item, pieces.get(item.name, 0), f"pieces for {name}") for item in items]


def _plus(item: Item, n_bytes: float, words: str) -> Item:
    if not n_bytes:
        return item
    return replace(item, value=item.value + n_bytes, formula=f"{item.formula} + {n_bytes:,.0f} of {words}")


def dp_moves(strategy: str, n_micro: int) -> tuple[int, int]:
    """(reduce-scatters, all-gathers) of a rank's parameters in a step, (n-1)/n N each; an all_reduce is one of both."""
    recipe = Recipe(strategy, n_micro=n_micro)
    scatters, gathers, _ = recipe.strategy_law.moves(recipe)
    return scatters, int(gathers)
