"""predict_step: the seconds of one training step, by what they are spent on.

    compute        products at the rate of large products, all else at the rate of memory (compute_time.py)
    host           the device has nothing to do: Python issues ops more slowly than they are computed
    tp, pp, dp     communication along each axis, as its law says (laws/tensor.py, pipeline.py, data_parallel.py)
    cp             keys and values, or tokens, on their way to the attention of other ranks, and gradients back
    ep             tokens on their way to their experts and back: two all_to_alls forward and two backward a block
    overlap        below zero: what is won by communicating while something is computed
    bubble         how long the slowest rank of a pipeline waits: its schedule is simulated, or follows its law if long
    optimizer      weights, gradients and state, read and written; the work of owners on whole matrices (Muon), too

    Their sum is the step. tp is not hidden, since the next product needs the sum; with `tp_overlap` products are cut
    into pieces, and tp is what these do not hide (laws/overlapped_tensor.py). dp is hidden behind the backward of the
    last micro-batch, except for the last bucket. ZeRO-3 gathers unit by unit: each gather is hidden behind the unit
    before it, as far as that takes long enough. HSDP does so inside a group; what it sums across groups is hidden
    behind the last backward. Nothing hides the gather of new weights in ZeRO-1 and 2. What is hidden is not free: both
    want the same memory (`contention` of labkit.plan.machine.efficiency).

    Experts: gradients of a rank's experts are reduced along expert_dp, those of all else along dp. ep cannot be hidden,
    because the experts need the tokens. `imbalance` is the load of the slowest rank's experts over the mean, and sets
    the time of the products and of the all_to_alls, since all wait for that rank; 1 is a perfect router. With tp each
    rank has a part of every expert, and sends all of its k copies of a token. Only models with experts have the item
    "ep", and only layouts with cp > 1 "cp" (context_time.py), whose ring hides behind attention.

Sources: Narayanan et al., arXiv:2104.04473, sections 2.2 and 3.2; Li et al., arXiv:2006.15704, section 3.2.3 (overlap);
Rajbhandari et al., arXiv:1910.02054, section 7; Lepikhin et al., arXiv:2006.16668 (experts and all_to_all);
Thakur et al. 2005, section 3 (alpha-beta).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.job.recipe import Recipe
from labkit.plan.job.stages import (
    blocks_of,
    check_plan,
    expert_params,
    linear_params,
    ranks_by_kind,
    setting_of,
    stages_by_kind,
    state_params,
)  # fmt: skip
from labkit.plan.laws import context_time, data_parallel, expert_tensor, experts, offload, pipeline, tensor
from labkit.plan.laws.optimizers import STATE_BYTES
from labkit.plan.laws.precisions import EMULATED
from labkit.plan.laws.strategy import ConcurrentWork, ReducedParameters
from labkit.plan.laws.timing import LAYERS, PassSeconds, Timing
from labkit.plan.machine.hardware import EIGHT_BITS, Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.partition.matrices import busiest_flops
from labkit.plan.step.compute_time import seconds_of
from labkit.plan.words import plural

SIMULATED = 6_000
"""Actions of a schedule that are simulated one by one; longer ones follow the law."""


class StepPasses(NamedTuple):
    """Forwards and backwards of all stages and of the busiest rank; what they spend; how long the pipeline lasts; the
    most seconds in which a stage computes, forward and backward."""

    stages: list[tuple[PassSeconds, PassSeconds]]
    busiest: list[tuple[PassSeconds, PassSeconds]]
    spent: PassSeconds
    lasts: pipeline.Lasts
    longest: tuple[float, float]


class LayoutTables:
    """What steps on one layout have in common, so that a search, which asks for hundreds of them, works it out once:
    seconds of layers by their setting, parameters that are shared out by their strategy, and flops of a token.

    For one model, machine and `imbalance`."""

    def __init__(self) -> None:
        self.layers: dict[tuple[object, ...], dict[str, tuple[PassSeconds, PassSeconds]]] = {}
        self.states: dict[tuple[object, ...], list[ReducedParameters]] = {}
        self.passes: dict[tuple[object, ...], StepPasses] = {}
        self.flops: dict[bool, float] = {}


def predict_step(
    shape: Any,
    layout: Layout,
    recipe: Recipe,
    hardware: Hardware,
    simulated: int = SIMULATED,
    imbalance: float = 1.0,
    tables: LayoutTables | None = None,
) -> Breakdown:
    """Seconds of one step on the slowest rank: compute, host, tp, pp, dp, overlap (below zero), bubble, optimizer; cp
    where rows are cut; and ep for a model with experts, with the `imbalance` of their load, slowest over mean.

    `shape` is a ModelShape or a GPTConfig. Schedules of more than `simulated` actions follow their law. ValueError for
    what cannot be cut or run, and for an imbalance below 1. `tables` of a search: what is known of this layout."""
    return StepTime(ModelShape.of(shape), layout, recipe, hardware, simulated, imbalance, tables=tables).breakdown()


def mfu(shape: Any, layout: Layout, recipe: Recipe, hardware: Hardware) -> float:
    """Model flops utilisation of the predicted step, 0 to 1: what PaLM, arXiv:2204.02311, appendix B, calls so."""
    shape = ModelShape.of(shape)
    step = predict_step(shape, layout, recipe, hardware).total
    return shape.mfu(recipe.batch_size * shape.seq / step, layout.size * peak_of(recipe, hardware))


def peak_of(recipe: Recipe, hardware: Hardware) -> float:
    """Flop/s of a device of which MFU is a share: the peak of the precision of the products. A CPU multiplies 8-bit
    copies in fp32, which may be faster than its bf16; then that is the peak."""
    peak = hardware.peak(recipe.products)
    return max(peak, hardware.peak(EIGHT_BITS)) if recipe.units and hardware.device == "cpu" else peak


def seconds_of_all(stages: Iterable[tuple[PassSeconds, PassSeconds]]) -> float:
    """Seconds of a forward and a backward of each of these stages."""
    return sum(one.total for passes in stages for one in passes)


class StepTime:
    """One predicted step: the passes of each stage, as a sum over the laws, and what comes once a step."""

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        recipe: Recipe,
        hardware: Hardware,
        simulated: int = SIMULATED,
        imbalance: float = 1.0,
        links: Mapping[str, Hardware] | None = None,
        tables: LayoutTables | None = None,
    ) -> None:
        """`links`: the hardware as some axes see it, tp say, where these have links of their own; `tables`: what other
        steps on this layout have worked out."""
        check_plan(shape, recipe, layout)
        if not 1 <= imbalance < float("inf"):
            raise ValueError(f"imbalance is the slowest expert's load over the mean, 1 or more; got {imbalance}")
        if recipe.units in EMULATED:
            raise ValueError(
                f"products with units of {recipe.units!r} are emulated: what they become is the same everywhere, what "
                "they take on a device with such units was not measured. Seconds are predicted for precision='fp8' "
                "with scaling='tensor' or 'delayed', and for bf16"
            )
        self.shape, self.layout, self.recipe, self.hardware, self.simulated = shape, layout, recipe, hardware, simulated
        setting = setting_of(shape, layout, recipe)
        self.timing = Timing(shape, layout, recipe, setting, recipe.products, hardware, imbalance, links or {})
        self.tables = tables or LayoutTables()
        self.states = self.shared_states()
        self.params = sum(state.params for state in self.states)
        self.layers = self.all_layers()
        self.passes = self.all_passes()
        self.stages, self.busiest = self.passes.stages, self.passes.busiest

    def shared_states(self) -> list[ReducedParameters]:
        """What the fullest rank has: all parameters, or with ep those of its experts and the rest."""
        recipe, known = self.recipe, self.tables.states
        place = recipe.strategy, recipe.shard_ranks, recipe.schedule, recipe.stages_per_rank, recipe.fp8_gathers
        if place not in known:
            known[place] = self._shared_states()
        return known[place]

    def _shared_states(self) -> list[ReducedParameters]:
        lay, recipe, node = self.layout, self.recipe, self.hardware.node_size
        law, n_data, cut = recipe.strategy_law, recipe.data_ranks(lay), (lay.pp, recipe.stages_per_rank)
        rest = state_params(self.shape, lay.tp, *cut, recipe.schedule)
        of_experts = expert_params(self.shape, lay.tp, lay.ep, *cut, recipe.schedule)
        place = max(range(lay.pp), key=lambda index: rest[index] + of_experts[index])
        total, share = rest[place] + of_experts[place], law.sharing(lay, recipe.copies)
        across, stride_of = law.across(lay, recipe.copies), context_time.data_stride
        # where copies of the state are in several groups, ranks of one group are as near as if there were no other
        stride = stride_of(replace(lay, dp=lay.dp // across[0]), node, recipe.copies)
        coded, coded_experts = (weights * recipe.fp8_gathers for weights in linear_params(self.shape, lay.tp, lay.ep))
        if lay.ep == 1:
            return [ReducedParameters(total, n_data, stride, share, 1.0, coded + coded_experts, across)]
        n, apart = n_data // lay.ep, stride_of(lay, node, ep=lay.ep)
        return [
            ReducedParameters(rest[place], n_data, stride, share, rest[place] / total, coded),
            ReducedParameters(of_experts[place], n, apart, n, of_experts[place] / total, coded_experts),
        ]

    # -- one stage, one micro-batch ----------------------------------------------------------------------------------

    def all_layers(self) -> dict[str, tuple[PassSeconds, PassSeconds]]:
        """Each kind of layer that the model has."""
        timing, known = self.timing, self.tables.layers
        place = timing.setting, timing.products, self.recipe.sequence_parallel, self.recipe.tp_overlap
        layers = known.get(place)
        if layers is None:
            layers = {name: self.layer(name) for name in LAYERS if name != "dense" or self.shape.n_expert}
            known[place] = layers
        return layers

    def token_flops(self) -> float:
        """Flops of a token, with those of what runs again where all of a block does."""
        whole, known = self.recipe.recompute == "full", self.tables.flops
        if whole not in known:
            known[whole] = self.shape.flops(1, checkpointing=whole).total
        return known[whole]

    def layer(self, name: str) -> tuple[PassSeconds, PassSeconds]:
        """One layer, forward and backward: its ops, and what the laws of tp, cp and ep add.

        Ops are issued while earlier ones are computed, so that the longer of both counts."""
        timing, passes = self.timing, list[PassSeconds]()
        cost = seconds_of(self.shape, name, timing.setting, timing.products, timing.machine, timing.imbalance)
        added = (law.layer_s(timing, name) for law in (tensor, context_time, experts, expert_tensor))
        for compute, sums, *others in zip((cost.forward, cost.backward), *added, strict=True):
            idle = max(0.0, cost.host + sums.host - compute - sums.tp)
            both = sums._replace(compute=compute + sums.compute, host=idle)
            for other in filter(any, others):
                both = both.plus(other)
            passes.append(both)
        return passes[0], passes[1]

    def all_passes(self) -> StepPasses:
        """All passes of the step. Of the strategy they have the seconds in which gradients are added up, no more."""
        recipe, timing, known = self.recipe, self.timing, self.tables.passes
        adding = data_parallel.adding_s(recipe.strategy_law, timing, self.params / recipe.stages_per_rank)
        runs = recipe.schedule, recipe.stages_per_rank, recipe.n_micro, adding, self.simulated
        place = timing.setting, timing.products, recipe.sequence_parallel, recipe.tp_overlap, *runs
        passes = known.get(place)
        if passes is None:
            passes = known[place] = self._passes(adding)
        return passes

    def _passes(self, adding: float) -> StepPasses:
        shape, recipe, pp = self.shape, self.recipe, self.layout.pp
        kinds = stages_by_kind(shape, recipe.n_stages(pp))
        known = {kind: self.stage(*kind, adding) for kind in dict.fromkeys(kinds)}  # most stages are alike
        stages, spent = [known[kind] for kind in kinds], PassSeconds()
        ranks = ranks_by_kind(shape, recipe.schedule, pp, recipe.stages_per_rank)
        busiest = max(([stages[index] for index in own] for own in ranks), key=seconds_of_all)
        for forward, backward in busiest:
            spent = spent.plus(forward, recipe.n_turns).plus(backward, recipe.n_turns)
        own = recipe.n_turns * seconds_of_all(busiest)
        lasts = pipeline.lasts(self.timing, stages, own, self.weights_share(), self.simulated)
        forward, backward = (max(way.compute for way in ways) for ways in zip(*known.values(), strict=True))
        return StepPasses(stages, busiest, spent, lasts, (forward, backward))

    def stage(
        self, blocks: int, dense: int, is_first: bool, is_last: bool, adding: float
    ) -> tuple[PassSeconds, PassSeconds]:
        """Forward and backward of a stage; a checkpointed block is run forward again. `dense` of its blocks have no
        experts in a model whose others have. `adding`: seconds in which gradients are added up."""
        counts = {"block": blocks - dense, "dense": dense, "embedding": int(is_first), "head": int(is_last)}
        forward, backward = PassSeconds(), PassSeconds(adding)
        for name, count in ((name, count) for name, count in counts.items() if count):
            ahead, back = self.layers[name]
            forward, backward = forward.plus(ahead, count), backward.plus(back, count)
            if self.recipe.recompute == "full" and name in ("block", "dense"):
                backward = backward.plus(tensor.rerun(self.recipe, ahead), count)
        return forward, backward

    # -- the whole step ----------------------------------------------------------------------------------------------

    def weights_share(self) -> float:
        """W's share of a backward that is cut in two: half of it, but for what B runs again, and for the gradients of
        tokens on their way from experts, which only B sends."""
        ahead, back = self.layers["block"]
        whole = back.total + ahead.total * (self.recipe.recompute == "full")
        return 0.5 * (back.total - back.ep) / whole

    def work(self) -> ConcurrentWork:
        """The computation that communication along dp may hide behind."""
        v = self.recipe.stages_per_rank
        forward, backward = (seconds * v for seconds in self.passes.longest)
        n_units = max(1, self.shape.n_layer // len(self.stages)) * v
        return ConcurrentWork(self.recipe.n_turns, self.layout.pp, forward, backward, n_units, self.timing.wide)

    def optimizer(self) -> float:
        """Seconds of the optimizer on what this rank owns."""
        recipe, is_cut, flops = self.recipe, self.recipe.cuts.state, 0.0
        owned = sum(state.params / (state.share if is_cut else 1) for state in self.states)
        if by_matrix := recipe.steps_by.by_matrix:
            blocks = max(blocks_of(self.shape, recipe.n_stages(self.layout.pp))) * recipe.stages_per_rank
            share, same = (state.share if is_cut else 1 for state in (self.states[0], self.states[-1]))
            tp, n_experts = self.layout.tp, self.shape.n_expert // self.layout.ep
            flops = busiest_flops(by_matrix, self.shape, blocks, share * tp, n_experts, same * tp)
        if recipe.offload and self.hardware.device != "cpu":
            return offload.step_s(recipe, owned, STATE_BYTES * recipe.steps_by.passes)
        return recipe.steps_by.step_s(self.hardware, owned, recipe.state_bytes, flops)

    def breakdown(self) -> Breakdown:
        """The step as named items, in seconds."""
        timing, recipe, p, m = self.timing, self.recipe, self.layout.pp, self.recipe.n_turns
        spent = self.passes.spent
        pp, idle = pipeline.waiting_s(timing, self.passes.lasts)
        dp = data_parallel.waiting_s(recipe.strategy_law, self.states, self.work(), timing)
        hidden = dp.talk - dp.longer + pp.talk - pp.longer + spent.hidden
        flops = self.token_flops()
        batch = f"{plural(timing.setting.rows, 'row')} x {plural(recipe.n_micro, 'micro-batch')}"
        ways = f"time of every op, {flops:,.0f} flops a token, {batch}{experts.load(timing)}"
        host = "Python's seconds an op, where longer than the op's"
        sharded = f"{recipe.sharded} over n = {self.states[0].ranks}, S = bytes of the rank's weights"
        return Breakdown([
            Item("compute", spent.compute, "s", ways, "labkit.plan.step.compute_time"),
            Item("host", spent.host + self.hardware.practice.step_s, "s", host, "labkit.plan.machine.efficiency"),
            tensor.row(timing, spent),
            *context_time.rows(timing, spent),
            *experts.rows(timing, spent),
            Item("pp", pp.talk, "s", f"2 x {m} x {recipe.stages_per_rank} messages of B T D", "arXiv:2104.04473, 3.2"),
            Item("dp", dp.talk, "s", sharded, "arXiv:1910.02054, 7"),
            Item("overlap", -hidden, "s", "sent while computing", "arXiv:2006.15704, 3.2.3"),
            Item("bubble", idle, "s", f"{recipe.schedule}, p = {p}", "labkit.plan.schedules.schedule"),
            Item("optimizer", self.optimizer(), "s", f"{STATE_BYTES} bytes a parameter owned", "torch.optim, unfused"),
        ])  # fmt: skip
