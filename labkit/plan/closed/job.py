"""One rank of a job: its stages as tables, what it holds between two steps, micro-batches in flight, messages.

    stages      the first or second half of the blocks, say, with 1/tp of each matrix          stage.py
    base        weights, gradients that stay, the optimizer's state, masters, histories
    in flight   micro-batches that are between their forward and their backward                labkit.plan.job.stages

Sources: Rajbhandari et al., arXiv:1910.02054, section 3; Narayanan et al., arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from labkit.plan.closed.flight import Turn, fullest, turns
from labkit.plan.closed.stage import EXPERTS, Group, Stage, groups_of, stage_of
from labkit.plan.job.recipe import Recipe
from labkit.plan.job.stages import blocks_of, dense_of, setting_of
from labkit.plan.laws.precisions import HISTORY_BYTES
from labkit.plan.laws.sent_gradients import WAYS
from labkit.plan.model.expert_load import Load
from labkit.plan.model.setting import Setting, is_linear
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.buckets import Params, in_buckets
from labkit.plan.partition.groups import ParamGroup
from labkit.plan.partition.layout import Layout
from labkit.plan.partition.matrices import MatrixStep, matrices_of


@dataclass(frozen=True)
class Job:
    """One rank of a layout that trains `shape` by `recipe`."""

    shape: ModelShape
    layout: Layout
    recipe: Recipe
    rank: int
    device: str

    @cached_property
    def n(self) -> int:
        """Ranks that share a copy of what is cut."""
        return self.recipe.sharing(self.layout)

    @cached_property
    def place(self) -> int:
        """The position along pp."""
        return self.layout.coords(self.rank)["pp"]

    @cached_property
    def gathered(self) -> int:
        """Bytes of a number on the residual path between stages, and of a gathered weight."""
        return 2 if self.setting.way == "half" else self.recipe.weight_bytes

    @cached_property
    def setting(self) -> Setting:
        """The setting in which layers run."""
        part = self.layout.coords(self.rank)["dp"] % self.layout.ep
        return replace(setting_of(self.shape, self.layout, self.recipe), ep_rank=part)

    # -- stages ------------------------------------------------------------------------------------------------------

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of its stages."""
        return tuple(self.recipe.stages_on(self.place, self.layout.pp))

    def stage(self, number: int, setting: Setting) -> Stage:
        """A stage of the model, run in this setting."""
        counts = blocks_of(self.shape, self.recipe.n_stages(self.layout.pp))
        dense = dense_of(self.shape, sum(counts[:number]), counts[number]) if self.shape.n_expert else 0
        ends = number == 0, number == len(counts) - 1
        return stage_of(self.shape, setting, counts[number], *ends, dense, self.shape.tied and all(ends))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Its stages."""
        return tuple(self.stage(number, self.setting) for number in self.numbers)

    @cached_property
    def groups(self) -> tuple[tuple[Group, ...], ...]:
        """Of each stage the groups of parameters that are shared out alike."""
        r, ep = self.recipe, self.layout.ep
        return tuple(
            groups_of(
                stage, self.n, self.n // ep, ep > 1, r.gradient_bytes, r.bucket_bytes, r.grouping, "token" * stage.tied
            )
            for stage in self.stages
        )

    # -- between steps -----------------------------------------------------------------------------------------------

    def owned(self, group: Group) -> tuple[tuple[ParamGroup, int], ...]:
        """Group and elements of each tensor that an optimizer steps on."""
        return self.recipe.strategy_law.owned(group.params, group.n, self.recipe)

    def matrix_step(self, group: Group, number: int) -> MatrixStep | None:
        """An optimizer's step on the whole matrices of a group, the `number`-th of its stage; None if it needs none."""
        r, law, slot = self.recipe, self.recipe.steps_by.by_matrix, self.layout.coords(self.rank)["tp"]
        if law is None:
            return None
        n = group.n if r.cuts.state else 1
        runs: list[list[tuple[str, int]]] = [list(one.sizes) for one in group.params]
        if r.strategy_law.in_buckets:
            buckets = in_buckets(group.params, n, r.gradient_bytes, r.bucket_bytes, r.grouping)
            runs = [[pair[1:] for pair in run] for bucket in buckets for run in bucket.runs.values()]
        hidden = [[pair for pair in run if r.grouping.of_weight(pair[0]).by_matrix] for run in runs]
        matrices = [
            [matrix for name, size in run for matrix in matrices_of(self.shape, name, size, self.layout.tp)]
            for run in hidden
            if run
        ]
        if not r.cuts.state:
            matrices = [[matrix] for run in matrices for matrix in run]
        where = self.sharers(number).index(self.rank) % n
        return MatrixStep(law, matrices, n, where, self.layout.tp, slot, r.state_bytes)

    def sharers(self, part: int) -> tuple[int, ...]:
        """The ranks that have the same weights as this one: of part 1, the experts that ep deals out, or the rest."""
        if part:
            return self.layout.ranks("expert_dp", self.rank)
        return self.layout.both_ends(self.rank) if self.recipe.copies > 1 else self.layout.ranks("data", self.rank)

    def base(self) -> tuple[int, int, int, int, int]:
        """Bytes by kind between two steps.

        weights      N w,  with zero3 N/n w         gradients   with ddp N g, else 0
        state        (tensors of the optimizer + masters) x 4 a number stepped on, and Adam's count of steps"""
        r = self.recipe
        groups, wide = [group for groups in self.groups for group in groups], r.state_bytes
        owned = [size for group in groups for size in self.owned(group)]
        stepped, numel = sum(size for _, size in owned), sum(group.numel for group in groups)
        padded = numel if r.strategy == "ddp" else sum(group.padded for group in groups)
        weights = stepped * r.weight_bytes if r.cuts.weights else padded * r.weight_bytes
        gradients = 0 if r.cuts.state else numel * r.gradient_bytes
        law = r.steps_by
        state = 0
        if law.by_matrix and law.by_matrix.keeps:
            pairs = [pair for groups in self.groups for pair in enumerate(groups)]
            steps = [self.matrix_step(group, number) for number, group in pairs]
            state = sum(step.kept for step in steps if step is not None)
        for kind, size in owned:
            state += size * wide * law.beside(kind.by_matrix) + 4 * (law.adam and not kind.by_matrix)
        masters = stepped * wide
        state += masters * r.has_masters
        histories = sum(
            WAYS[r.gradients].remembered_bytes(group.numel, group.n, r.gradient_bytes)
            for group in groups
            if group.n > 1
        )
        if of_linear := HISTORY_BYTES.get(r.units):
            histories += of_linear * sum(self.linears(one) for group in groups for one in group.params)
        e, biased = self.shape.n_expert, self.shape.balance == "bias"
        layers = sum(stage.count("block") for stage in self.stages) if e else 0
        biases, counts = layers * e * max(4, r.weight_bytes) * biased, layers * e * 8 * (2 + biased)
        if not r.offload:
            return weights + biases, gradients, state, counts, histories
        shard = stepped * self.gathered if r.cuts.weights else weights
        if self.device != "cpu":
            return shard + biases, gradients, 0, counts, histories
        return shard + biases, gradients + masters, state + masters, counts, histories

    def linears(self, params: Params) -> int:
        """How many linears there are in a layer; several experts may be one row of a table."""
        expert = self.shape.d_model * self.shape.expert_hidden // self.layout.tp
        sizes = [(name, size) for name, size in params.sizes if is_linear(name)]
        return sum(size // expert if name.startswith(EXPERTS) else 1 for name, size in sizes)

    # -- micro-batches in flight -------------------------------------------------------------------------------------

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """Bytes that B keeps of a micro-batch for W, in each stage; zeros where backward is not cut in two."""
        pairs = zip(self.stages, self.numbers, strict=True)
        return tuple(self.kept_for_weights(*pair) * self.recipe.splits for pair in pairs)

    @cached_property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Of each stage the bytes of a micro-batch in flight, and what one that waits for W holds more: B frees the
        loss's."""
        losses = [sum(one.held for one in stage.layers if one.kind == "loss") for stage in self.stages]
        rows = zip(self.stages, self.kept, losses, strict=True)
        return tuple((stage.held, kept - loss if kept else 0) for stage, kept, loss in rows)

    @cached_property
    def turns(self) -> list[Turn]:
        """The fullest moments of its program."""
        r = self.recipe
        program = turns(r.schedule, self.layout.pp, r.n_micro, r.stages_per_rank, self.place)
        return fullest(program, self.sizes, self.boundary, r.strategy == "zero1" or r.gradients != "exact")

    def kept_for_weights(self, stage: Stage, number: int) -> int:
        """Bytes that B keeps of a micro-batch for W: the gradient that arrives at each product and norm, as wide as a
        weight, and what B has computed again. 0 on the first stage, where W does the whole backward."""
        if number == 0:
            return 0
        shape, s, d, tp, wide = self.shape, self.setting, self.shape.d_model, self.layout.tp, self.recipe.weight_bytes
        tokens, dense = s.rows * s.seq, 4 * d + (3 * d + self.shape.hidden) // tp
        arrived = tokens * (stage.count("dense") * dense + stage.count("head") * (d + shape.vocab // tp)) * wide
        block = tokens * dense * wide
        if shape.n_expert:
            hidden, here = shape.expert_hidden // tp * (2 if shape.gated else 1), shape.n_expert // s.ep
            table, first = Load.of(shape).table(s.rows, s.seq, s.ep), s.ep_rank * here
            rows = sum(sum(row[first : first + here]) for row in table)
            shared = tokens * (shape.n_shared * hidden + d * (shape.n_shared > 0))
            block = (tokens * (3 * d + 3 * d // tp) + rows * (hidden + d) + shared) * wide
            block += tokens * shape.n_expert * max(4, wide)
        again = self.stage(number, replace(self.setting, recompute="none")).held - stage.held
        return arrived + stage.count("block") * block + again

    # -- messages ----------------------------------------------------------------------------------------------------

    @cached_property
    def boundary(self) -> int:
        """Bytes of one micro-batch's activation between two stages."""
        rows = self.setting.rows * self.setting.seq // (self.layout.tp if self.setting.in_sequence else 1)
        return rows * self.shape.d_model * self.gathered

    @property
    def cut_rows(self) -> int:
        """Bytes of this rank's tokens and targets of a step, which are taken out of the batch where cp cuts rows."""
        return 2 * 8 * (self.recipe.batch_size // self.layout.dp) * self.setting.seq * (self.layout.cp > 1)
