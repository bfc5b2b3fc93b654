"""Claims on runs that survive: failures, how often to save, what a checkpoint holds, and going on afterwards."""

from __future__ import annotations

import contextlib
import io
import random
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from labkit.capped import Cluster
from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.course.claims.finding import Finding, Setting
from labkit.course.training.training import Order, train
from labkit.parallel import checkpoints
from labkit.parallel.ddp import DDP
from labkit.parallel.local_sgd import LocalSGD, diloco
from labkit.parallel.zero3 import ZeRO3
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.plan.pocket import survival
from labkit.train.config import GPTConfig


def first_stop(device_s: float, n_devices: int, dice: random.Random) -> float:
    """Seconds until the first of n devices fails, each drawn by itself."""
    return min(dice.expovariate(1 / device_s) for _ in range(n_devices))


def c107() -> Finding:
    """Draw the first failure among 16,384 devices of six years each, 60 times, and among 1,024 of them."""
    dice, year_s = random.Random(18), 365 * survival.DAY_S
    settings = []
    for n_devices, hours in ((16_384, 3.2), (1024, 51.3)):
        stops = [first_stop(6 * year_s, n_devices, dice) / survival.HOUR_S for _ in range(60)]
        settings.append(Setting(f"{n_devices:,} devices", hours, sum(stops) / len(stops), "h", within=0.4))
    return Finding.of(settings, law_h=survival.job_mtbf(6 * year_s, 16_384) / survival.HOUR_S)


def c108() -> Finding:
    """Play the run event by event at Young's interval, and at 12 others, with dear and with cheap checkpoints."""
    settings = []
    for name, block_s in (("C = 60 s", 60.0), ("C = 10 s", 10.0), ("C = 2 h", 7200.0)):
        job = survival.Job(3 * survival.HOUR_S, block_s)
        young_s = survival.young(job)
        tried = [young_s * 1.3 ** (k - 6) for k in range(13)]
        best = max(survival.simulated(job, interval_s, 1500).goodput for interval_s in tried)
        settings.append(Setting(name, best, survival.simulated(job, young_s, 1500).goodput, "of the time", within=0.02))
    return Finding.of(settings, premise="a checkpoint is short beside the time between failures")


def written(group: Group, folder: str) -> int:
    """Save a model under ZeRO-3; the bytes of this rank's file."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    sync = ZeRO3(model, group, lambda params: torch.optim.AdamW(params, lr=1e-3))
    names = {name: name for name, _ in model.named_parameters()}
    sync.zero_grad()
    model(torch.randn(4, 256)).square().mean().backward()
    sync.finish()
    sync.step()
    mesh = Mesh.connect(Layout(dp=group.size), group)
    path = checkpoints.save(folder, 1, checkpoints.parts_of([(sync, names)]), mesh)
    return (path / f"rank-{group.rank}.pt").stat().st_size


def c109() -> Finding:
    """Save one model from 1, 2 and 4 ranks, and look at the files."""
    total, settings = 0, []
    for n_ranks in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder, Cluster(n_ranks, device="cpu", quiet=True) as cluster:
            sizes = [reply.value for reply in cluster.run(written, folder)]
        total = total or sum(sizes)
        if n_ranks > 1:
            settings.append(
                Setting(f"{n_ranks} ranks, all files", total / n_ranks, sum(sizes), "B", within=0.1, measured=True)
            )
    return Finding.of(settings, gathered_bytes=total, largest_of_4_bytes=max(sizes))


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(params, lr=0.1)


def sent(group: Group, every: int, steps: int) -> float:
    """Bytes that this rank sends in `steps` steps of DiLoCo, as a share of those of DDP."""
    by_way = []
    for way in ("diloco", "ddp"):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        if way == "ddp":
            sync: DDP | LocalSGD = DDP(model, group, sgd)
        else:
            sync = LocalSGD(model, group, sgd, every, diloco)
        group.ledger.clear()
        for _ in range(steps):
            sync.zero_grad()
            model(torch.randn(4, 64)).square().mean().backward()
            if isinstance(sync, DDP):
                sync.finish()
            sync.step()
        by_way.append(group.ledger.sent_bytes())
    return by_way[0] / by_way[1]


def c110() -> Finding:
    """Count what DiLoCo and DDP send on two ranks, for two numbers of steps between two meetings."""
    with Cluster(2, device="cpu", quiet=True) as cluster:
        shares = {every: cluster.run(sent, every, 2 * every)[0].value for every in (4, 20)}
    return Finding.of(
        [Setting(f"H = {every}", 1 / every, share, "of DDP's bytes", measured=True) for every, share in shares.items()]
    )


def c111() -> Finding:
    """Stop a run after half of its steps; go on with as many ranks and with fewer; compare losses."""
    config = GPTConfig(n_layer=2, d_model=32, n_head=2, seq=16)
    losses = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        order = Order(config, Recipe("zero1", batch_size=12), Layout(dp=4), 8, device="cpu")
        whole = train(order).losses
        for n_ranks in (4, 3):
            run = str(Path(folder, f"on-{n_ranks}"))
            train(replace(order, steps=4, run=run))
            losses[n_ranks] = train(replace(order, layout=Layout(dp=n_ranks), run=run, resume=True)).losses
    far = {n: max(abs(a[1] - b[1]) for a, b in zip(whole, some, strict=True)) for n, some in losses.items()}
    words = {n: "the same bits" if off == 0 else "close" if off < 1e-4 else "others" for n, off in far.items()}
    return Finding.of(
        [
            Setting("4 ranks, then 4", "the same bits", words[4], measured=True),
            Setting("4 ranks, then 3", "the same bits", words[3], measured=True),
        ],
        premise="the layout is the same",
        apart_on_3=far[3],
    )
