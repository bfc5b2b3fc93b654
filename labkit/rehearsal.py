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
from labkit.parallel.pipeline import action_of_tag
from labkit.plan.layout import Layout
from labkit.plan.memory import predict_memory
from labkit.plan.recipe import Recipe, check
from labkit.plan.shape import ModelShape
from labkit.probe.rehearsal import Rehearsal, run_fake
from labkit.train.config import GPTConfig


def rehearse(shape: ModelShape | GPTConfig | str, layout: Layout, recipe: Recipe, rank: int = 0) -> Rehearsal:
    """Measure the second training step of `rank` without the other ranks and without the memory.

    `shape` is a ModelShape, a GPTConfig or a preset's name ("llama-70b"). What labkit's GPT does not have (SwiGLU,
    grouped queries) is replaced by a GPT of as many parameters and flops; `notes` of the result say so. The batch is
    not counted. ValueError, before anything runs, for what cannot be cut or run, and for a rank that is not there."""
    config, notes = as_gpt(shape)
    check(config, recipe, layout)
    if not 0 <= rank < layout.size:
        raise ValueError(f"{layout} has ranks 0 to {layout.size - 1}, got rank={rank}")
    predicted = predict_memory(config, layout, recipe, rank)

    def batch(group: Group) -> Tensor:
        return torch.zeros(recipe.batch_size // layout.dp, config.seq, dtype=torch.int64)

    def setup(group: Group, tokens: Tensor) -> TrainStep:
        step = assemble(config, recipe, Mesh.connect(layout, group))
        step(tokens, tokens, 0)
        return step

    def measured(group: Group, step: TrainStep, tokens: Tensor) -> None:
        step(tokens, tokens, 1)

    rows = [len(run) for run in range_of(recipe.batch_size // layout.dp, recipe.n_micro)]
    rehearsal = run_fake(
        measured, layout.size, rank, setup=setup, inputs=batch, hear=Boundary(config, layout, recipe, rows)
    )
    return replace(rehearsal, predicted=predicted, notes=notes)


class Boundary:
    """The messages between stages of a pipeline: a micro-batch's activation, or its gradient.   [rows, T, D]"""

    def __init__(self, config: GPTConfig, layout: Layout, recipe: Recipe, rows: Sequence[int]) -> None:
        """`rows` of each micro-batch; T is cut by cp and by sequence parallelism. A stream of activations is in fp32
        under autocast, which rounds only what goes into products, and in half precision where ZeRO-3 gathers in it."""
        self.rows, self.n_micro = rows, recipe.n_micro
        self.length = config.seq // layout.cp // (layout.tp if recipe.sequence_parallel else 1)
        self.width = config.d_model
        wide = WEIGHTS[recipe.precision]
        self.dtype = PRODUCTS.get(recipe.precision, wide) if recipe.strategy == "zero3" else wide

    def __call__(self, axis: str, source: int, tag: int) -> Tensor | None:
        """The message of this tag on the pipeline's axis; None on other axes, where no messages are sent."""
        if axis != "pp":
            return None
        return torch.empty(self.rows[action_of_tag(tag, self.n_micro).micro], self.length, self.width, dtype=self.dtype)


def range_of(rows: int, parts: int) -> list[range]:
    """`rows` in `parts` runs, the first ones longer by one: as tensor_split cuts."""
    size, more = divmod(rows, parts)
    starts = [k * size + min(k, more) for k in range(parts + 1)]
    return [range(low, high) for low, high in zip(starts, starts[1:], strict=False)]


def as_gpt(shape: Any) -> tuple[GPTConfig, tuple[str, ...]]:
    """The GPT that stands for a shape, and notes that say what it lacks of that shape.

    Where attention or the MLP is of another kind, the hidden width is chosen such that a block has as many parameters,
    and so as many flops, as the shape's:  2 D F' = (2 or 3) D F + 2 D A + 2 D K - 4 D D.  ValueError if that leaves
    none."""
    if isinstance(shape, GPTConfig):
        return shape, ()
    asked = ModelShape.preset(shape) if isinstance(shape, str) else ModelShape.of(shape)
    d, a, k = asked.d_model, asked.n_head * asked.width, asked.kv_heads * asked.width
    hidden = (3 if asked.gated else 2) * asked.hidden / 2 + a + k - 2 * d
    if hidden < 1 or hidden != int(hidden) or d % asked.n_head:
        raise ValueError(
            f"labkit's GPT cannot stand for this shape: with heads of d_model / n_head = {d} / {asked.n_head} and as "
            f"many parameters, its hidden width would be {hidden:g}. Give a shape of its kind, ModelShape.gpt(...)"
        )
    notes = []
    differences = [
        "a gated MLP" * asked.gated,
        f"{asked.kv_heads} key heads for {asked.n_head}" * (asked.kv_heads != asked.n_head),
        f"heads {asked.width} wide" * (a != d),
    ]
    if any(differences):
        notes.append(
            f"labkit's GPT does not have {', nor '.join(filter(None, differences))}: rehearsed is one whose MLP is "
            f"{int(hidden):,} wide, with as many parameters and flops a block; activations differ somewhat"
        )
    if asked.norm != "layer":
        notes.append("labkit's GPT has LayerNorm without bias in place of RMSNorm: as many parameters")
    if not asked.fused_attention:
        notes.append("labkit's GPT does not write the T x T scores to memory")
    position = "rotary" if asked.position == "none" else asked.position
    config = GPTConfig(
        asked.n_layer, d, asked.n_head, asked.vocab, asked.seq, position, asked.tied, 0.0, int(hidden), asked.bias
    )
    return config, tuple(notes)
