"""Claims on jobs that hang, run out of memory or turn to NaN: each cure that they name is tried."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from labkit.capped import Cluster
from labkit.comm.group import Group
from labkit.comm.native import dist
from labkit.course.claims.finding import Finding, Setting
from labkit.course.clinic.pool import Pool
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.rehearsal import rehearse
from labkit.train.config import GPTConfig


def started(timeout: int | float | timedelta) -> str:
    """The result of making a process group with this time-out: the group, or the name of the error."""
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        return type(error).__name__
    dist.destroy_process_group()
    return "a process group"


def c46() -> Finding:
    """Make a process group with the claim's time-out, as an int and as a float."""
    success = "a process group"
    return Finding.of(
        [
            Setting("timeout=1800", success, started(1800), measured=True),
            Setting("timeout=1800.0", success, started(1800.0), measured=True),
        ]
    )


def epoch(group: Group, batches: tuple[int, ...], folder: str) -> str:
    """One all-reduce for each batch; returns how it ends for this rank.

    A rank that has ended leaves a file, whose name is how many batches it had. So a rank that waits in an all-reduce
    knows without a clock whether anybody will never come to it."""
    for place in range(batches[group.rank]):
        work = group.all_reduce_start(torch.ones(8))
        while not work.done:
            if any(int(ended.name) <= place for ended in Path(folder).iterdir()):
                return "hangs"
            time.sleep(1e-3)
    (Path(folder) / f"{batches[group.rank]}").touch()
    return "ends"


def c47() -> Finding:
    """Give two ranks shards of different sizes, in batches of 4 from torch's loader, and see how rank 0 ends."""

    def ends(rows: tuple[int, ...], drop_last: bool) -> str:
        batches = tuple(len(DataLoader(range(n), batch_size=4, drop_last=drop_last)) for n in rows)  # type: ignore[arg-type]
        with TemporaryDirectory() as folder, Cluster(2, "cpu", quiet=True) as cluster:
            # a new cluster each time: a hung rank leaves an all-reduce behind
            return str(cluster.run(epoch, batches, folder)[0].value)

    return Finding.of(
        [
            Setting("9 and 8 rows", "hangs", ends((9, 8), drop_last=False), measured=True),
            Setting("9 and 8 rows, the last batch dropped", "ends", ends((9, 8), drop_last=True), measured=True),
            Setting("8 and 7 rows, the last batch dropped", "ends", ends((8, 7), drop_last=True), measured=True),
        ],
        premise="the shards have the same number of whole batches",
    )


KIB, DEVICE = 1024, 1024 * 1024
SAMPLE, KEPT, LONGER = 48 * KIB, 16 * KIB, 192 * KIB
"""Bytes that are read, those kept of it, and a longer batch. A sample and the kept part of another fill a segment."""


def crowded(fraction: float = 1.0, one_at_a_time: bool = False) -> Pool:
    """A device on which 15 samples are read and a part of each is kept: all read first, or one at a time."""
    pool, samples = Pool(round(DEVICE * fraction)), []
    for _ in range(15):
        samples.append(pool.malloc(SAMPLE))
        pool.malloc(KEPT)
        if one_at_a_time:
            pool.free(samples.pop())
    for piece in samples:
        pool.free(piece)
    return pool


def fits(pool: Pool) -> str:
    """Say whether the pool has room for a longer batch."""
    try:
        pool.malloc(LONGER)
    except torch.OutOfMemoryError:
        return "out of memory"
    return "fits"


def c48() -> Finding:
    """Try both cures on a simulated caching allocator whose free bytes lie in holes; torch's own needs a GPU."""
    plain, emptied, capped, both = crowded(), crowded(), crowded(0.95), crowded(0.95)
    free, hole = plain.reserved - plain.allocated, plain.largest_free
    emptied.empty_cache()
    both.empty_cache()
    return Finding.of(
        [
            Setting("the cache emptied", "fits", fits(emptied)),
            Setting("a memory fraction of 0.95", "fits", fits(capped)),
            Setting("both", "fits", fits(both)),
        ],
        wanted_bytes=LONGER,
        free_bytes=free,
        largest_hole_bytes=hole,
        fits_untreated=float(fits(plain) == "fits"),
        fits_one_at_a_time=float(fits(crowded(one_at_a_time=True)) == "fits"),
    )


def clipped(grad: list[float]) -> Tensor:
    """Gradients after torch's clipping to a norm of 1."""
    p = nn.Parameter(torch.zeros(len(grad)))
    p.grad = torch.tensor(grad)
    nn.utils.clip_grad_norm_([p], 1.0)
    return p.grad


def c100() -> Finding:
    """Let a gradient overflow in an fp16 backward pass, clip it with torch, and count what is left."""
    w = torch.ones(4, dtype=torch.float16, requires_grad=True)
    (w * torch.tensor([1.0, 2.0, 4.0, 8.0]).half()).sum().mul(2.0**14).backward()
    assert w.grad is not None
    before = w.grad.float()
    after = clipped(before.tolist())
    return Finding.of(
        [
            Setting("gradients not finite after clipping", 0, int((~after.isfinite()).sum()), measured=True),
            Setting("gradients that still say something", 4, int((after.nan_to_num() != 0).sum()), measured=True),
        ],
        not_finite_before=int((~before.isfinite()).sum()),
        norm_of_healthy_ones_after=float(clipped([3.0, 4.0]).norm()),
    )


def scales(loss_at: float, steps: int = 60) -> list[float]:
    """torch's loss scale after each step, for a weight whose gradient is the scale times `loss_at`."""
    w = nn.Parameter(torch.zeros(1))
    scaler, optimizer, history = torch.amp.GradScaler("cpu", init_scale=2.0**40), torch.optim.SGD([w], lr=0.0), []
    for _ in range(steps):
        w.grad = None
        loss = (w.half() * loss_at).sum().float()  # its gradient passes through fp16
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append(scaler.get_scale())
    return history


def c89() -> Finding:
    """Start torch's GradScaler too high, once with gradients that fp16 can hold at some scale and once with NaN."""
    well, ill = scales(1.0), scales(math.nan)
    return Finding.of(
        [
            Setting("sound model: steps of the last 30 that halve it", 0, halved(well[30:]), measured=True),
            Setting("a NaN in the model: steps of the last 30 that halve it", 29, halved(ill[30:]), measured=True),
        ],
        settles_at=well[-1],
        sound_steps_to_settle=halved(well) + 1,
    )


def halved(seen: list[float]) -> int:
    """The number of steps after which the loss scale was smaller than before. `seen`: the scale after each step."""
    return sum(b < a for a, b in zip(seen, seen[1:], strict=False))


def c101() -> Finding:
    """Rehearse a GPT's step under DDP and ZeRO-3 with the same rows per rank: what autograd holds, and the peak."""
    config = GPTConfig(n_layer=1, d_model=256, n_head=4, vocab=512, seq=256)
    ddp, zero3 = (rehearse(config, Layout(dp=8), Recipe(name, batch_size=64)) for name in ("ddp", "zero3"))
    acts = [
        sum(tensor.n_bytes for tensor in run.saved if not tensor.is_repeat and tensor.kind == "activations")
        for run in (ddp, zero3)
    ]
    state = [sum(run.before[kind] for kind in ("parameters", "gradients", "optimizer")) for run in (ddp, zero3)]
    return Finding.of(
        [
            Setting("activations of a rank, FSDP over DDP", 1.0, acts[1] / acts[0], within=0.01, measured=True),
            Setting("peak of a rank, FSDP over DDP", 0.5, zero3.peak / ddp.peak, rule="above", measured=True),
        ],
        state_share=state[1] / state[0],
    )
