"""The capstone: train a GPT on real text under a memory cap, on two nodes in slow motion; seconds x bytes is the score.

    entry = attempt(home(4), Layout(dp=4), home(4).recipe(strategy="zero3"), cluster)
    entry.score                    byte-seconds: median step of the slowest rank x highest bytes of the fullest rank

One plain cluster serves all tasks: an attempt brings links, cap and speed with it, so its ranks stay warm. An attempt
counts if it finished under the cap and the referee (referee.py) confirms three things:

    loss       with the weights handed in, the loss on validation text is that of one plain process
    replicas   copies of a weight are equal on all ranks
    wire       the ranks sent at least as many bytes as exact training needs

Seconds are real time. Most of it is spent sleeping, which makes machines comparable: messages take the time of the
task's links, products that of its slow device. A busy machine adds noise, hence the median.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from labkit.assemble import assemble
from labkit.course.capstone import referee
from labkit.course.capstone.entry import Entry
from labkit.course.capstone.forecast import Task, Way
from labkit.course.capstone.referee import Make
from labkit.launch.cluster import BareCluster
from labkit.launch.reply import WorkerError
from labkit.plan.job.recipe import Recipe
from labkit.plan.job.stages import blocks_of, state_params
from labkit.plan.machine.link import Link
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.step.bytes_sent import sent_per_step
from labkit.probe.memory import VirtualOutOfMemory
from labkit.train.config import GPTConfig

ALIKE = 1e-4
"""How far copies of a weight may differ: sums in another order differ in their last bits."""
LEAST = 0.95
"""The share of the law's bytes that must have been sent."""
REFERENCE = Path(__file__).with_name("reference.json")


def home(n_ranks: int = 4, steps: int = 3) -> Task:
    """The task: a slow link between the nodes, and a cap that plain replicas exceed."""
    config = GPTConfig(n_layer=max(4, n_ranks), d_model=96, n_head=8, vocab=256, seq=32, tied=False)
    return Task(
        "home", config, Recipe(batch_size=2 * n_ranks, lr=2e-3), steps,
        cap_bytes={2: 5_700_000, 4: 3_900_000}.get(n_ranks, 5_000_000),
        intra=Link("inside", 2e-4, 100e6), inter=Link("between", 1e-3, 5e6),
        flops_per_s=20e9, launch_s=3e-3, n_ranks=n_ranks,
    )  # fmt: skip


def tasks(n_ranks: int = 4, steps: int = 3) -> dict[str, Task]:
    """The three tasks: `home`, the same with a fast link, the same with a roomy cap."""
    first = home(n_ranks, steps)
    fast = first.changed(name="fast link", inter=Link("between", 2e-4, 80e6))
    return {task.name: task for task in (first, fast, first.changed(name="roomy", cap_bytes=20_000_000))}


def strategies(task: Task) -> dict[str, Way]:
    """Four ways, by name, whose order of scores differs between the tasks."""
    n, half = task.n_ranks, task.n_ranks // 2
    pipeline = task.recipe(n_micro=2, recompute="full")
    return {
        "replicas": Way(Layout(dp=n), task.recipe()),
        "shards": Way(Layout(dp=n), task.recipe(strategy="zero3", recompute="full", prefetch=0)),
        "pipeline": Way(Layout(pp=n), pipeline),
        "mixed": Way(Layout(dp=half, pp=2), task.recipe(strategy="zero1"), apart=half > 1),
    }


class Progress(NamedTuple):
    """The progress of an attempt: `done` of `of` calls. The last one has the entry."""

    done: int
    of: int
    entry: Entry | None = None


def attempt(
    task: Task,
    layout: Layout,
    recipe: Recipe,
    cluster: BareCluster,
    *,
    apart: bool = False,
    make: Make = assemble,
    made_by: str = "labkit",
) -> Entry:
    """Do a task on the ranks of `cluster`, and return its entry; going over the cap is a result, not an error.

    `make(config, recipe, mesh)` builds the training step. Another function than `assemble` must return a callable
    `(tokens, targets, number) -> loss` with the whole model as `.module`, or labkit's `.parts`. `apart` puts neighbours
    in rank on different nodes. ValueError, before anything runs, for a way that does another task."""
    entry = None
    for progress in attempting(task, Way(layout, recipe, apart), cluster, make, made_by):
        entry = progress.entry
    assert entry is not None
    return entry


def attempting(
    task: Task, way: Way, cluster: BareCluster, make: Make = assemble, made_by: str = "labkit"
) -> Iterator[Progress]:
    """`attempt`, call by call: the iteration may stop between two calls, and the ranks are then as they were."""
    task.check(way)
    if cluster.n_ranks != task.n_ranks:
        raise ValueError(f"the task wants {task.n_ranks} ranks, the cluster has {cluster.n_ranks}")
    of, words, losses, step_s = task.steps + 3, EntryWriter(task, way, made_by), [], []
    last: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        try:
            cluster.run(referee.begin, task, way, make, str(Path(folder) / "traffic"))
            yield Progress(1, of)
            for number in range(task.steps):
                last = cluster.run(referee.take_step, number)
                losses.append(last[0].value[0])
                step_s.append(max(reply.value[1] for reply in last))
                yield Progress(number + 2, of)
            held = [reply.value for reply in cluster.run(referee.hand_in)]
        except WorkerError as error:
            cluster.run(referee.forget)
            yield Progress(of, of, words.refused(error, len(losses)))
            return
        except GeneratorExit:
            cluster.run(referee.forget)
            raise
    yield Progress(task.steps + 2, of)
    alone = cluster.on(0).run(referee.alone_loss, task)[0].value
    measured = {
        "step_s": tuple(step_s[1:]),
        "peak_bytes": tuple(int(peak) for peak, _ in held),
        "sent_bytes": tuple(reply.ledger.sent_bytes() for reply in last),
        "losses": tuple(losses),
    }
    yield Progress(of, of, words.judged(measured, [part for _, parts in held for part in parts], alone))


class EntryWriter:
    """Writes the entries for one attempt."""

    def __init__(self, task: Task, way: Way, made_by: str) -> None:
        """Collect what is known before the attempt."""
        self.task, self.way = task, way
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        self.common: dict[str, Any] = {
            "task": task.name, "task_key": task.key, "way": way, "made_by": made_by, "when": when,
            "machine": this_machine(),
        }  # fmt: skip

    def refused(self, error: WorkerError, done: int) -> Entry:
        """The entry of an attempt that went over the cap; any other error is raised again."""
        failure = error.errors.get(error.rank)
        cause = failure.exception() if failure is not None else None
        if not isinstance(cause, VirtualOutOfMemory):
            raise error
        message = f"out of memory on rank {error.rank} in step {done}: {cause.wanted}"
        return Entry(**self.common, refused=message)

    def judged(self, measured: Mapping[str, Any], held: list[referee.ParameterPart], alone: float) -> Entry:
        """The entry of an attempt that finished, with what was measured and what is wrong with it."""
        model, apart, missing = referee.put_together(self.task.config, held)
        faults, validation = [], None if missing else referee.validation_loss(model, self.task)
        if validation is None:
            faults.append(f"weights: {missing:,} elements were handed in by no rank")
        elif not abs(validation - alone) <= self.task.tolerance:
            faults.append(
                f"loss: {validation:.4f} on the validation text, one process has {alone:.4f} after the same steps"
            )
        if apart > ALIKE:
            faults.append(f"replicas: copies of a weight are {apart:.2g} apart on different ranks")
        sent, law = sum(measured["sent_bytes"]), least_bytes(self.task, self.way)
        if sent < LEAST * law:
            faults.append(f"wire: {sent:,} B were sent in a step, exact training sends {law:,.0f} B or more")
        return Entry(**self.common, **measured, validation=validation, alone=alone, faults=tuple(faults))


def least_bytes(task: Task, way: Way) -> float:
    """The bytes that all ranks together must send in a step along the axes of this way, by the cheapest strategy."""
    shape, layout, base = ModelShape.of(task.config), way.layout, task.base
    params, total = state_params(shape, layout.tp, layout.pp, way.recipe.stages_per_rank), 0.0
    plain = task.recipe(schedule=way.recipe.schedule, stages_per_rank=way.recipe.stages_per_rank)
    for rank in range(layout.size):
        place = layout.coords(rank)["pp"]
        law = sent_per_step(
            layout, plain, rank, parameter_bytes=round(4 * params[place]), d_model=task.config.d_model,
            n_layer=blocks_of(shape, layout.pp)[place], seq=task.config.seq,
        )  # fmt: skip
        total += law.total / (layout.tp if way.recipe.sequence_parallel else 1)
    assert base.precision == "fp32"
    return total


def this_machine() -> dict[str, Any]:
    """Facts about this machine that are stored with an entry."""
    import torch

    return {"cores": os.cpu_count(), "processor": platform.machine(), "torch": torch.__version__}


def reference(path: Path = REFERENCE) -> tuple[dict[str, Any], list[Entry]]:
    """The stored reference entries, and the machine that they were measured on. Made by benchmarks/capstone.py."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    return stored["machine"], [Entry.of_json(entry) for entry in stored["found"]]
