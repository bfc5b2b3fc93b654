"""predict_step: the seconds of one training step, by what they are spent on.

    compute        products at the rate of large products, all else at the rate of memory (work.py)
    tp, pp, dp     communication along each axis (collectives.py, over the link that the axis crosses)
    overlap        below zero: the part of this communication that goes on while something is computed
    bubble         how long the slowest rank of a pipeline waits: its schedule is simulated, or follows its law if long
    optimizer      weights, gradients and state, read and written

    Their sum is the step. tp cannot be hidden, because the next product needs the sum. dp is hidden behind the backward
    of the last micro-batch, except for the last bucket (ZeRO-3: behind every forward and backward). Nothing hides the
    gather of new weights in ZeRO-1 and 2.

Sources: Narayanan et al., arXiv:2104.04473, sections 2.2 and 3.2; Li et al., arXiv:2006.15704, section 3.2.3 (overlap);
Rajbhandari et al., arXiv:1910.02054, section 7; Thakur et al. 2005, section 3 (alpha-beta).
"""

from __future__ import annotations

from typing import Any

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.collectives import seconds
from labkit.plan.hardware import Hardware, line_of
from labkit.plan.layout import Layout
from labkit.plan.ops import Setting
from labkit.plan.recipe import Recipe
from labkit.plan.schedule import simulate
from labkit.plan.shape import ModelShape
from labkit.plan.stages import blocks_of, check_plan, setting_of, state_params
from labkit.plan.wire import dp_moves
from labkit.plan.work import seconds_of

SIMULATED = 6_000
"""Actions of a schedule that are simulated one by one; longer ones follow the law."""
STATE_BYTES = 80
"""Bytes that AdamW reads and writes for a parameter in fp32: some 20 passes over 4 bytes, as torch runs it."""


def predict_step(
    shape: Any, layout: Layout, recipe: Recipe, hardware: Hardware, simulated: int = SIMULATED
) -> Breakdown:
    """Seconds of one step on the slowest rank: compute, tp, pp, dp, overlap (below zero), bubble, optimizer.

    `shape` is a ModelShape or a GPTConfig. Schedules of more than `simulated` actions follow their law. ValueError for
    what cannot be cut or run."""
    return StepTime(ModelShape.of(shape), layout, recipe, hardware, simulated).breakdown()


def mfu(shape: Any, layout: Layout, recipe: Recipe, hardware: Hardware) -> float:
    """Model flops utilisation of the predicted step, 0 to 1: what PaLM, arXiv:2204.02311, appendix B, calls so."""
    shape = ModelShape.of(shape)
    step = predict_step(shape, layout, recipe, hardware).total
    return shape.mfu(recipe.batch_size * shape.seq / step, layout.size * hardware.peak(recipe.products))


class StepTime:
    """The parts of one predicted step, in seconds."""

    def __init__(
        self, shape: ModelShape, layout: Layout, recipe: Recipe, hardware: Hardware, simulated: int = SIMULATED
    ) -> None:
        check_plan(shape, recipe, layout)
        self.shape, self.layout, self.recipe, self.hardware, self.simulated = shape, layout, recipe, hardware, simulated
        self.setting: Setting = setting_of(shape, layout, recipe)
        self.m, self.p, self.v = recipe.n_micro, layout.pp, recipe.stages_per_rank
        self.wide = {"fp64": 8, "half": 2}.get(self.setting.way, 4)
        self.narrow = 2 if self.setting.way == "autocast" else self.wide
        self.tokens = self.setting.rows * self.setting.seq
        self.params = max(state_params(shape, layout.tp, self.p, self.v))
        n_stages = self.p * self.v
        self.each = {
            layer: seconds_of(shape, layer, self.setting, recipe.products, hardware)
            for layer in ("embedding", "block", "head")
        }
        self.sum_s = self.tp_sum()
        self.work = [self.stage(index, n_stages) for index in range(n_stages)]
        self.talk = [self.stage_tp(index, n_stages) for index in range(n_stages)]

    # -- one stage, one micro-batch ----------------------------------------------------------------------------------

    def layers(self, index: int, n_stages: int) -> list[tuple[str, int]]:
        """The layers of a stage: (layer, how often)."""
        ends = [("embedding", int(index == 0)), ("head", int(index == n_stages - 1))]
        return [("block", blocks_of(self.shape.n_layer, n_stages, index)), *ends]

    def stage(self, index: int, n_stages: int) -> tuple[float, float]:
        """Seconds of computing, forward and backward; a checkpointed block is run forward again."""
        forward = backward = 0.0
        for layer, count in self.layers(index, n_stages):
            cost = self.each[layer]
            again = cost.forward if self.recipe.checkpointing and layer == "block" else 0.0
            forward, backward = forward + count * cost.forward, backward + count * (cost.backward + again)
        return forward, backward

    def tp_sum(self) -> tuple[float, float]:
        """Seconds of one tensor-parallel sum, forward and backward."""
        n, size = self.layout.tp, self.tokens * self.shape.d_model
        if n == 1:
            return 0.0, 0.0
        line = line_of(self.hardware.link(n, 1))
        forward = seconds("ring", "all_reduce", n, size * self.narrow, line)
        return forward, seconds("ring", "all_reduce", n, size * self.wide, line)

    def stage_tp(self, index: int, n_stages: int) -> tuple[float, float]:
        """Seconds of tensor-parallel sums: two in a block each way (one more if it is run again), one at each end."""
        forward, back = self.sum_s
        blocks, ends = self.layers(index, n_stages)[0][1], (index == 0, index == n_stages - 1)
        again = blocks * forward if self.recipe.checkpointing else 0.0
        return (2 * blocks + ends[0]) * forward, (2 * blocks + ends[1]) * back + again

    def message_s(self) -> float:
        """Seconds of one activation from stage to stage."""
        if self.p == 1:
            return 0.0
        inside = self.p * self.layout.tp <= self.hardware.node_size
        link = self.hardware.intra if inside else self.hardware.inter
        part = self.layout.tp if self.setting.in_sequence else 1
        return line_of(link).seconds(self.tokens * self.shape.d_model * self.wide / part)

    # -- the whole step ----------------------------------------------------------------------------------------------

    def pipeline(self) -> tuple[float, float, float]:
        """(seconds from first to last action, those of the slowest rank's own actions, those that messages add)."""
        cost = [(w[0] + t[0], w[1] + t[1]) for w, t in zip(self.work, self.talk, strict=True)]
        own = max(sum(sum(cost[s]) for s in range(rank, len(cost), self.p)) for rank in range(self.p)) * self.m
        send = self.message_s()
        if self.p == 1 and self.v == 1:
            return own, own, 0.0
        if 2 * self.m * len(cost) <= self.simulated:
            schedule = self.recipe.schedule_for(self.p)
            forward, backward = [pair[0] for pair in cost], [pair[1] for pair in cost]
            plain = max(span.end for span in simulate(schedule, forward, backward))
            return plain, own, max(span.end for span in simulate(schedule, forward, backward, send)) - plain
        slowest = max(cost, key=sum)
        waits = slowest[0] if self.recipe.schedule == "zero_bubble" else sum(slowest)
        return own + (self.p - 1) * waits, own, 2 * (self.p * self.v - 1) * send

    def dp(self) -> tuple[float, float]:
        """(seconds of data-parallel communication, those of it that nothing hides)."""
        n, recipe = self.layout.dp, self.recipe
        if n == 1:
            return 0.0, 0.0
        n_bytes = self.params * recipe.gradient_bytes
        line = line_of(self.hardware.link(n, self.layout.tp * self.p))
        # on gloo, which serves CPUs, a reduce_scatter sums everything on every rank and keeps a part
        whole = self.hardware.device == "cpu" and recipe.strategy != "ddp"
        scatter = seconds("ring", "all_reduce" if whole else "reduce_scatter", n, n_bytes, line)
        gather = seconds(
            "ring",
            "all_gather",
            n,
            self.params * (self.wide if recipe.strategy == "zero3" else recipe.weight_bytes),
            line,
        )
        backward = max(w[1] for w in self.work) * self.v
        forward = max(w[0] for w in self.work) * self.v
        scatters, gathers = dp_moves(recipe.strategy, self.m)
        moved = scatters * scatter + gathers * gather
        if recipe.strategy == "zero3" and not recipe.prefetch:
            return moved, moved  # a layer that is gathered only when it is needed hides nothing
        if recipe.strategy == "zero3":
            layers = max(1, self.shape.n_layer // (self.p * self.v))
            waits = max(0.0, gather - forward) + max(0.0, gather + scatter - backward) + gather / layers
            return moved, min(self.m * waits, moved)
        after = 0.0 if recipe.strategy == "ddp" else gathers * gather  # the new weights, once all are stepped
        behind = (moved - after) / scatters  # what may hide behind the backward of one micro-batch
        bucket = min(1.0, recipe.bucket_bytes / n_bytes) * behind
        return moved, scatters * min(behind, max(bucket, behind - backward)) + after

    def optimizer(self) -> float:
        """Seconds of the optimizer on what this rank owns."""
        share = 1 if self.recipe.strategy == "ddp" else self.layout.dp
        owned = self.params / share
        factor = {"sgd": 0.4, "lars": 0.5}.get(self.recipe.optimizer, 1.0)
        return owned * STATE_BYTES * self.recipe.state_bytes / 4 * factor / self.hardware.reachable_bytes_per_s

    def breakdown(self) -> Breakdown:
        """The step as named items, in seconds."""
        whole, own, sent = self.pipeline()
        ranks = range(self.p)
        slowest = max(ranks, key=lambda rank: sum(sum(self.work[s]) + sum(self.talk[s]) for s in self.mine(rank)))
        compute = self.m * sum(sum(self.work[s]) for s in self.mine(slowest))
        tp = self.m * sum(sum(self.talk[s]) for s in self.mine(slowest))
        pp = 2 * self.m * self.v * self.message_s()
        waits = max(0.0, whole - own) + max(0.0, sent - pp)
        dp, open_ = self.dp()
        flops = sum(item.value for item in self.shape.flops(1, checkpointing=self.recipe.checkpointing).items)
        batch, n = f"{self.setting.rows} rows x {self.m} micro-batches", self.layout.dp
        rows = [
            ("compute", compute, f"roofline of every op, {flops:,.0f} flops a token, {batch}", "labkit.plan.work"),
            ("tp", tp, f"{self.layout.tp} ranks, ring all_reduce of B T D, 4 a block", "arXiv:1909.08053, 3"),
            ("pp", pp, f"2 x {self.m} x {self.v} messages of B T D", "arXiv:2104.04473, 3.2"),
            ("dp", dp, f"{self.recipe.strategy} over n = {n}, S = bytes of the rank's weights", "arXiv:1910.02054, 7"),
            ("overlap", open_ - dp - max(0.0, pp - sent), "sent while computing", "arXiv:2006.15704, 3.2.3"),
            ("bubble", waits, f"{self.recipe.schedule}, p = {self.p}", "labkit.plan.schedule"),
            ("optimizer", self.optimizer(), f"{STATE_BYTES} bytes a parameter owned", "torch.optim, unfused"),
        ]  # fmt: skip
        return Breakdown(Item(name, value, "s", formula, source) for name, value, formula, source in rows)

    def mine(self, rank: int) -> range:
        """The stages of a rank."""
        return range(rank, self.p * self.v, self.p)
