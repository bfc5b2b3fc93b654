"""What one rank has of a model: its stages, the strategy around each, what it holds between two steps.

    stages       the first or second half of the blocks, say, with 1/tp of each matrix          stage_profile.py
    keepers      around each stage, what its strategy holds of weights and gradients            laws/keeper.py
    owned        what this rank's optimizer steps on, and keeps its state for
    parts        with ep, the experts of a stage and all else: they are shared in different groups  laws/keeper_pair.py
    in flight    micro-batches that are between their forward and their backward                stages.py

`bounds` says cheaply between which numbers the highest moment lies; labkit.plan.step.memory finds it exactly.
Sources: Rajbhandari et al., arXiv:1910.02054, section 3; Narayanan et al., arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property, lru_cache

from labkit.plan.job.recipe import Recipe
from labkit.plan.job.stages import (
    blocks_of,
    check_plan,
    dense_of,
    fullest,
    fullest_moments,
    pairs_in_flight,
    setting_of,
)
from labkit.plan.laws.keeper import Keeper
from labkit.plan.laws.keeper_pair import KeeperPair
from labkit.plan.laws.precisions import HISTORY_BYTES
from labkit.plan.laws.sent_gradients import WAYS
from labkit.plan.laws.strategy import Amounts
from labkit.plan.model.expert_load import Load
from labkit.plan.model.ops import Setting, is_linear
from labkit.plan.model.shape import ModelShape
from labkit.plan.model.tape import ACTIVATIONS, Bytes
from labkit.plan.partition.buckets import Params, in_buckets
from labkit.plan.partition.groups import Grouping, ParamGroup
from labkit.plan.partition.layout import Layout
from labkit.plan.partition.matrices import MatrixLaw, MatrixStep, matrices_of
from labkit.plan.partition.stage_profile import EXPERTS, Stage, stage_of


class Rank:
    """One rank of a layout. Raises ValueError for what cannot be cut or run."""

    def __init__(self, shape: ModelShape, layout: Layout, recipe: Recipe, rank: int, device: str) -> None:
        check_plan(shape, recipe, layout)
        self.shape, self.layout, self.recipe, self.device = shape, layout, recipe, device
        self.rank, self.coords, self.n = rank, layout.coords(rank), recipe.sharing(layout)
        self.law = recipe.strategy_law
        self.place = self.coords["pp"]
        self.n_experts = self.n // layout.ep  # ranks that share the state of this rank's experts
        self.setting = replace(setting_of(shape, layout, recipe), ep_rank=self.coords["dp"] % layout.ep)
        way = self.setting.way
        self.width, self.sums = recipe.weight_bytes, recipe.gradient_bytes
        self.gathered = 2 if way == "half" else self.width
        n_stages = recipe.n_stages(layout.pp)
        self.counts = self.cut(n_stages)
        numbers = recipe.stages_on(self.place, layout.pp)
        self.stages = [self.stage(number, self.setting) for number in numbers]
        self.tied = shape.tied and n_stages == 1
        self.in_flight, self.done = pairs_in_flight(recipe, layout, self.place), [0] * len(numbers)
        self.newest: int | None = None
        self.done_before = self.done  # as the fullest forward begins
        self.forward_bytes = sum(n * stage.held for n, stage in zip(self.in_flight, self.stages, strict=True))
        self.backward_bytes = [self.forward_bytes] * len(numbers)
        self.for_weights = [0] * len(numbers)
        if recipe.splits:
            self.for_weights = list(map(self.kept_for_weights, self.stages, numbers))
            self.find_fullest()

    def stage(self, number: int, setting: Setting) -> Stage:
        """A stage of this model, run in this setting."""
        shape, count = self.shape, self.counts[number]
        dense = dense_of(shape, sum(self.counts[:number]), count) if shape.n_expert else 0
        return stage_of(shape, setting, count, number == 0, number == len(self.counts) - 1, dense)

    def cut(self, n_stages: int) -> tuple[int, ...]:
        """Blocks of each stage."""
        return blocks_of(self.shape, n_stages)

    @cached_property
    def keepers(self) -> list[Keeper]:
        """One strategy around each stage."""
        return [self.keeper(stage) for stage in self.stages]

    def parts(self, stage: Stage) -> list[tuple[Stage, int]]:
        """The stage as it is sharded, each part with the ranks that share its state."""
        if self.layout.ep == 1:
            return [(stage, self.n)]
        experts = stage.part(True)
        return [(stage.part(False), self.n), *([(experts, self.n_experts)] if experts.numel else [])]

    def keeper(self, stage: Stage) -> Keeper:
        """The strategy around one stage, or two of them around its parts."""
        parts = self.parts(stage)
        if len(parts) == 1:
            return self.keeper_of(*parts[0])
        return KeeperPair([self.keeper_of(*part) for part in parts], [part.params[part.at].numel for part, _ in parts])

    def keeper_of(self, stage: Stage, n: int) -> Keeper:
        """The strategy around these parameters, over `n` ranks."""
        stays = frozenset({"token"}) if self.tied else frozenset[str]()
        return self.law.keeper(stage.params, n, self.recipe, self.gathered, stays)

    # -- between steps -----------------------------------------------------------------------------------------------

    def owned(self, place: int | None = None) -> list[tuple[ParamGroup, int]]:
        """Group and elements of each tensor that the optimizer steps on, those of blocks not walked included.

        `place`: of each stage only the parameters of this part."""
        sizes, chosen = list[tuple[ParamGroup, int]](), slice(None) if place is None else slice(place, place + 1)
        for stage, n in (part for whole in self.stages for part in self.parts(whole)[chosen]):
            sizes += self.law.owned(stage.all_params, n, self.recipe)
        return sizes

    def state(self) -> int:
        """Bytes of the optimizer's state, without masters: its tensors, and Adam's count of steps, 4 bytes for each."""
        law, total = self.recipe.steps_by, sum(step.kept for step in self.matrix_steps())
        for group, size in self.owned():
            counted = law.adam and not group.by_matrix
            total += size * self.recipe.state_bytes * law.beside(group.by_matrix) + 4 * counted
        return total

    def base(self) -> Bytes:
        """Bytes by kind between two steps: weights, gradients that stay, the optimizer's state.

        With offloading, masters and the gradients that were copied for them count where the CPU is the device; a ZeRO-3
        shard is then only the source of gathers, in the gathered width."""
        r = self.recipe
        pairs = [*zip(self.stages, self.keepers, strict=True)]
        weights = sum(keeper.weights(stage.middle) for stage, keeper in pairs)
        gradients = sum(keeper.gradients(stage.middle) for stage, keeper in pairs)
        owned, wide = sum(size for _, size in self.owned()), r.state_bytes
        state = self.state() + owned * wide * r.has_masters
        histories = self.remembered()
        if of_linear := HISTORY_BYTES.get(r.units):
            sizes = [pair for stage in self.stages for layer in stage.all_params for pair in layer.sizes]
            histories += of_linear * sum(self.linears(name, size) for name, size in sizes)
        biases, counts = self.balance()
        if not r.offload:
            return weights + biases, gradients, state, counts, histories
        shard = owned * self.gathered if r.cuts.weights else weights
        if self.device != "cpu":
            return shard + biases, gradients, 0, counts, histories
        masters = owned * wide
        return shard + biases, gradients + masters, state + masters, counts, histories

    def linears(self, name: str, size: int) -> int:
        """How many linears these weights are: several where experts are walked together, 0 if they are none."""
        one = self.shape.d_model * self.shape.expert_hidden // self.layout.tp if name.startswith(EXPERTS) else size
        return size // one * is_linear(name)

    def remembered(self) -> int:
        """Bytes of what was cut off from gradients that travel in 8 bits (labkit.parallel.eight_bit_gradients)."""
        parts = [(part.numel, n) for stage in self.stages for part, n in self.parts(stage) if n > 1]
        return sum(WAYS[self.recipe.gradients].remembered_bytes(numel, n, self.sums) for numel, n in parts)

    def balance(self) -> tuple[int, int]:
        """Bytes of what keeps experts balanced: of the biases, and of the rows by expert, 8 bytes each: those of the
        last forward and of the step so far; with biases those of all ranks, too."""
        e, biased = self.shape.n_expert, self.shape.balance == "bias"
        layers = sum(stage.kinds.count("block") + stage.skipped for stage in self.stages) if e else 0
        return layers * e * max(4, self.width) * biased, layers * e * 8 * (2 + biased)

    def find_fullest(self) -> None:
        """The fullest moments of a schedule that cuts a backward in two: activations of the micro-batches in flight,
        and what those between B and W have kept for W."""
        r, p = self.recipe, self.layout.pp
        weights = []
        for stage, kept in zip(self.stages, self.for_weights, strict=True):
            layers = zip(stage.kinds, stage.profiles, strict=True)
            loss = sum(profile.held[ACTIVATIONS] for kind, profile in layers if kind == "loss")  # B frees it
            weights.append((stage.held, kept - loss if kept else 0))
        gradients = tuple(int(self.law.left(self.n) * stage.numel * self.sums) for stage in self.stages)
        moments = (r.schedule, p, r.n_micro, r.stages_per_rank, self.place, tuple(weights), self.boundary(), gradients)
        forward, backward = fullest_moments(*moments)
        self.in_flight, self.newest, self.done_before = list(forward.held), forward.stage, list(forward.done)
        self.forward_bytes = forward.weigh(weights, self.boundary())
        self.backward_bytes = [moment.weigh(weights, self.boundary()) for moment in backward]
        peaks = [n_bytes + kept for n_bytes, kept in zip(self.backward_bytes, self.for_weights, strict=True)]
        self.done = list(backward[peaks.index(max(peaks))].done)

    def sharers(self, part: int) -> tuple[int, ...]:
        """The ranks that have the same weights as this one: of part 1, the experts that ep deals out, or the rest."""
        if part:
            return self.layout.ranks("expert_dp", self.rank)
        return self.layout.both_ends(self.rank) if self.recipe.copies > 1 else self.layout.ranks("data", self.rank)

    def matrix_steps(self, place: int | None = None) -> list[MatrixStep]:
        """The optimizer's step on whole matrices, of each stage or of each of its parts; [] for an optimizer that needs
        none whole.

        `place`: of each stage only the matrices of this part."""
        r, tp, law = self.recipe, self.layout.tp, self.recipe.steps_by.by_matrix
        if law is None:
            return []
        steps = []
        parts = [pair for whole in self.stages for pair in enumerate(self.parts(whole)) if place in (None, pair[0])]
        for number, (stage, share) in parts:
            n = share if r.cuts.state else 1
            sharding = self.law.in_buckets, r.cuts.state, self.sums, r.bucket_bytes, r.grouping
            where = n, self.sharers(number).index(self.rank) % n, tp, self.coords["tp"]
            steps.append(_matrix_step(law, self.shape, stage.all_params, sharding, where, r.state_bytes))
        return steps

    def in_flight_bytes(self) -> int:
        """Activations of all micro-batches in flight, and what those between B and W have kept for W."""
        peaks = (n_bytes + kept for n_bytes, kept in zip(self.backward_bytes, self.for_weights, strict=True))
        return max(self.forward_bytes, *peaks)

    def bounds(self) -> tuple[int, int]:
        """Bytes between which the highest moment lies, without walking: a search asks thousands of plans."""
        r, n, w = self.recipe, self.n, self.width
        numel, states = sum(stage.numel for stage in self.stages), r.steps_by.beside(True)
        law = r.steps_by.by_matrix
        steps = self.matrix_steps() if law and law.keeps else []
        parts = [part for stage in self.stages for part in self.parts(stage)]
        owned = sum(part.numel // (share if r.cuts.state else 1) for part, share in parts)
        away = r.offload and self.device != "cpu"
        state = 0 if away else owned * r.state_bytes * (states + 2 * r.offload + r.has_masters)
        shard = owned * (self.gathered if r.offload else w)
        state += sum(step.kept for step in steps)
        least = (shard if r.cuts.weights else numel * w) + state
        least += 0 if self.law.left(self.n) else numel * self.sums  # those that nothing leaves behind are always there
        least += self.in_flight_bytes() + self.remembered()
        unit, param = (max(stage.largest[k] for stage in self.stages) for k in (0, 1))
        comes = self.law.most(Amounts(numel, owned, unit, param, 1 + (self.layout.ep > 1), self.gathered), r)
        copies = 2 * numel if self.setting.way == "autocast" else 0
        tied = 3 * self.shape.vocab * self.shape.d_model * w * self.tied
        step = (2 + r.has_masters) * owned * r.state_bytes + 8 * 20 * (self.shape.n_layer + 2) * n
        if law:  # what AdamW keeps more of the rest; pieces, whole matrices and products of them
            step += ((r.steps_by.elementwise - states) * owned + 8 * param * self.layout.tp) * r.state_bytes
            step += max((step.temporaries(not r.cuts.state) for step in steps), default=0)
        highest = max(stage.highest for stage in self.stages)
        waits = self.cut_rows() + 2 * self.message() + self.unanswered() + 2 * self.boundary() * r.splits
        return least, least + highest + comes + copies + tied + step + waits

    def cut_rows(self) -> int:
        """Bytes of this rank's tokens and targets of a step, which are taken out of the batch where cp cuts rows."""
        rows = self.recipe.batch_size // self.layout.dp
        return 2 * 8 * rows * self.setting.seq * (self.layout.cp > 1)

    def message(self) -> int:
        """Bytes that are on their way to each neighbour in a pipeline, while the next message is made."""
        return self.recipe.schedule_law.messages * (self.layout.pp > 1) * self.boundary()

    def onward(self) -> int:
        """Those on their way to the next stage."""
        return self.message() * (self.place < self.layout.pp - 1)

    def back(self) -> int:
        """Those of gradients, on their way to the stage before."""
        return self.message() * (self.place > 0)

    def unanswered(self) -> int:
        """Bytes of messages that gpipe still holds when its last forward runs: nothing has come back yet that proves
        their delivery (labkit.parallel.pipeline)."""
        sends = self.recipe.schedule_law.unanswered and self.place < self.layout.pp - 1
        return (self.recipe.n_micro - 1) * self.boundary() * sends

    def boundary(self) -> int:
        """Bytes of one micro-batch's activation between two stages."""
        rows = self.setting.rows * self.setting.seq // (self.layout.tp if self.setting.in_sequence else 1)
        return rows * self.shape.d_model * self.gathered

    def kept_for_weights(self, stage: Stage, number: int) -> int:
        """Bytes that B keeps of a micro-batch for W: the gradient that arrives at each product and norm, as wide as a
        weight (under autocast some are narrower), and what B has computed again.

        0 for a schedule without W, and on the first stage, where W does the whole backward
        (labkit.parallel.pipeline)."""
        if number == 0:
            return 0
        d, tp, shape = self.shape.d_model, self.layout.tp, self.shape
        blocks, ends = stage.kinds.count("block") + stage.skipped, "head" in stage.kinds
        tokens = self.setting.rows * self.setting.seq
        dense = 4 * d + (3 * d + shape.hidden) // tp
        head = d + shape.vocab // tp
        arrived = tokens * (stage.kinds.count("dense") * dense + ends * head) * self.width
        if shape.n_expert:
            arrived += blocks * (tokens * (3 * d + 3 * d // tp) * self.width + self.arrived_in_mixture())
        else:
            arrived += blocks * tokens * dense * self.width
        return arrived + self.stage(number, replace(self.setting, recompute="none")).held - stage.held

    def arrived_in_mixture(self) -> int:
        """Bytes of the gradients that arrive at the router and at the linears of a mixture, with a balanced load."""
        shape, setting, d = self.shape, self.setting, self.shape.d_model
        hidden = shape.expert_hidden // setting.tp * (2 if shape.gated else 1)
        n_local = shape.n_expert // setting.ep
        table = Load.of(shape).table(setting.rows, setting.seq, setting.ep)
        first, tokens = setting.ep_rank * n_local, setting.rows * setting.seq
        rows = sum(sum(row[first : first + n_local]) for row in table)
        shared = tokens * (shape.n_shared * hidden + d * (shape.n_shared > 0))
        return (rows * (hidden + d) + shared) * self.width + tokens * shape.n_expert * max(4, self.width)


@lru_cache(maxsize=1024)
def _matrix_step(
    law: MatrixLaw, shape: ModelShape, layers: tuple[Params, ...], sharding: tuple[bool, bool, int, int, Grouping],
    where: tuple[int, int, int, int], wide: int,
) -> MatrixStep:  # fmt: skip
    """The step on the matrices of these layers; `where`: n, place, tp and slot of MatrixStep."""
    are_in_buckets, are_cut, sums, bucket_bytes, grouping = sharding
    if are_in_buckets:
        buckets = in_buckets(layers, where[0], sums, bucket_bytes, grouping)
        sizes = [[pair[1:] for pair in run] for bucket in buckets for run in bucket.runs.values()]
    else:
        sizes = [list(layer.sizes) for layer in layers]
    hidden = [[pair for pair in buffer if grouping.of_weight(pair[0]).by_matrix] for buffer in sizes]
    buffers = [
        [matrix for name, size in buffer for matrix in matrices_of(shape, name, size, where[2])]
        for buffer in hidden
        if buffer
    ]
    if not are_cut:
        buffers = [[matrix] for buffer in buffers for matrix in buffer]
    return MatrixStep(law, buffers, *where, wide)


def fullest_ranks(shape: ModelShape, layout: Layout, recipe: Recipe) -> list[int]:
    """Some ranks of which one holds most: of each place in the pipeline that may be the fullest (stages.py) the rank
    that keeps most as an owner of whole matrices, if the optimizer keeps anything there."""
    ranks, law = fullest(shape, layout, recipe), recipe.steps_by.by_matrix
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
