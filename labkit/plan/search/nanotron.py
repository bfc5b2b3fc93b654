"""What nanotron holds in the runs of the Ultra-Scale Playbook: labkit's own prediction, with nanotron's buffers.

    bytes of N parameters on a rank       labkit                          nanotron
    weights, bf16                         2 N                             2 N
    gradients, added up in fp32           4 N, ZeRO-1: 4 N/n in the end   4 N all the time, ZeRO-1 too
    torch's DDP buckets, bf16             none: the sums are the buckets  2 N, where dp > 1
    gradients of one backward, bf16       one at a time                   2 N at its end: all, then they are added up
    masters and moments                   12 N, ZeRO-1: 12 N/n            the same; its fused AdamW has no temporaries
    new weights, gathered by ZeRO-1       bucket by bucket                2 N + 2 N/n at once
    blocks on each stage                  as fast as can be               the first stages get one more: `front_loaded`
    what sequence parallelism gathers     kept, or gathered again         the same two, and the table does not say which

The published column of memory counts in GiB, though it is headed GB. An 8B model on tp=8 shows it: less what grows with
the micro-batch, it holds 18 N with dp=1, and with dp=2 the buckets' 2 N more. With 2^30 bytes a unit these come out as
18 and 1.94, with 10^9 as 16.8 and 1.81.

Two settings are mixed in the table. Its generator skips what has run before, but for pipelines, which it ran again with
newer code, and nanotron has had `tp_recompute_allgather` since then, which is on unless somebody turns it off. So runs
without a pipeline mostly keep what was gathered, and pipelines on many nodes mostly do not. `settings` has the bytes
of both, and `likely` the one of that rule. (The generator also varies `tp_mode`, which the table does not have either:
some runs of the 1B model without a pipeline hold as much as without sequence parallelism.)

Sources: huggingface/nanotron, scripts/scaling_benchmarks.py (generator), optim/gradient_accumulator.py, optim/zero.py,
parallel/tensor_parallel/functional.py, pull request 208; Rajbhandari et al., arXiv:1910.02054, section 5.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from labkit.plan.job.recipe import Recipe
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.step.memory import MicroBatchPass, of_passes
from labkit.plan.step.rank import Rank

NODE = 8
"""GPUs of one of the playbook's nodes."""
KEPT, AGAIN = "kept", "gathered again"
"""What becomes of an input that sequence parallelism gathers: kept for backward, or gathered again there."""
RESERVED = 1.04
"""What the allocator reserves, over what it hands out: the median of the runs that were fitted to."""


def front_loaded(shape: ModelShape, n_stages: int) -> tuple[int, ...]:
    """Blocks of each stage: a stage is closed by the block with which all blocks so far exceed its share of the work.

    The head counts as work, so the last stages have fewer blocks: 9 9 8 6 for 32 blocks and a head of 2.2 blocks."""
    sizes = shape.parameters
    block = (sizes["attention"] + sizes["mlp"]) / shape.n_layer
    share = (block * shape.n_layer + shape.vocab * shape.d_model) / n_stages
    counts, stage = [0] * n_stages, 0
    for index in range(1, shape.n_layer + 1):
        counts[stage] += 1
        if index * block > share * (stage + 1) and stage < n_stages - 1:
            stage += 1
    return tuple(counts)


def settings(shape: ModelShape, layout: Layout, recipe: Recipe) -> dict[str, int]:
    """Bytes that the allocator of the fullest rank reserves, in each of the two settings.

    ValueError for a layout that labkit cannot run either."""
    recomputed = replace(recipe, recompute="gathers") if recipe.sequence_parallel else recipe
    return {KEPT: _fullest(shape, layout, recipe), AGAIN: _fullest(shape, layout, recomputed)}


def likely(layout: Layout) -> str:
    """The setting that the rule takes: pipelines with two nodes a stage and more let go of what was gathered."""
    return AGAIN if layout.pp > 1 and layout.size >= 2 * NODE * layout.pp else KEPT


def _fullest(shape: ModelShape, layout: Layout, recipe: Recipe) -> int:
    """The fullest of the first rank of each kind of stage, and of the last stage."""
    counts = front_loaded(shape, layout.pp)
    places = {counts.index(count) for count in counts if count} | {0, layout.pp - 1}
    return round(RESERVED * max(_peak(shape, layout, recipe, place) for place in places))


def _peak(shape: ModelShape, layout: Layout, recipe: Recipe, place: int) -> int:
    """Bytes of the rank at `place` of the pipeline. Gradients stay whole and in place, which is what labkit's DDP
    does."""
    rank = _Rank(shape, layout, replace(recipe, strategy="ddp"), place * layout.tp, "cuda")
    return rank.peak_bytes(layout.dp if recipe.cuts.state else 1)


class _Rank(Rank):
    """One rank of nanotron: its stages, and its buffers between two steps."""

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of each stage."""
        return front_loaded(self.shape, self.recipe.n_stages(self.layout.pp))

    def peak_bytes(self, shards: int) -> int:
        """Bytes at the highest moment, where `shards` ranks share the optimizer's state: labkit's moments, the end of a
        backward, where all its gradients are there, in bf16, and ZeRO-1's gather of all new weights at once."""
        n_bytes = 2 * self.numel
        base = n_bytes + 4 * self.numel + 12 * self.numel // shards + n_bytes * (self.layout.dp > 1)
        backwards = [MicroBatchPass(self, turn) for turn in self.turns if turn.kind == "B"]
        ends = [n_bytes + one.others + one.waits for one in backwards]
        gather = (n_bytes + n_bytes // shards) * (shards > 1)
        return base + max(gather, *ends, of_passes(self).total)
