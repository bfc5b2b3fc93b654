"""rehearse: one rank's training step, the real code, on fake tensors, in a fake world of any size.

    rehearse("llama-70b", Layout(dp=8, pp=4, tp=8), Recipe(batch_size=64, n_micro=8), rank=0)

    Mesh.connect(layout, fake world)   ->  assemble  ->  first step  ->  second step
                                           building      optimizer's      measured: memory by kind, ledger, flops
                                           (its peak)    state is made

What runs is `labkit.assemble`'s TrainStep: strategies, pipeline, checkpointing, clipping, loss scaling, optimizer. Only
kernels and peers are missing. The step that is measured is the second: in the first one the optimizer makes its state
and ZeRO-3 learns in which order its units are needed. Beside what was rehearsed stands what the law predicts
(`predict_memory`), which is computed independently.

Memory at the peak by kind, bytes sent by verb and axis, and flops equal those of a real rank on gloo, to the byte. So
do those of a pipeline: a received tensor is allocated when the program waits for it, and a sent one is freed when a
result comes back, so neither depends on the speed of the wire. Only gloo's own thread depends on time: it may hold a
tensor for a moment after the rank has gone on. A real peak is the rehearsed one or, now and then, a tensor more.

Where a row of a mixture of experts goes depends on values, and a rehearsal has none. It takes a given load: a balanced
one, or counts. A real rank whose router chooses so holds and sends the same, to the byte (plan.model.expert_load).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from labkit.assemble import PRODUCTS, WEIGHTS, TrainStep, assemble
from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.parallel.expert import give_
from labkit.parallel.stage_messages import action_of_tag
from labkit.plan.breakdown import Breakdown
from labkit.plan.job.recipe import Recipe, check
from labkit.plan.job.stages import check_plan
from labkit.plan.model.expert_load import Load
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.step.memory import predict_memory
from labkit.probe.rehearsal import Rehearsal, run_fake
from labkit.train.config import GPTConfig


def rehearse(
    shape: ModelShape | GPTConfig | str,
    layout: Layout,
    recipe: Recipe,
    rank: int = 0,
    counts: Sequence[Sequence[int]] | None = None,
) -> Rehearsal:
    """Measure the second training step of `rank` without the other ranks and without the memory.

    `shape` is a ModelShape, a GPTConfig or a preset's name ("llama-70b"). What labkit's GPT does not have (SwiGLU, key
    heads that several ranks of tp share) is replaced by a GPT of as many parameters and flops; `notes` of the result
    say so. The batch is not counted.

    `counts` [ep][E], for a model with experts: rows of each rank of this rank's ep group for each expert, in each layer
    and each micro-batch, dropped ones left out; None: all experts get as many. What is predicted is always balanced.

    ValueError, before anything runs, for what cannot be cut or run, for a rank that is not there, and for counts that
    are not those of the tokens."""
    config, notes = as_gpt(shape, layout.tp)
    check(config, recipe, layout)
    if not 0 <= rank < layout.size:
        raise ValueError(f"{layout} has ranks 0 to {layout.size - 1}, got rank={rank}")
    sizes = [len(run) for run in range_of(recipe.batch_size // layout.dp, recipe.n_micro)]
    load = load_of(config, layout, sizes, counts)
    predicted, unknown = law_of(config, layout, recipe, rank)

    def batch(group: Group) -> Tensor:
        return torch.zeros(recipe.batch_size // layout.dp, config.seq, dtype=torch.int64)

    def setup(group: Group, tokens: Tensor) -> TrainStep:
        mesh = Mesh.connect(layout, group)
        step = assemble(config, recipe, mesh)
        for stage in step.stages.values():
            give_(stage, load, mesh.ep)
        step(tokens, tokens, 0)
        return step

    def measured(group: Group, step: TrainStep, tokens: Tensor) -> None:
        step(tokens, tokens, 1)

    rehearsal = run_fake(
        measured, layout.size, rank, setup=setup, inputs=batch, hear=Boundary(config, layout, recipe, sizes)
    )
    return replace(rehearsal, predicted=predicted, notes=(*notes, *unknown))


def load_of(config: GPTConfig, layout: Layout, sizes: Sequence[int], counts: Sequence[Sequence[int]] | None) -> Load:
    """The load of the experts: these counts, or a balanced one. `sizes`: rows of each micro-batch.

    ValueError for counts that are not those of the tokens of each, and for counts where there are no experts."""
    load = Load.of(config, counts)
    if counts is None:
        return load
    if not config.n_expert:
        raise ValueError("counts are rows by expert, and this model has no experts: leave them out, or set n_expert")
    for size in sizes:
        load.table(size, config.seq // layout.cp, layout.ep)
    return load


def law_of(config: GPTConfig, layout: Layout, recipe: Recipe, rank: int) -> tuple[Breakdown | None, tuple[str, ...]]:
    """What the law predicts, and why it predicts nothing of some steps with experts that a rehearsal can run."""
    try:
        check_plan(ModelShape.of(config), recipe, layout)
    except ValueError as reason:
        if not config.n_expert:
            raise
        return None, (f"no prediction stands beside it: {reason}",)
    return predict_memory(config, layout, recipe, rank), ()


class Boundary:
    """The messages between stages of a pipeline: a micro-batch's activation, or its gradient.   [rows, T, D]"""

    def __init__(self, config: GPTConfig, layout: Layout, recipe: Recipe, rows: Sequence[int]) -> None:
        """`rows` of each micro-batch; T is cut by cp and by sequence parallelism. A stream of activations is in fp32
        under autocast, which rounds only what goes into products, and in half precision where ZeRO-3 gathers in it."""
        self.rows, self.n_micro = rows, recipe.n_micro
        self.length = config.seq // layout.cp // (layout.tp if recipe.sequence_parallel else 1)
        self.width = config.d_model
        wide = WEIGHTS[recipe.precision]
        self.dtype = PRODUCTS.get(recipe.precision, wide) if recipe.strategy_law.computes_gathered else wide

    def __call__(self, axis: str, source: int, tag: int) -> Tensor | None:
        """The message of this tag on the pipeline's axis; None on other axes, where no messages are sent."""
        if axis != "pp":
            return None
        return torch.empty(self.rows[action_of_tag(tag, self.n_micro).micro], self.length, self.width, dtype=self.dtype)


def range_of(rows: int, parts: int) -> list[range]:
    """`rows` in `parts` runs, the first ones longer by one: as tensor_split cuts."""
    size, left_over = divmod(rows, parts)
    starts = [k * size + min(k, left_over) for k in range(parts + 1)]
    return [range(low, high) for low, high in zip(starts, starts[1:], strict=False)]


def as_gpt(shape: Any, tp: int = 1) -> tuple[GPTConfig, tuple[str, ...]]:
    """The GPT that stands for a shape on `tp` ranks, and notes that say what it lacks of that shape.

    It has the shape's key heads, or, where tp does not divide them, as many as query heads. Where attention or the MLP
    is of another kind, the hidden width is chosen such that a block has as many parameters, and so as many flops, as
    the shape's:  2 D F' = (2 or 3) D F + 2 D A + 2 D K - 2 D D - 2 D K'  with K' the width of its own keys.  ValueError
    if that leaves none. Of a mixture of experts an expert's width is chosen so, F' = F or 3/2 F; what attention has
    more or less stays, and the notes say how many parameters there are then. ValueError for dense blocks beside those
    with experts.
    """
    if isinstance(shape, GPTConfig):
        return shape, ()
    asked = ModelShape.preset(shape) if isinstance(shape, str) else ModelShape.of(shape)
    keys = None if asked.kv_heads % tp or asked.kv_heads == asked.n_head else asked.kv_heads
    if asked.n_expert:
        return _as_mixture(asked, keys)
    d, a, k = asked.d_model, asked.n_head * asked.width, asked.kv_heads * asked.width
    own = (keys or asked.n_head) * (d // asked.n_head)
    hidden = (3 if asked.gated else 2) * asked.hidden / 2 + a + k - d - own
    if hidden < 1 or hidden != int(hidden) or d % asked.n_head:
        raise ValueError(
            f"labkit's GPT cannot stand for this shape: with heads of d_model / n_head = {d} / {asked.n_head} and as "
            f"many parameters, its hidden width would be {hidden:g}. Give a shape of its kind, ModelShape.gpt(...)"
        )
    notes = []
    if differences := _differences(asked, keys):
        notes.append(
            f"labkit's GPT does not have {', nor '.join(differences)}: rehearsed is one whose MLP is "
            f"{int(hidden):,} wide, with as many parameters and flops a block; activations differ somewhat"
        )
    config = GPTConfig(
        asked.n_layer,
        d,
        asked.n_head,
        asked.vocab,
        asked.seq,
        _position(asked),
        asked.tied,
        0.0,
        int(hidden),
        asked.bias,
        kv_heads=keys,
    )
    return config, (*notes, *_of_all(asked))


def _as_mixture(asked: ModelShape, keys: int | None) -> tuple[GPTConfig, tuple[str, ...]]:
    """The GPT that stands for a shape with experts, and notes."""
    wide = 3 * asked.expert_hidden // 2 if asked.gated else asked.expert_hidden
    if asked.n_dense or asked.kv_lora is not None or asked.d_model % asked.n_head:
        raise ValueError(
            f"labkit's GPT cannot stand for this shape: it has experts in every block, heads of d_model / n_head "
            f"and no latent attention; got n_dense={asked.n_dense}, kv_lora={asked.kv_lora}, d_model={asked.d_model}, "
            f"n_head={asked.n_head}. Give a shape without these"
        )
    config = GPTConfig(
        asked.n_layer, asked.d_model, asked.n_head, asked.vocab, asked.seq, _position(asked), asked.tied, 0.0,
        bias=asked.bias, n_expert=asked.n_expert, top_k=asked.top_k, expert_ff=wide, n_shared=asked.n_shared,
        capacity=asked.capacity, balance=asked.balance, kv_heads=keys,
    )  # fmt: skip
    notes = []
    if differences := _differences(asked, keys):
        n_params = ModelShape.of(config).n_params
        notes.append(
            f"labkit's GPT does not have {', nor '.join(differences)}: rehearsed is one whose experts are {wide:,} "
            f"wide, with {n_params:,} parameters in the place of {asked.n_params:,}; activations differ somewhat"
        )
    return config, (*notes, *_of_all(asked))


def _position(asked: ModelShape) -> str:
    return "rotary" if asked.position == "none" else asked.position


def _differences(asked: ModelShape, keys: int | None) -> list[str]:
    """What a shape has and labkit's GPT has not, and what is made up for by other widths."""
    differences = [
        f"a gated {'expert' if asked.n_expert else 'MLP'}" * asked.gated,
        f"{asked.kv_heads} key heads for {asked.n_head} where tp does not divide them"
        * (asked.kv_heads != (keys or asked.n_head)),
        f"heads {asked.width} wide" * (asked.n_head * asked.width != asked.d_model),
    ]
    return [*filter(None, differences)]


def _of_all(asked: ModelShape) -> list[str]:
    """Notes on what is not made up for."""
    notes = []
    if asked.norm != "layer":
        notes.append("labkit's GPT has LayerNorm without bias in place of RMSNorm: as many parameters")
    if not asked.fused_attention:
        notes.append("labkit's GPT does not write the T x T scores to memory")
    return notes
