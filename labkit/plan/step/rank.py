"""What one rank has of a model: its stages, the strategy around each, what it holds between two steps.

    stages       the first or second half of the blocks, say, with 1/tp of each matrix         partition/stage.py
    groups       of each stage the parameters that are shared out over the same ranks: all, or with ep experts and rest
    base         weights, gradients that stay, the optimizer's state, masters, histories
    turns        micro-batches that are between their forward and their backward                 job/turns.py

`bounds` says cheaply between which numbers the highest moment lies; labkit.plan.step.memory looks for that moment.

Long because all that is asked of a rank stands in one place, with what it shares with ranks of other recipes.

Sources: Rajbhandari et al., arXiv:1910.02054, section 3; Narayanan et al., arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

from labkit.plan.job.recipe import Recipe
from labkit.plan.job.stages import blocks_of, check_plan, dense_of, fullest_places, pairs_in_flight, setting_of
from labkit.plan.job.turns import Turn, fullest, turns
from labkit.plan.laws.precisions import HISTORY_BYTES
from labkit.plan.laws.sent_gradients import WAYS
from labkit.plan.laws.strategy import Amounts
from labkit.plan.model.expert_load import Load
from labkit.plan.model.setting import Setting, is_linear
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.groups import Grouping, ParamGroup
from labkit.plan.partition.layout import Layout
from labkit.plan.partition.matrices import MatrixLaw, MatrixStep, matrices_of
from labkit.plan.partition.stage import EXPERTS, RankParameters, ShardedParameters, StageTable, groups_of, stage_of
from labkit.plan.step.optimizer_moments import Sum, of_optimizer
from labkit.plan.step.strategy_bytes import StrategyBytes

T = TypeVar("T")


class lasting(Generic[T]):
    """A property of a rank that is worked out once, and depends on neither the rows of a micro-batch nor on what runs
    again in backward: all ranks that have the same `like` share it."""

    link = "like"

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __get__(self, rank: Any, owner: type[Any] | None = None) -> T:
        shared, name = getattr(rank, self.link), self.function.__name__
        if name not in shared:
            shared[name] = self.function(rank)
        value: T = shared[name]
        vars(rank)[name] = value  # where the next look finds it before it comes here
        return value


class running(lasting[T]):
    """The same of what depends on its micro-batches, and not on the strategy of data parallelism: all ranks that have
    the same `runs` share it."""

    link = "runs"


class StateBounds(NamedTuple):
    """Bytes that bound what a rank holds, whatever micro-batches are in flight.

    least    what is there all the time;   comes    what the strategy holds at most besides
    beside   copies of weights, and a tied head's gradients, during a pass
    step     what is held at most during the optimizer's step, when no pass goes on"""

    least: int
    comes: int
    beside: int
    step: int


@dataclass(frozen=True)
class Rank:
    """One rank of a layout that trains `shape` by `recipe`, on a `device`. ValueError for what cannot be cut or run.

    A search tries many recipes, and what two of them have in common is not worked out again:
    `like`: what is known of this rank by recipes that differ in `n_micro` and `recompute` alone (`Recipe.lasting`)
    `runs`: the same by recipes that differ in the strategy of data parallelism alone (`Recipe.running`)"""

    shape: ModelShape
    layout: Layout
    recipe: Recipe
    rank: int
    device: str
    like: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    runs: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.like or not self.runs:  # each of the two has been checked for its own choices
            check_plan(self.shape, self.recipe, self.layout)
        if not self.like:
            self.layout.coords(self.rank)

    @lasting
    def coords(self) -> dict[str, int]:
        """Its position along each axis."""
        return self.layout.coords(self.rank)

    @lasting
    def n(self) -> int:
        """Ranks that share a copy of what is cut."""
        return self.recipe.sharing(self.layout)

    @running
    def setting(self) -> Setting:
        """The setting in which its layers run."""
        return setting_of(self.shape, self.layout, self.recipe, self.coords["dp"] % self.layout.ep)

    # -- stages ------------------------------------------------------------------------------------------------------

    @lasting
    def blocks(self) -> tuple[int, ...]:
        """Blocks of each stage of the model."""
        return blocks_of(self.shape, self.recipe.n_stages(self.layout.pp))

    @lasting
    def numbers(self) -> range:
        """The numbers of its stages."""
        return self.recipe.stages_on(self.coords["pp"], self.layout.pp)

    @running
    def stages(self) -> tuple[StageTable, ...]:
        """Its stages."""
        return _stages(self.shape, self.blocks, self.numbers, self.setting)

    @lasting
    def parameters(self) -> RankParameters:
        """The parameters of its stages."""
        r, s = self.recipe, self.setting
        runs = s.seq, s.tp, s.in_sequence, s.ep, s.cp, s.context
        return _parameters(
            self.shape, self.blocks, self.numbers, runs, self.n, r.gradient_bytes, r.bucket_bytes, r.grouping
        )

    @property
    def groups(self) -> tuple[tuple[ShardedParameters, ...], ...]:
        """Of each stage the groups of parameters that are shared out alike."""
        return self.parameters.stages

    @property
    def numel(self) -> int:
        """Elements of its parameters."""
        return self.parameters.numel

    # -- between steps -----------------------------------------------------------------------------------------------

    def owned(self, place: int | None = None) -> list[tuple[ParamGroup, int]]:
        """Parameter group and elements of each tensor that its optimizers step on; `place`: only those of the groups at
        this place, 1 for experts that ep deals out."""
        law = self.recipe.strategy_law
        return [pair for _, group in self._groups_at(place) for pair in law.owned(group)]

    def _groups_at(self, place: int | None) -> list[tuple[int, ShardedParameters]]:
        return [pair for groups in self.groups for pair in enumerate(groups) if place in (None, pair[0])]

    def matrix_steps(self, place: int | None = None) -> list[MatrixStep]:
        """The optimizer's steps on whole matrices, one for each group, or for each at this `place` of its stage; [] for
        an optimizer that needs none whole."""
        steps = [self.matrix_step(*pair) for pair in self._groups_at(place)]
        return [step for step in steps if step is not None]

    def matrix_step(self, place: int, group: ShardedParameters) -> MatrixStep | None:
        """The step on the whole matrices of one group, at this `place` of its stage; None if the optimizer needs none
        whole."""
        r, tp, law = self.recipe, self.layout.tp, self.recipe.steps_by.by_matrix
        if law is None:
            return None
        n = group.n if r.cuts.state else 1
        where = n, self.sharers(place).index(self.rank) % n, tp, self.coords["tp"]
        return _matrix_step(law, self.shape, group, r.strategy_law.in_buckets, r.cuts.state, where, r.state_bytes)

    def sharers(self, part: int) -> tuple[int, ...]:
        """The ranks that have the same weights as this one: of part 1, the experts that ep deals out, or the rest."""
        if part:
            return self.layout.ranks("expert_dp", self.rank)
        return self.layout.both_ends(self.rank) if self.recipe.copies > 1 else self.layout.ranks("data", self.rank)

    def base(self) -> tuple[int, int, int, int, int]:
        """Bytes by kind between two steps: parameters, gradients, optimizer, activations, other."""
        return self.between_steps

    @lasting
    def between_steps(self) -> tuple[int, int, int, int, int]:
        """The same, worked out once.

        weights      N w,  with zero3 N/n w         gradients   with ddp N g, else 0
        state        (tensors of the optimizer + masters) x 4 a number stepped on, and Adam's count of steps

        With offloading, masters and the gradients that were copied for them count where the CPU is the device; a ZeRO-3
        shard is then only the source of gathers, in the gathered width."""
        r, owned = self.recipe, self.owned()
        stepped = sum(size for _, size in owned)
        padded = self.parameters.padded if r.cuts.state else self.numel
        weights = (stepped if r.cuts.weights else padded) * r.weight_bytes
        gradients = 0 if r.cuts.state else self.numel * r.gradient_bytes
        law, state, wide = r.steps_by, sum(step.kept for step in self.matrix_steps()), r.state_bytes
        for (kind, size), count in Counter(owned).items():  # blocks are alike, and so are their parameters
            one = law.beside_bytes(size, wide, kind.by_matrix) + 4 * (law.adam and not kind.by_matrix)
            state += count * one
        masters, histories = stepped * r.state_bytes, self.remembered()
        if of_linear := HISTORY_BYTES.get(r.units):
            histories += of_linear * sum(self.linears(*pair) for stage in self.stages for pair in stage.weights)
        biases, counts = self.balance()
        if not r.offload:
            return weights + biases, gradients, state + masters * r.has_masters, counts, histories
        shard = (stepped * r.gathered_bytes if r.cuts.weights else weights) + biases
        if self.device != "cpu":
            return shard, gradients, 0, counts, histories
        return shard, gradients + masters, state + masters, counts, histories

    def linears(self, name: str, size: int) -> int:
        """How many linears these weights are: several where experts are one row of a table, 0 if they are none."""
        one = self.shape.d_model * self.shape.expert_hidden // self.layout.tp if name.startswith(EXPERTS) else size
        return size // one * is_linear(name)

    def remembered(self) -> int:
        """Bytes of what was cut off from gradients that travel in 8 bits (labkit.parallel.eight_bit_gradients)."""
        way, groups = WAYS[self.recipe.gradients], self.parameters.groups
        return sum(way.remembered_bytes(group.numel, group.n, group.sums) for group in groups if group.n > 1)

    def balance(self) -> tuple[int, int]:
        """Bytes of what keeps experts balanced: of the biases, and of the rows by expert, 8 bytes each: those of the
        last forward and of the step so far; with biases those of all ranks, too."""
        e, biased = self.shape.n_expert, self.shape.balance == "bias"
        layers = sum(stage.count("block") for stage in self.stages) if e else 0
        return layers * e * max(4, self.recipe.weight_bytes) * biased, layers * e * 8 * (2 + biased)

    # -- micro-batches in flight -------------------------------------------------------------------------------------

    @cached_property
    def turns(self) -> list[Turn]:
        """The fullest moments of its program."""
        r, law = self.recipe, self.recipe.strategy_law
        program = turns(r.schedule, self.layout.pp, r.n_micro, r.stages_per_rank, self.coords["pp"])
        cuts = law.cuts.state
        last_differs = not law.every_pass_sends and (cuts or WAYS[r.gradients].coding_bytes > 0)
        return fullest(program, self.sizes, self.boundary, cuts, last_differs, law.cuts.weights)

    @running
    def kept(self) -> tuple[int, ...]:
        """Bytes that B keeps of a micro-batch for W, in each stage; zeros where backward is not cut in two."""
        if not self.recipe.splits:
            return (0,) * len(self.stages)
        return tuple(map(self.kept_for_weights, self.stages, self.numbers))

    @running
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Of each stage the bytes of a micro-batch in flight, and what one that waits for W holds more: B frees the
        loss's."""
        pairs = zip(self.stages, self.kept, strict=True)
        return tuple((stage.held, kept - stage.held_by_loss if kept else 0) for stage, kept in pairs)

    def kept_for_weights(self, stage: StageTable, number: int) -> int:
        """Bytes that B keeps of a micro-batch for W: the gradient that arrives at each product and norm, as wide as a
        weight (under autocast some are narrower), and what B has computed again.

        0 on the first stage, where W does the whole backward (labkit.parallel.pipeline)."""
        if number == 0:
            return 0
        shape, d, tp, wide = self.shape, self.shape.d_model, self.layout.tp, self.recipe.weight_bytes
        tokens, dense = self.setting.rows * self.setting.seq, 4 * d + (3 * d + shape.hidden) // tp
        arrived = tokens * (stage.count("dense") * dense + stage.count("head") * (d + shape.vocab // tp)) * wide
        block = tokens * dense * wide
        if shape.n_expert:
            block = tokens * (3 * d + 3 * d // tp) * wide + self.arrived_in_mixture()
        without = replace(self.setting, recompute="none")
        rerun = _stages(shape, self.blocks, range(number, number + 1), without)[0].held - stage.held
        return arrived + stage.count("block") * block + rerun

    def arrived_in_mixture(self) -> int:
        """Bytes of the gradients that arrive at the router and at the linears of a mixture, with a balanced load."""
        shape, s, d, wide = self.shape, self.setting, self.shape.d_model, self.recipe.weight_bytes
        hidden, n_local = shape.expert_hidden // s.tp * (2 if shape.gated else 1), shape.n_expert // s.ep
        table, first, tokens = Load.of(shape).table(s.rows, s.seq, s.ep), s.ep_rank * n_local, s.rows * s.seq
        rows = sum(sum(row[first : first + n_local]) for row in table)
        shared = tokens * (shape.n_shared * hidden + d * (shape.n_shared > 0))
        return (rows * (hidden + d) + shared) * wide + tokens * shape.n_expert * max(4, wide)

    def in_flight_bytes(self) -> int:
        """Activations of all micro-batches in flight, and what those between B and W have kept for W."""
        return self.turns_in_flight if self.recipe.schedule_law.held is None else self.held_in_flight

    @cached_property
    def turns_in_flight(self) -> int:
        """Those of the fullest turn of its program, whose place in it depends on the strategy, too."""
        return max(turn.weigh(self.sizes, 0) + self.kept[turn.stage] * (turn.kind == "B") for turn in self.turns)

    @running
    def held_in_flight(self) -> int:
        """Those by the law of its schedule."""
        r, place = self.recipe, self.coords["pp"]
        rows = zip(pairs_in_flight(r, self.layout, place), self.sizes, strict=True)
        waiting = min(place, r.n_micro - 1) * r.splits
        return sum(held * n_bytes + waiting * wait for held, (n_bytes, wait) in rows) + max(self.kept)

    # -- messages ----------------------------------------------------------------------------------------------------

    @running
    def boundary(self) -> int:
        """Bytes of one micro-batch's activation between two stages."""
        rows = self.setting.rows * self.setting.seq // (self.layout.tp if self.setting.in_sequence else 1)
        return rows * self.shape.d_model * self.recipe.gathered_bytes

    @lasting
    def cut_rows(self) -> int:
        """Bytes of this rank's tokens and targets of a step, which are taken out of the batch where cp cuts rows."""
        return 2 * 8 * (self.recipe.batch_size // self.layout.dp) * self.setting.seq * (self.layout.cp > 1)

    # -- bounds ------------------------------------------------------------------------------------------------------

    def bounds(self) -> tuple[int, int]:
        """Bytes between which the highest moment lies, without a look at the moments: a search asks thousands of
        plans."""
        state, in_flight = self.state_bounds, self.in_flight_bytes()
        least, passes = state.least + in_flight, self.pass_bound + state.beside
        # no pass goes on while it steps
        return least, least + state.comes + max(passes, state.step - in_flight) + self.cut_rows

    @property
    def step_bound(self) -> int:
        """Bytes that no moment of the optimizer's step exceeds."""
        state = self.state_bounds
        return state.least + state.comes + state.step + self.cut_rows

    @running
    def pass_bound(self) -> int:
        """Bytes that no pass of a micro-batch holds more of, besides those in flight: its layers', and messages."""
        schedule = self.recipe.schedule_law
        forward, backward = map(max, zip(*(stage.highest for stage in self.stages), strict=True))
        if self.layout.pp > 1:
            ways = 4 if schedule.held is None else 2 * schedule.messages
            ways += self.recipe.n_micro * schedule.unanswered + 2 * schedule.splits
            backward += ways * self.boundary
            # nothing has come back yet while a pipeline fills: each micro-batch in flight has left a message behind
            forward += sum(pairs_in_flight(self.recipe, self.layout, self.coords["pp"])) * self.boundary
        return max(forward, backward)

    @lasting
    def state_bounds(self) -> StateBounds:
        """Those of them that hold for all micro-batches."""
        r, n, w, numel = self.recipe, self.n, self.recipe.weight_bytes, self.numel
        law, states = r.steps_by.by_matrix, r.steps_by.beside(True)
        steps = self.matrix_steps() if law and law.keeps else []
        owned = self.parameters.shared if r.cuts.state else numel
        away = r.offload and self.device != "cpu"
        beside = r.steps_by.beside_bytes(owned, r.state_bytes, True)
        state = 0 if away else beside + owned * r.state_bytes * (2 * r.offload + r.has_masters)
        shard = owned * (r.gathered_bytes if r.offload else w)
        state += sum(step.kept for step in steps)
        least = (shard if r.cuts.weights else numel * w) + state
        least += 0 if r.cuts.state else numel * r.gradient_bytes  # those that nothing cuts are always there
        unit, param = self.parameters.largest
        groups = 1 + (self.layout.ep > 1)
        amounts = Amounts(numel, owned, unit, param, groups, groups * (len(self.numbers) - 1), r.gathered_bytes)
        copies = 2 * numel if self.setting.way == "autocast" else 0
        tied = 3 * self.shape.vocab * self.shape.d_model * w * any(stage.tied for stage in self.stages)
        step = (2 + r.has_masters) * owned * r.state_bytes + 8 * 20 * (self.shape.n_layer + 2) * n
        if law:  # what AdamW keeps more of the rest; pieces, whole matrices and products of them
            step += ((r.steps_by.elementwise - states) * owned + 8 * param * self.layout.tp) * r.state_bytes
            step += max((step.temporaries(not r.cuts.state) for step in steps), default=0)
        return StateBounds(least + self.remembered(), r.strategy_law.most(amounts, r), copies + tied, step)

    @lasting
    def optimizer_moments(self) -> tuple[Sum, ...]:
        """The moments of its optimizer's step that may be the highest."""
        return tuple(of_optimizer(self.recipe, self.groups, self.device, self.cut_rows, self.matrix_step))

    @lasting
    def strategies(self) -> StrategyBytes:
        """The bytes that its data-parallel strategies hold during each turn of a step, beyond those that stay
        between two steps."""
        return StrategyBytes(self.recipe, self.groups)


@lru_cache(maxsize=4096)
def _stages(shape: ModelShape, blocks: tuple[int, ...], numbers: range, setting: Setting) -> tuple[StageTable, ...]:
    """The stages of these numbers, run in this setting; `blocks` of each stage into which the model is cut."""
    stages = []
    for number in numbers:
        count, before = blocks[number], sum(blocks[:number])
        dense = dense_of(shape, before, count) if shape.n_expert else 0
        ends = number == 0, number == len(blocks) - 1
        stages.append(stage_of(shape, setting, count, *ends, dense, shape.tied and all(ends)))
    return tuple(stages)


@lru_cache(maxsize=4096)
def _parameters(
    shape: ModelShape, blocks: tuple[int, ...], numbers: range, runs: tuple[int, int, bool, int, int, str], n: int,
    sums: int, bucket_bytes: int, grouping: Grouping,
) -> RankParameters:  # fmt: skip
    """The parameters of the stages of these numbers: those of one row in fp32, since they are as many in every setting.
    `runs`: seq, tp, in_sequence, ep, cp and context of it; the rest as in ShardedParameters."""
    seq, tp, in_sequence, ep, cp, context = runs
    plain = Setting(1, seq, tp, in_sequence, ep=ep, cp=cp, context=context)
    how = n, n // ep, ep > 1, sums, bucket_bytes, grouping
    stages = _stages(shape, blocks, numbers, plain)
    return RankParameters(tuple(groups_of(stage, *how, "token" * stage.tied) for stage in stages))


@lru_cache(maxsize=1024)
def _matrix_step(
    law: MatrixLaw, shape: ModelShape, group: ShardedParameters, in_buckets: bool, cut: bool,
    where: tuple[int, int, int, int], wide: int,
) -> MatrixStep:  # fmt: skip
    """The step on the matrices of a group; `where`: n, place, tp and slot of MatrixStep."""
    runs: Sequence[Sequence[tuple[str, int]]] = [one.sizes for one in group.params]
    if in_buckets:
        runs = [bucket.sizes for bucket in group.buckets]
    hidden = [[pair for pair in run if group.grouping.of_weight(pair[0]).by_matrix] for run in runs]
    buffers = [
        [matrix for name, size in run for matrix in matrices_of(shape, name, size, where[2])] for run in hidden if run
    ]
    if not cut:
        buffers = [[matrix] for buffer in buffers for matrix in buffer]
    return MatrixStep(law, buffers, *where, wide)


def fullest_ranks(shape: ModelShape, layout: Layout, recipe: Recipe) -> list[int]:
    """Some ranks of which one holds most: of each place in the pipeline that may be the fullest (stages.py) the rank
    that keeps most as an owner of whole matrices, if the optimizer keeps anything there."""
    ranks, law = fullest_places(shape, layout, recipe), recipe.steps_by.by_matrix
    if law is None or not law.keeps:
        return ranks
    owners = []
    for rank in ranks:
        local, kept = Rank(shape, layout, recipe, rank, "cpu"), Counter[int]()
        for part in (0, 1):
            places = [layout.coords(sharer) for sharer in local.sharers(part)]
            for step in local.matrix_steps(part):
                kept.update(
                    {layout.rank(**places[n] | {"tp": slot}): size for (n, slot), size in step.kept_by_all.items()}
                )
        owners.append(max(kept, key=lambda owner: (kept[owner], -owner), default=rank))
    return owners
