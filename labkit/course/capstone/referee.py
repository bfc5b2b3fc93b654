"""The referee's part on the ranks and in the kernel: single steps, the weights handed in, one process to compare with.

    begin(group, task, way, make, path)    links, cap and a device in slow motion; builds the training step
    take_step(group, number)               one step on this rank's rows; (the loss that it reports, seconds)
    hand_in(group)                         (peak bytes, the weights that this rank holds)
    alone_loss(group, task)                 the loss on the validation text after the same steps in one plain process

The referee gives the rows, measures time and bytes, and checks the weights, whatever a training step reports about
itself. It cannot see memory that no operator of torch allocated (NumPy, C++). It protects against mistakes, not against
code that runs in the same process and means to deceive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.assemble import make_optimizer
from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.comm.shaped import Shaped, shape
from labkit.comm.traffic import Traffic
from labkit.course.capstone.forecast import Task, Way
from labkit.parallel.checkpoints import chunks
from labkit.probe.slow_device import SlowDevice
from labkit.train.data import batch
from labkit.train.gpt import GPT, cross_entropy

STATE, ALONE = "capstone", "capstone alone"
VALIDATION_ROWS = 16
Make = Callable[[Any, Any, Mesh], Any]
"""(config, recipe, mesh) -> a training step: step(tokens, targets, number) -> loss, with `.parts` or `.module`."""


class Run(NamedTuple):
    """One rank's state while an attempt is measured: its task, mesh, training step and slowed-down device."""

    task: Task
    mesh: Mesh
    step: Any
    device: SlowDevice


class ParameterPart(NamedTuple):
    """Some elements of a parameter of the whole model, as a rank holds them: `values` [k] from `offset` on, in shard
    `shard_index` of `n_shards` along `shard_dim` (None: in the whole parameter)."""

    name: str
    offset: int
    shard_dim: int | None
    shard_index: int
    n_shards: int
    values: Tensor


def begin(group: Group, task: Task, way: Way, make: Make, path: str) -> None:
    """Build the training step of this rank over the task's links, whose shared state is the file `path`.

    Over NCCL, too: links are shaped by holding back messages, which go by way of the host and have tags, and what a
    shaped group does is made of messages. NCCL is not asked for anything.

    Memory held only while it is built does not count, but what stays does: cap and peak begin with the first step."""
    forget(group)
    if isinstance(group.wire, Shaped):
        raise ValueError("a task brings its own links: make the cluster without links=")
    beat = getattr(group.ledger.witness, "beat", None)
    world = shape(group, Traffic(path, task.links(way.apart), beat))
    kind = group.device.partition(":")[0]
    device = SlowDevice(task.flops_per_s, task.launch_s, group.ledger, device=kind)
    with device:
        mesh = Mesh.connect(way.layout, world)
        step = make(task.config, way.recipe, mesh)
    device.reset_peak()
    group.state[STATE] = Run(task, mesh, step, device)


def take_step(group: Group, number: int) -> tuple[float, float]:
    """One step on this rank's rows of the text: (the loss that it reports, seconds)."""
    run: Run = group.state[STATE]
    base, dp = run.task.base, run.mesh.dp
    rows = batch(base.seed, number, dp.rank, dp.size, base.batch_size, run.task.config.seq, device=group.device)
    run.mesh.world.barrier()
    started = time.perf_counter()
    run.device.cap_bytes = None  # no cap on what was built: only new memory beyond the cap is refused
    with run.device:
        run.device.cap_bytes = run.task.cap_bytes
        loss = float(run.step(*rows, number))
    return loss, time.perf_counter() - started


def hand_in(group: Group) -> tuple[float, list[ParameterPart]]:
    """This rank's peak bytes, and the weights that it holds now."""
    run: Run = group.state[STATE]
    result = run.device.peak.total, list(parts_held(run.step, run.mesh))
    forget(group)
    return result


def forget(group: Group) -> None:
    """Drop the attempt's state on this rank."""
    group.state.pop(STATE, None)


def parts_held(step: Any, mesh: Mesh) -> Iterable[ParameterPart]:
    """The weights of a training step on this rank: those of its `parts` (labkit's own), or its whole `module`."""
    parts: Mapping[str, Any] | None = getattr(step, "parts", None)
    if parts is None:
        for name, p in step.module.named_parameters():
            yield ParameterPart(name, 0, None, 0, 1, _plain(p))
        return
    names = {(id(sync), own): whole for whole, (sync, own) in parts.items()}
    for sync in {id(sync): sync for sync, _ in parts.values()}.values():
        for chunk in chunks(sync):
            name = names[id(sync), chunk.name]
            yield ParameterPart(name, chunk.offset, chunk.shard_dim, mesh.tp.rank, mesh.tp.size, _plain(chunk.value))


def put_together(config: Any, held: Iterable[ParameterPart]) -> tuple[GPT, float, int]:
    """The whole model from the parts of all ranks: (model, the largest difference between copies of an element, how
    many elements nobody has)."""
    with torch.device("meta"):
        model = GPT(config, seed=0)
    model.to_empty(device="cpu")  # saves drawing initial weights that would be overwritten at once
    apart = 0.0
    own = {name: p.detach() for name, p in model.named_parameters()}
    seen = {name: torch.full_like(p, torch.nan) for name, p in own.items()}
    for part in held:
        if part.name not in seen:
            raise ValueError(f"{part.name} is handed in, and the model has no such parameter")
        whole = seen[part.name]
        where = whole
        if part.shard_dim is not None:
            where = whole.tensor_split(part.n_shards, part.shard_dim)[part.shard_index]
        flat = where.flatten()
        known = flat[part.offset : part.offset + part.values.numel()]
        off = (known - part.values).abs().nan_to_num(0.0)
        apart = max(apart, float(off.max()) if len(off) else 0.0)
        known.copy_(part.values)
        where.copy_(flat.view_as(where))
    missing = sum(int(p.isnan().sum()) for p in seen.values())
    for name, p in own.items():
        p.copy_(seen[name])
    return model, apart, missing


@torch.no_grad()
def validation_loss(model: GPT, task: Task) -> float:
    """The mean loss per byte of text that no step has seen."""
    rows = batch(task.base.seed, 0, 0, 1, VALIDATION_ROWS, task.config.seq, split="validation")
    return float(cross_entropy(model(rows[0]), rows[1]))


def alone_loss(group: Group, task: Task) -> float:
    """The task in one plain process: its loss on the validation text. The rank remembers it."""
    known: dict[str, float] = group.state.setdefault(ALONE, {})
    if task.key not in known:
        model = GPT(task.config, seed=task.base.seed)
        optimizer = make_optimizer(task.base)(list(model.parameters()))
        for number in range(task.steps):
            tokens, targets = batch(task.base.seed, number, 0, 1, task.base.batch_size, task.config.seq)
            optimizer.zero_grad()
            cross_entropy(model(tokens), targets).backward()
            optimizer.step()
        known[task.key] = validation_loss(model, task)
    return known[task.key]


def _plain(p: Tensor) -> Tensor:
    return p.detach().float().cpu().flatten().clone()
