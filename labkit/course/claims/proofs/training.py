"""Claims on ways to train on many ranks, overlapped, stale or compressed; each of them is run."""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from labkit.capped import Cluster
from labkit.comm.group import Group, Work
from labkit.comm.local import run_threads
from labkit.course.claims.finding import Finding, Setting
from labkit.course.claims.proofs.gradients import Descent
from labkit.parallel.async_sgd import ParameterServer, Worker
from labkit.parallel.compress import TopK
from labkit.parallel.ddp import DDP
from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.hardware import Hardware
from labkit.plan.machine.topology import Links
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.pocket.stale_gradients import best, limit
from labkit.plan.step.time import predict_step
from labkit.probe.paced import pace

BYTES_PER_S, BACKWARD_S, LAYERS = 10e6, 0.025, 4


class Wait(NamedTuple):
    """What a rank of DDP still waits for when backward ends: buckets that are not summed yet, and the time until all
    are, in times of one bucket."""

    n_buckets: int
    time: float


def wait_of(group: Group, width: int) -> Wait:
    """What finish() waits for, with one bucket for each of the paced layers."""
    layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))
    n_bytes = 4 * width * width
    sync = DDP(layers, group, Descent, bucket_bytes=n_bytes)  # type: ignore[arg-type]
    x = torch.ones(1, width)
    for layer in layers:
        x = pace(layer(x), backward_s=BACKWARD_S)
    x.sum().backward()
    began = time.perf_counter()
    not_summed = sum(isinstance(bucket.work, Work) and not bucket.work.done for bucket in sync.buckets)
    sync.finish()
    seconds = time.perf_counter() - began
    sync.close()
    return Wait(not_summed, seconds / (n_bytes / BYTES_PER_S))


def exposed(hardware: Hardware) -> tuple[float, float]:
    """For a planned DDP step: the share of the gradients' time that nothing hides, and the last bucket's share."""
    shape, recipe = ModelShape.preset("gpt2-xl"), Recipe("ddp", batch_size=32, precision="bf16")
    step = predict_step(shape, Layout(dp=8), recipe, hardware)
    return (step["dp"] + step["overlap"]) / step["dp"], recipe.bucket_bytes / (recipe.gradient_bytes * shape.n_params)


def c58() -> Finding:
    """Pace backward and throttle the links, so that a bucket takes a third of, or twice, a layer's time; count the
    buckets that are still on their way when backward ends.

    The last bucket leaves at that moment, so it is always among them. By the law of a queue there are no others on the
    fast link, and on the slow one all but the first."""
    with Cluster(2, "cpu", links=Links.uniform(2, bytes_per_s=BYTES_PER_S), quiet=True) as cluster:
        fast = min(reply.value for _ in range(3) for reply in cluster.run(wait_of, 144))
        slow = min(reply.value for reply in cluster.run(wait_of, 353))
    h100 = Hardware.preset("h100")
    (nvlink, bucket), (network, _) = exposed(h100), exposed(h100.changed(node_size=1))
    return Finding.of(
        [
            Setting("link faster than backward: buckets waited for", 1, fast.n_buckets, within=0, measured=True),
            Setting("link slower than backward: buckets waited for", 1, slow.n_buckets, within=0, measured=True),
            Setting("GPT-2 XL, 8 H100s on NVLink: share exposed", bucket, nvlink, rule="at most"),
            Setting("GPT-2 XL, 8 H100s on InfiniBand: share exposed", bucket, network, rule="at most"),
        ],
        premise="the link takes a bucket away faster than backward makes the next",
        fast_wait_in_bucket_times=fast.time,
        slow_wait_in_bucket_times=slow.time,
        slow_wait_by_law=LAYERS - (LAYERS - 1) * BACKWARD_S * BYTES_PER_S / (4 * 353**2),
    )


def in_turns(group: Group, lr: float, rounds: int) -> float:
    """|w| of w^2 / 2 after three workers have taken turns at a server, with each gradient two steps old."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    if group.rank == 0:
        ParameterServer(model, group, partial(Descent, lr=lr)).serve()  # type: ignore[arg-type]
        return abs(model.weight.item())
    first, last = group.rank == 1, group.rank == group.size - 1
    with Worker(model, group) as worker:
        for step in range(rounds):
            if not first or step:
                group.recv(group.size - 1 if first else group.rank - 1, tag=7)
            if step:
                worker.push()
            worker.pull()
            if not (last and step == rounds - 1):
                group.send(torch.zeros(1), 1 if last else group.rank + 1, tag=7).wait()
            (model.weight.square().sum() / 2).backward()
    return 0.0


def c59() -> Finding:
    """Run a parameter server and three workers on a quadratic, with the best rate for fresh and for stale gradients."""
    with Cluster(4, "cpu", quiet=True) as cluster:
        fresh_rate, stale_rate = (cluster.run(in_turns, lr, 9)[0].value for lr in (best(0), best(2)))
    return Finding.of(
        [
            Setting(
                "the rate of fresh gradients: error over that at the start",
                1.0,
                fresh_rate,
                rule="above",
                measured=True,
            ),
            Setting("a smaller rate: error over that at the start", 1.0, stale_rate, rule="above", measured=True),
        ],
        premise="the learning rate is that of fresh gradients",
        bears_fresh=limit(0),
        bears_two_steps_old=limit(2),
    )


def rank_sends(group: Group, numel: int, fraction: float) -> int:
    """Bytes that rank 0 sends for a buffer of gradients: all of it, or its largest elements with their indices."""
    grads = torch.arange(numel, dtype=torch.float32)
    if fraction < 1:
        TopK(fraction)(grads, group).wait()
    else:
        group.all_reduce(grads)
    return group.ledger.sent_bytes()


def share_sent(n_ranks: int, fraction: float, numel: int = 9600) -> float:
    """Bytes that rank 0 sends with top-k, divided by those of a dense ring all-reduce, both counted by the ledger."""
    sparse, dense = (run_threads(rank_sends, n_ranks, numel, share)[0] for share in (fraction, 1.0))
    return sparse / dense


def left_over(group: Group, feedback: bool) -> float:
    """Descend a quadratic in 32 weights for 200 steps, of which one weight in 8 is sent: the loss left, over the first.

    Ranks pull the even weights apart, strongly, and agree on the odd ones, weakly."""
    w, odd = torch.ones(32), torch.arange(32) % 2 == 1
    apart = torch.where(odd, 0.0, 1.0 - 2.0 * (group.rank % 2)) * 4
    compress, grads = TopK(1 / 8, feedback), torch.empty(32)
    for _ in range(200):
        grads.copy_((w + apart) / group.size)
        compress(grads, group).wait()
        w -= 0.1 * grads
    return float(w[odd].square().mean())


def c65() -> Finding:
    """Read ledgers of top-k and of a ring on 4 and 8 ranks; descend a quadratic with and without error feedback."""
    with_feedback, without = (run_threads(left_over, 2, feedback)[0] for feedback in (True, False))
    return Finding.of(
        [
            Setting("1% on 4 ranks: bytes over a ring's", 1.0, share_sent(4, 0.01), rule="below", measured=True),
            Setting("1% on 8 ranks: bytes over a ring's", 1.0, share_sent(8, 0.01), rule="below", measured=True),
            Setting("15% on 8 ranks: bytes over a ring's", 1.0, share_sent(8, 0.15), rule="below", measured=True),
        ],
        premise="fewer than one element in n travels, for each brings its index and goes to all",
        loss_left_with_feedback=with_feedback,
        loss_left_without=without,
    )
