"""`labkit train --elastic`: a run on ranks that an engine starts, which goes on with those that are left.

    torchrun --nnodes 1:4 --nproc-per-node 1 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
             -m labkit train --elastic --out runs/first --save-every 10

    4 agents     |  dp 4: steps 0 to 37  |X one dies            the engine sees it, ends the other workers,
    3 agents                                | dp 3: from 30 |   and starts them with the ranks that it has
    4 agents                                                 | dp 4: from 60 ...     (another agent has come)

A worker does the same each time it is started: see how many there are, choose the largest dp that the batch can be
divided by, load the last whole checkpoint in `--out`, if there is one, into that layout, and train. pp and tp stay. A
worker that the batch has no row for is a spare: it waits. Which data a step sees depends on (seed, step) alone, so in
the same layout the losses are those of the unbroken run, bit for bit; in another one sums are taken in another order.

Detection, restart and placement are the engine's; `--save-every` is what a death costs at most, besides the restart.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.course.training.run_lock import run_lock
from labkit.course.training.training import Order, life, report_of, write_report
from labkit.course.training.training_report import TrainingReport
from labkit.plan.job.recipe import check
from labkit.plan.partition.layout import Layout

if TYPE_CHECKING:
    from labkit.comm.group import Group

ID_BYTES = 16
"""Letters of a run's id."""


def train(order: Order) -> TrainingReport | None:
    """Train as one of the processes that an engine has started; the report on rank 0, None on all others.

    `order.layout` gives pp and tp, and its dp is not looked at. ValueError without a folder, without an engine, and if
    no dp fits the number of processes."""
    from labkit.launch.agent import agent_world, n_started
    from labkit.parallel.checkpoint_write import folders

    if not order.run:
        raise ValueError("an elastic run goes on from its checkpoints: name a folder, --out runs/first")
    layout = fitting(order, n_started())
    with agent_world(layout.size, order.device) as world:
        if world is None:
            return None
        folder = Path(order.run)
        began = world.rank == 0 and bool(folders(folder))
        with run_lock(folder, began) if world.rank == 0 else nullcontext("") as own_id:
            run_id, resume = agreed(own_id, began, world)
            order = replace(order, layout=layout, resume=resume, run_id=run_id, device=world.device)
            if world.rank == 0:
                print(f"{n_started()} processes: {layout}{', from the last checkpoint' if resume else ''}", flush=True)
            reply = life(world, order)
            if world.rank:
                return None
            report = report_of(order, [reply])
            write_report(report, folder)
            return report


def fitting(order: Order, n_processes: int) -> Layout:
    """The layout with the largest dp for so many processes. ValueError with the last reason if there is none."""
    apart = order.layout.pp * order.layout.cp * order.layout.tp
    parts = f" x {order.layout.cp} parts of each row" * (order.layout.cp > 1)
    tensor = f"{order.layout.tp} tensor-parallel ranks"
    reason = f"{order.layout.pp} stages{parts} x {tensor} are more than {n_processes} processes"
    for dp in range(n_processes // apart, 0, -1):
        layout = replace(order.layout, dp=dp)
        try:
            check(order.config, order.recipe, layout)
        except ValueError as error:
            reason = str(error)
        else:
            return layout
    raise ValueError(f"no dp fits {n_processes} processes: {reason}")


def agreed(run_id: str, resume: bool, world: Group) -> tuple[str, bool]:
    """Rank 0's run id and whether there is a checkpoint to go on from, on every rank."""
    import torch

    text = [*run_id.encode().ljust(ID_BYTES), resume]
    text = world.broadcast(torch.tensor(text, dtype=torch.uint8, device=world.device)).tolist()
    return bytes(text[:ID_BYTES]).decode().strip(), bool(text[ID_BYTES])
