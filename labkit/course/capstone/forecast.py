"""The capstone's task as a value, and the predicted seconds x bytes of a way to do it, before anything runs.

    score = seconds of a step x bytes of the fullest rank                                   lower is better

    a task fixes         the model, the batch, the steps, the optimizer and its learning rate; the ranks, their speed,
                         their cap, the links inside a node and between the two nodes
    a way chooses        layout and placing; strategy, schedule, micro-batches, checkpointing, sequence parallel, ...

Bytes are those of `predict_memory`. Seconds are those of `predict_step` on a device that does `flops_per_s` and takes
no time for anything but products. Each axis has the share of the links that the two nodes leave it
(plan/step/wire_time.py), so a way may also put neighbours in rank on different nodes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from labkit.plan.breakdown import Breakdown
from labkit.plan.job.recipe import Recipe
from labkit.plan.job.stages import check_plan
from labkit.plan.machine.hardware import Hardware
from labkit.plan.machine.link import Link
from labkit.plan.machine.topology import Links
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.search.search import layouts
from labkit.plan.step.memory import predict_memory
from labkit.plan.step.rank import fullest_ranks
from labkit.plan.step.time import StepTime
from labkit.plan.step.wire_time import apart, hops, slowest, together

FREE = (
    "strategy", "schedule", "n_micro", "stages_per_rank", "recompute", "checkpointing", "sequence_parallel",
    "bucket_bytes", "prefetch",
)  # fmt: skip
"""The fields of a recipe that a way may choose: none of them changes what is learned."""
MUCH_MEMORY_S = 1e15
"""Bytes per second of the slow device's memory, so high that ops other than products take no time."""


@dataclass(frozen=True)
class Way:
    """One way to do a task: a layout and a recipe; `apart`: neighbours in rank lie on different nodes."""

    layout: Layout
    recipe: Recipe
    apart: bool = False

    def __str__(self) -> str:
        """A way in words: `dp 2, pp 2, apart: 1f1b of 4, checkpointing`"""
        lay, r = self.layout, self.recipe
        axes = [f"{axis} {getattr(lay, axis)}" for axis in ("dp", "pp", "tp") if getattr(lay, axis) > 1]
        parts = [r.strategy] if lay.dp > 1 else []
        parts += [f"{r.schedule} of {r.n_micro}"] if lay.pp > 1 else [f"{r.n_micro} micro-batches"] * (r.n_micro > 1)
        parts += ["no prefetch"] * (lay.dp > 1 and r.strategy == "zero3" and r.prefetch == 0)
        parts += [r.again] * bool(r.again)
        parts += ["sequence parallel"] * (r.sequence_parallel and lay.tp > 1)
        return ", ".join((axes or ["1 rank"]) + ["apart"] * self.apart) + ": " + (", ".join(parts) or "plain")


@dataclass(frozen=True)
class Task:
    """A task: the training to be done, and the ranks, cap and links to do it with.

    config       the model's sizes (a GPTConfig)
    base         the recipe, with the choices that nobody may change: batch_size, optimizer, lr, precision, seed, ...
    steps        steps of an attempt; the first is not timed
    cap_bytes    bytes that a rank may hold
    intra, inter links inside a node and between the two nodes (with one rank per node, only `inter`)
    flops_per_s, launch_s   of a rank, a device in slow motion: its speed, and the time to start an op
    tolerance    how far the loss on the validation text may be from that of one process
    """

    name: str
    config: Any
    base: Recipe
    steps: int
    cap_bytes: int
    intra: Link
    inter: Link
    flops_per_s: float
    launch_s: float = 0.0
    n_ranks: int = 4
    tolerance: float = 2e-4

    def __post_init__(self) -> None:
        if self.n_ranks < 2 or self.n_ranks % 2:
            raise ValueError(f"two nodes share the ranks: n_ranks={self.n_ranks} is to be even, and at least 2")
        if self.steps < 2 or self.cap_bytes < 1 or not self.flops_per_s > 0:
            raise ValueError(
                f"a task has 2 steps or more (the first is not timed), a cap and a speed above 0: steps={self.steps}, "
                f"cap_bytes={self.cap_bytes}, flops_per_s={self.flops_per_s}"
            )

    def changed(self, **changes: Any) -> Task:
        """The same task with other fields."""
        return replace(self, **changes)

    def recipe(self, **choices: Any) -> Recipe:
        """The task's recipe with your choices. ValueError for one that is not free."""
        fixed = sorted(set(choices) - set(FREE))
        if fixed:
            raise ValueError(f"{', '.join(fixed)}: not yours to choose here; free are {', '.join(FREE)}")
        return replace(self.base, **choices)

    def links(self, apart_: bool = False) -> Links:
        """The links of the two nodes, with neighbours in rank together or apart."""
        nodes = (apart if apart_ else together)(self.n_ranks)
        return Links.placed(nodes, self.intra, self.inter)

    def check(self, way: Way) -> None:
        """ValueError, with the numbers, for a way that does another task or cannot be built."""
        if way.layout.size != self.n_ranks:
            raise ValueError(f"{way.layout} has {way.layout.size} ranks, the task {self.n_ranks}")
        for field in fields(Recipe):
            wanted, value = getattr(self.base, field.name), getattr(way.recipe, field.name)
            if field.name not in FREE and wanted != value:
                raise ValueError(f"{field.name}={value!r}: the task says {wanted!r}, or another thing would be learned")
        check_plan(ModelShape.of(self.config), way.recipe, way.layout)

    @cached_property
    def key(self) -> str:
        """Eight hexadecimal digits, a hash of all fields; the board files entries under them."""
        return hashlib.blake2b(repr(self).encode(), digest_size=4).hexdigest()


@dataclass(frozen=True)
class Forecast:
    """The prediction for a way: seconds of a step, bytes of the fullest rank. `fits`: the cap allows it."""

    step: Breakdown
    memory: Breakdown
    cap_bytes: int

    @property
    def score(self) -> float:
        """The predicted score in byte-seconds."""
        return self.step.total * self.memory.total

    @property
    def fits(self) -> bool:
        """True if the fullest rank stays under the cap."""
        return self.memory.total <= self.cap_bytes


def forecast(task: Task, way: Way) -> Forecast:
    """The prediction for one way. ValueError for a way that `Task.check` refuses."""
    task.check(way)
    shape = ModelShape.of(task.config)
    memory = max(
        (predict_memory(shape, way.layout, way.recipe, rank) for rank in fullest_ranks(shape, way.layout, way.recipe)),
        key=lambda memory_: memory_.total,
    )
    return Forecast(step_time(shape, task, way).breakdown(), memory, task.cap_bytes)


def ways(task: Task) -> list[tuple[Way, Forecast]]:
    """Every way worth a look, whether it fits or not, best score first."""
    shape, forecasts = ModelShape.of(task.config), []
    for layout in layouts(task.n_ranks):
        rows = task.base.batch_size // layout.dp
        for way in _on(task, layout, rows):
            try:
                check_plan(shape, way.recipe, layout)
            except ValueError:
                continue
            forecasts.append((way, forecast(task, way)))
    return sorted(forecasts, key=lambda entry: entry[1].score)


def _on(task: Task, layout: Layout, rows: int) -> list[Way]:
    strategies = ("ddp", "zero1", "zero2", "zero3") if layout.dp > 1 else ("ddp",)
    schedules = ("1f1b", "zero_bubble") if layout.pp > 1 else ("1f1b",)
    micros = [m for m in (1, 2, 4, 8) if rows % m == 0]
    placings = (False, True) if sum(size > 1 for size in (layout.dp, layout.pp, layout.tp)) > 1 else (False,)
    ways_ = []
    for strategy in strategies:
        for schedule in schedules:
            for m in micros:
                for recompute in ("none", "full"):
                    choices = {"strategy": strategy, "schedule": schedule, "n_micro": m, "recompute": recompute}
                    if schedule == "zero_bubble" and (recompute == "full" or strategy == "zero3"):
                        continue
                    ahead = (1, 0) if strategy == "zero3" else (1,)
                    recipes = [task.recipe(**choices, prefetch=ahead_) for ahead_ in ahead]
                    ways_ += [Way(layout, recipe, placing) for recipe in recipes for placing in placings]
    return ways_


def step_time(shape: ModelShape, task: Task, way: Way) -> StepTime:
    """A step on a task's devices, each axis over the share of the links that the placing gives it."""
    # "cuda", since shaped links have their own reduce_scatter, as NCCL does
    device = Hardware.measured(task.flops_per_s, MUCH_MEMORY_S, intra=task.intra, inter=task.inter, device="cuda")
    device, links = device.changed(launch_s=task.launch_s), {}
    for axis in ("dp", "pp", "tp"):
        link = share_of_links(way.layout, axis, task.links(way.apart))
        links[axis] = device.changed(intra=link, inter=link)
    links["dp"] = links["dp"].changed(node_size=way.layout.size)
    return StepTime(shape, way.layout, way.recipe, device, links=links)


def share_of_links(layout: Layout, axis: str, links: Links) -> Link:
    """The link that a rank has along an axis while all groups of it talk: the slowest hop. For an axis of 1: endless
    speed."""
    hop_pairs = [pairs for pairs in hops(layout, axis) if pairs]
    if getattr(layout, axis) == 1 or not hop_pairs:
        return Link(axis, 0.0, MUCH_MEMORY_S)
    alpha = max(slowest(pairs, 0.0, links) for pairs in hop_pairs)
    million = max(slowest(pairs, 1e6, links) for pairs in hop_pairs)
    return Link(axis, alpha, 1e6 / (million - alpha))
