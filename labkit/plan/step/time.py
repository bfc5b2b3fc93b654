"""predict_step: the seconds of one training step, by what they are spent on.

    compute        products at the rate of large products, all else at the rate of memory (compute_time.py)
    host           the device has nothing to do: Python issues ops more slowly than they are computed
    tp, pp, dp     communication along each axis (collectives.py, over the link that the axis crosses)
    cp             keys and values, or tokens, on their way to the attention of other ranks, and gradients back
    ep             tokens on their way to their experts and back: two all_to_alls forward and two backward a block
    overlap        below zero: what is won by communicating while something is computed
    bubble         how long the slowest rank of a pipeline waits: its schedule is simulated, or follows its law if long
    optimizer      weights, gradients and state, read and written; the work of owners on whole matrices (Muon), too

    Their sum is the step. tp cannot be hidden, because the next product needs the sum. dp is hidden behind the backward
    of the last micro-batch, except for the last bucket. ZeRO-3 gathers unit by unit: each gather is hidden behind the
    unit before it, as far as that takes long enough. HSDP does so inside a group; what it sums across groups is hidden
    behind the last backward. Nothing hides the gather of new weights in ZeRO-1 and 2. What is hidden is not free: both
    want the same memory (`contention` of labkit.plan.machine.efficiency).

    Experts: gradients of a rank's experts are reduced along expert_dp, those of all else along dp. ep cannot be hidden,
    because the experts need the tokens. `imbalance` is the load of the slowest rank's experts over the mean, and sets
    the time of the products and of the all_to_alls, since all wait for that rank; 1 is a perfect router. With tp each
    rank has a part of every expert, and sends all of its k copies of a token. Only models with experts have the item
    "ep", and only layouts with cp > 1 "cp" (context_time.py), whose ring hides behind attention.

Long because one step is one sum: whoever reads a prediction finds all of its terms here.

Sources: Narayanan et al., arXiv:2104.04473, sections 2.2 and 3.2; Li et al., arXiv:2006.15704, section 3.2.3 (overlap);
Rajbhandari et al., arXiv:1910.02054, section 7; Lepikhin et al., arXiv:2006.16668 (experts and all_to_all);
Thakur et al. 2005, section 3 (alpha-beta).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.job.recipe import Recipe
from labkit.plan.job.stages import (
    blocks_of,
    check_plan,
    dense_of,
    expert_params,
    linear_params,
    setting_of,
    state_params,
)  # fmt: skip
from labkit.plan.laws import experts, pipeline, tensor
from labkit.plan.laws.context_time import data_stride, exchanges
from labkit.plan.laws.precisions import EMULATED
from labkit.plan.laws.strategy import State, Waits, Work
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.setting import Setting
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.partition.matrices import busiest_flops
from labkit.plan.schedules.schedule import simulate
from labkit.plan.step.compute_time import seconds_of
from labkit.plan.step.passes_over_batch import Pass
from labkit.plan.words import plural

SIMULATED = 6_000
"""Actions of a schedule that are simulated one by one; longer ones follow the law."""
STATE_BYTES = 80
"""Bytes that AdamW reads and writes for a parameter in fp32: some 20 passes over 4 bytes, as torch runs it."""


def predict_step(
    shape: Any,
    layout: Layout,
    recipe: Recipe,
    hardware: Hardware,
    simulated: int = SIMULATED,
    imbalance: float = 1.0,
) -> Breakdown:
    """Seconds of one step on the slowest rank: compute, host, tp, pp, dp, overlap (below zero), bubble, optimizer; cp
    where rows are cut; and ep for a model with experts, with the `imbalance` of their load, slowest over mean.

    `shape` is a ModelShape or a GPTConfig. Schedules of more than `simulated` actions follow their law. ValueError for
    what cannot be cut or run, and for an imbalance below 1."""
    return StepTime(ModelShape.of(shape), layout, recipe, hardware, simulated, imbalance).breakdown()


def mfu(shape: Any, layout: Layout, recipe: Recipe, hardware: Hardware) -> float:
    """Model flops utilisation of the predicted step, 0 to 1: what PaLM, arXiv:2204.02311, appendix B, calls so."""
    shape = ModelShape.of(shape)
    step = predict_step(shape, layout, recipe, hardware).total
    return shape.mfu(recipe.batch_size * shape.seq / step, layout.size * hardware.peak(recipe.products))


class StepTime:
    """The parts of one predicted step, in seconds."""

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        recipe: Recipe,
        hardware: Hardware,
        simulated: int = SIMULATED,
        imbalance: float = 1.0,
    ) -> None:
        check_plan(shape, recipe, layout)
        if not 1 <= imbalance < float("inf"):
            raise ValueError(f"imbalance is the slowest expert's load over the mean, 1 or more; got {imbalance}")
        self.imbalance = imbalance
        if recipe.units in EMULATED:
            raise ValueError(
                f"products with units of {recipe.units!r} are emulated: what they become is the same everywhere, what "
                "they take on a device with such units was not measured. Seconds are predicted for precision='fp8' "
                "with scaling='tensor' or 'delayed', and for bf16"
            )
        self.shape, self.layout, self.recipe, self.hardware, self.simulated = shape, layout, recipe, hardware, simulated
        self.setting: Setting = setting_of(shape, layout, recipe)
        self.m, self.p, self.v = recipe.n_turns, layout.pp, recipe.stages_per_rank
        self.wide = {"fp64": 8, "half": 2}.get(self.setting.way, 4)
        self.narrow = 2 if self.setting.way == "autocast" else self.wide
        self.tokens = self.setting.rows * self.setting.seq
        self.states = self.shared_states()
        self.params = sum(state.params for state in self.states)
        n_stages = recipe.n_stages(self.p)
        sums = self.tp_sum()
        self.reruns = recipe.recompute == "full"  # blocks run forward twice
        # sums of a layer, forward and backward: attention and MLP close with one each way; so do the two ends
        kept = self.reruns or self.narrow < self.wide  # autocast keeps its copy of what was gathered
        plain, mixed = (0.0 if kept else tensor.sums_again(recipe, mixed) for mixed in (False, shape.n_expert > 0))
        self.layers = {
            "embedding": self.layer("embedding", sums, 1, 0),
            "block": self.layer("block", sums, 2, 2 + mixed),
            "head": self.layer("head", sums, 0, 1),
        }
        blocks = blocks_of(shape, n_stages)
        if shape.n_expert:
            self.layers["dense"] = self.layer("dense", sums, 2, 2 + plain)
            self.layers["block"] = self.with_experts(*self.layers["block"])
        if layout.cp > 1:
            ahead, behind = exchanges(shape, self.setting, recipe.products, self.narrow, hardware)
            for name in self.layers.keys() & {"block", "dense"}:
                forward, backward = self.layers[name]
                self.layers[name] = (
                    forward._replace(cp=ahead.waits, hidden=ahead.hidden),
                    backward._replace(cp=behind.waits, hidden=behind.hidden),
                )
        starts = [sum(blocks[:index]) for index in range(n_stages)]
        kinds = [
            (count, dense_of(shape, start, count) if shape.n_expert else 0, index == 0, index == n_stages - 1)
            for index, (start, count) in enumerate(zip(starts, blocks, strict=True))
        ]
        known = {kind: self.stage(*kind) for kind in dict.fromkeys(kinds)}  # most stages are alike
        self.stages = [known[kind] for kind in kinds]

    def shared_states(self) -> list[State]:
        """What the fullest rank has: all parameters, or with ep those of its experts and the rest."""
        lay, recipe, node = self.layout, self.recipe, self.hardware.node_size
        law, n_data = recipe.strategy_law, recipe.data_ranks(lay)
        rest = state_params(self.shape, lay.tp, self.p, self.v, recipe.schedule)
        of_experts = expert_params(self.shape, lay.tp, lay.ep, self.p, self.v, recipe.schedule)
        place = max(range(self.p), key=lambda index: rest[index] + of_experts[index])
        total, share = rest[place] + of_experts[place], law.sharing(lay, recipe.copies)
        across = law.across(lay, recipe.copies)
        # where copies of the state are in several groups, ranks of one group are as near as if there were no other
        stride = data_stride(replace(lay, dp=lay.dp // across[0]), node, recipe.copies)
        coded, coded_experts = (weights * recipe.fp8_gathers for weights in linear_params(self.shape, lay.tp, lay.ep))
        if lay.ep == 1:
            return [State(total, n_data, stride, share, 1.0, coded + coded_experts, across)]
        n, apart = n_data // lay.ep, data_stride(lay, node, ep=lay.ep)
        return [
            State(rest[place], n_data, stride, share, rest[place] / total, coded),
            State(of_experts[place], n, apart, n, of_experts[place] / total, coded_experts),
        ]

    # -- one stage, one micro-batch ----------------------------------------------------------------------------------

    def tp_sum(self) -> tuple[float, float]:
        """Seconds of one tensor-parallel sum, forward and backward."""
        size, setting = self.tokens * self.shape.d_model, self.setting
        forward, backward = (
            tensor.sum_s(self.hardware, setting.tp, size, width, setting.in_sequence)
            for width in (self.narrow, self.wide)
        )
        return forward, backward

    def layer(self, name: str, sums: tuple[float, float], ahead: int, back: float) -> tuple[Pass, Pass]:
        """One layer, forward and backward, with `ahead` and `back` sums over tp in it.

        Ops are issued while earlier ones are computed, so that the longer of both counts."""
        cost = seconds_of(self.shape, name, self.setting, self.recipe.products, self.hardware, self.imbalance)
        crosses = self.p > 1 and self.layout.size > self.hardware.node_size
        call = self.hardware.practice.host_call_s * (1 + crosses * self.layout.tp)
        calls = (self.layout.tp > 1) * (1 + self.setting.in_sequence) * call
        passes = []
        for compute, sum_s, count in ((cost.forward, sums[0], ahead), (cost.backward, sums[1], back)):
            idle = cost.host + count * calls - compute - count * sum_s
            passes.append(Pass(compute, count * sum_s, max(0.0, idle)))
        return passes[0], passes[1]

    def with_experts(self, forward: Pass, backward: Pass) -> tuple[Pass, Pass]:
        """A block's passes with the tokens' way to their experts and back, once in each direction."""
        k = self.shape.top_k
        n_bytes = self.imbalance * self.tokens * k * self.shape.d_model * self.narrow
        one = experts.travel_s(self.hardware, self.layout, n_bytes)
        # gradients of the router's weights are terms of a sum over tp
        weights = self.hardware.collective_s("all_reduce", self.layout.tp, 1, self.tokens * k * max(4, self.narrow))
        return forward._replace(ep=2 * one), backward._replace(ep=2 * one, tp=backward.tp + weights)

    def stage(self, blocks: int, dense: int, is_first: bool, is_last: bool) -> tuple[Pass, Pass]:
        """Forward and backward of a stage; a checkpointed block is run forward again, but for its last sum. `dense` of
        its blocks have no experts in a model whose others have."""
        counts = {"block": blocks - dense, "dense": dense, "embedding": int(is_first), "head": int(is_last)}
        counts = {name: count for name, count in counts.items() if count}
        forward, backward = Pass(), Pass(self.adding())
        for name, count in counts.items():
            ahead, back = self.layers[name]
            forward, backward = forward.plus(ahead, count), backward.plus(back, count)
        if self.reruns:
            for name in counts.keys() & {"block", "dense"}:
                rerun = self.layers[name][0]
                rerun = rerun._replace(tp=rerun.tp * tensor.sums_again(self.recipe) / 2)  # of 2 sums
                backward = backward.plus(rerun, counts[name])
        return forward, backward

    def adding(self) -> float:
        """Seconds in which the gradients of one micro-batch of a stage are added to those before it."""
        recipe = self.recipe
        if recipe.strategy_law.every_pass_sends or (self.m == 1 and not recipe.fp32_gradients):
            return 0.0
        n_bytes = self.params / self.v * (2 * recipe.gradient_bytes + recipe.weight_bytes)
        return n_bytes / self.hardware.reachable_bytes_per_s

    def message_s(self) -> float:
        """Seconds of one activation from stage to stage."""
        part = self.layout.tp if self.setting.in_sequence else 1
        return pipeline.message_s(self.hardware, self.layout, self.tokens * self.shape.d_model * self.wide / part)

    # -- the whole step ----------------------------------------------------------------------------------------------

    def pipeline(self) -> tuple[float, float, float]:
        """(seconds from first to last action, those of the slowest rank's own actions, those that messages add)."""
        cost = [(forward.total, backward.total) for forward, backward in self.stages]
        totals = [ahead + back for ahead, back in cost]
        own = max(sum(totals[stage] for stage in self.mine(rank)) for rank in range(self.p)) * self.m
        send = self.message_s()
        if self.p == 1 and self.v == 1:
            return own, own, 0.0
        if 2 * self.recipe.n_micro * len(cost) <= self.simulated:
            schedule, share = self.recipe.schedule_for(self.p), self.weights_share()
            forward, backward = [pair[0] for pair in cost], [pair[1] for pair in cost]
            plain = max(span.end for span in simulate(schedule, forward, backward, weights=share))
            return plain, own, max(span.end for span in simulate(schedule, forward, backward, send, share)) - plain
        slowest = max(cost, key=sum)
        law = self.recipe.schedule_law
        waits = law.idle_s(*slowest, self.weights_share())
        # p micro-batches are under way, so that a round trip through all stages may take p forwards and backwards, and
        # the messages of it come on top
        sends = 2 * (len(cost) - 1) * send * (1 + self.m / self.p * law.in_turn)
        # with two directions, half of the ranks are on the way to where micro-batches enter
        return own + (self.p / self.recipe.copies - 1) * waits, own, sends

    def weights_share(self) -> float:
        """W's share of a backward that is cut in two: half of it, but for what B runs again, and for the gradients of
        tokens on their way from experts, which only B sends."""
        ahead, back = self.layers["block"]
        whole = back.total + ahead.total * self.reruns
        return 0.5 * (back.total - back.ep) / whole

    def dp(self) -> Waits:
        """Data parallelism: the seconds of its communication, and those by which it makes the step longer."""
        forward, backward = (max(way.compute for way in ways) * self.v for ways in zip(*self.stages, strict=True))
        n_units = max(1, self.shape.n_layer // len(self.stages)) * self.v
        work = Work(self.m, self.p, forward, backward, n_units, self.wide)
        shared = [state for state in self.states if state.ranks > 1]
        waits = [self.recipe.strategy_law.waits(state, work, self.recipe, self.hardware) for state in shared]
        return Waits(sum(wait.talk for wait in waits), sum(wait.longer for wait in waits))

    def optimizer(self) -> float:
        """Seconds of the optimizer on what this rank owns."""
        is_cut = self.recipe.cuts.state
        owned = sum(state.params / (state.share if is_cut else 1) for state in self.states)
        law, wide = self.recipe.steps_by, self.recipe.state_bytes
        products = 0.0
        if law.by_matrix:
            blocks = max(blocks_of(self.shape, self.recipe.n_stages(self.p))) * self.v
            share, same = (state.share if is_cut else 1 for state in (self.states[0], self.states[-1]))
            tp, n_experts = self.layout.tp, self.shape.n_expert // self.layout.ep
            flops = busiest_flops(law.by_matrix, self.shape, blocks, share * tp, n_experts, same * tp)
            products = self.hardware.op_s(flops, 0, law.by_matrix.products(wide))
        moved = owned * STATE_BYTES * wide / 4 * law.passes
        return products + moved / self.hardware.reachable_bytes_per_s

    def breakdown(self) -> Breakdown:
        """The step as named items, in seconds."""
        whole, own, sent = self.pipeline()
        slowest = max(range(self.p), key=lambda rank: sum(f.total + b.total for f, b in self.of(rank)))
        spent = Pass()
        for forward, backward in self.of(slowest):
            spent = spent.plus(forward, self.m).plus(backward, self.m)
        pp = 2 * self.m * self.v * self.message_s()
        waits = (
            max(0.0, whole - own) + max(0.0, sent - pp) + pipeline.late_s(self.hardware, self.layout, self.m * self.v)
        )
        dp, open_ = self.dp()
        behind = max(0.0, pp - sent)
        flops = sum(item.value for item in self.shape.flops(1, checkpointing=self.reruns).items)
        n = self.states[0].ranks
        batch = f"{plural(self.setting.rows, 'row')} x {plural(self.recipe.n_micro, 'micro-batch')}"
        host = spent.host + self.hardware.practice.step_s
        routed = ""
        if self.shape.n_expert:
            routed = f"; the slowest experts have {self.imbalance:g} times the mean load"
        ways = f"time of every op, {flops:,.0f} flops a token, {batch}{routed}"
        rows = [
            ("compute", spent.compute, ways, "labkit.plan.step.compute_time"),
            ("host", host, "Python's seconds an op, where longer than the op's", "labkit.plan.machine.efficiency"),
            ("tp", spent.tp, f"{self.layout.tp} ranks, ring all_reduce of B T D, 4 a block", "arXiv:1909.08053, 3"),
            ("pp", pp, f"2 x {self.m} x {self.v} messages of B T D", "arXiv:2104.04473, 3.2"),
            ("dp", dp, f"{self.recipe.sharded} over n = {n}, S = bytes of the rank's weights", "arXiv:1910.02054, 7"),
            ("overlap", open_ - dp - behind - spent.hidden, "sent while computing", "arXiv:2006.15704, 3.2.3"),
            ("bubble", waits, f"{self.recipe.schedule}, p = {self.p}", "labkit.plan.schedules.schedule"),
            ("optimizer", self.optimizer(), f"{STATE_BYTES} bytes a parameter owned", "torch.optim, unfused"),
        ]  # fmt: skip
        if self.shape.n_expert:
            times = "2 forward, 2 again and 2 backward" if self.reruns else "2 forward and 2 backward"
            formula = f"{self.layout.ep} ranks, all_to_alls of {self.shape.top_k} B T D, {times} a block{routed}"
            rows.insert(3, ("ep", spent.ep, formula, "arXiv:2006.16668"))
        if self.layout.cp > 1:
            formula = f"{self.layout.cp} ranks by {self.recipe.context}, of which {spent.cp:.3g} s are waited for"
            rows.insert(3, ("cp", spent.cp + spent.hidden, formula, "labkit.plan.laws.context"))
        return Breakdown(Item(name, value, "s", formula, source) for name, value, formula, source in rows)

    def of(self, rank: int) -> list[tuple[Pass, Pass]]:
        """Forward and backward of each stage on a rank."""
        return [self.stages[index] for index in self.mine(rank)]

    def mine(self, rank: int) -> range:
        """The stages of a rank."""
        return self.recipe.stages_on(rank, self.p)
