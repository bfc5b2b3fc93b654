"""Claims on batches: how small and how large they may be, and how long a step must be for them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from labkit.capped import Cluster
from labkit.comm.group import Group
from labkit.course.claims.finding import Finding, Setting
from labkit.course.claims.proofs.gradients import Descent, MakeOptimizer
from labkit.plan.job.recipe import Recipe, check
from labkit.plan.partition.layout import Layout
from labkit.train.config import GPTConfig


def noisy(n: int, flip: float, seed: int) -> tuple[Tensor, Tensor]:
    """Points round 8 centres; a share of them has a wrong label.   -> [n, 32], [n]"""
    draw = torch.Generator().manual_seed(seed)
    centre = torch.randn(8, 32, generator=torch.Generator().manual_seed(9))
    y = torch.randint(8, (n,), generator=draw)
    x = centre[y] + 1.6 * torch.randn(n, 32, generator=draw)
    return x, torch.where(torch.rand(n, generator=draw) < flip, torch.randint(8, (n,), generator=draw), y)


def taught(group: Group, recipes: list[tuple[int, float]]) -> list[tuple[float, float]]:
    """Train with this rank's recipes (rows a step, lr) for six epochs each: accuracy on new samples, and curvature."""
    return [six_epochs(*recipe) for recipe in recipes[group.rank :: group.size]]


def six_epochs(rows: int, lr: float) -> tuple[float, float]:
    """Train with momentum SGD on noisy labels: accuracy on new samples, and the largest curvature of the loss."""
    (x, y), (new_x, new_y) = noisy(1024, 0.15, 1), noisy(4096, 0.0, 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))
    params = list(model.parameters())
    optimizer = Descent(params, lr, 0.9)
    for now in torch.cat([torch.randperm(len(x)) for _ in range(6)]).split(rows):
        for p in params:
            p.grad = None
        cross_entropy(model(x[now]), y[now]).backward()
        optimizer.step()
    v, curvature = [torch.randn_like(p) for p in params], 0.0
    for _ in range(8):  # power iteration with the Hessian finds its largest eigenvalue
        length = float(sum(part.square().sum() for part in v)) ** 0.5
        v = [part / length for part in v]
        g = torch.autograd.grad(cross_entropy(model(x), y), params, create_graph=True)
        h = torch.autograd.grad(torch.stack([(a * b).sum() for a, b in zip(g, v, strict=True)]).sum(), params)
        curvature, v = float(sum((a * b).sum() for a, b in zip(h, v, strict=True))), list(h)
    return float((model(new_x).argmax(1) == new_y).float().mean()), curvature


def c60() -> Finding:
    """Train a net for six epochs in batches of 16 and of 256 rows, with the same learning rate and a larger one."""
    with Cluster(2, "cpu", quiet=True) as cluster:
        first, second = (reply.value for reply in cluster.run(taught, [(16, 0.01), (256, 0.01), (256, 0.04)]))
    ((small, flat), (longer, sharp)), ((large, _),) = first, second
    return Finding.of(
        [
            Setting("256 rows, the rate of 16: right on new samples", small, large, rule="below", measured=True),
            Setting("256 rows, 4 times the rate: right on new samples", small, longer, rule="below", measured=True),
        ],
        premise="neither the learning rate nor the number of steps follows the batch",
        curvature_small_batch=flat,
        curvature_large_batch=sharp,
    )


def smallest_batch(layout: Layout) -> int:
    """The fewest rows per step for which labkit can divide a batch over this layout."""
    for rows in range(1, 2 * layout.size):
        try:
            check(GPTConfig(tied=False), Recipe(batch_size=rows), layout)
        except ValueError:
            continue
        return rows
    raise ValueError(f"no batch is small enough for {layout}")


def c68() -> Finding:
    """Make batches larger row by row until they can be divided over 32 GPUs, in two layouts."""
    return Finding.of(
        [
            Setting("32 GPUs, all of them data parallel", 32, smallest_batch(Layout(dp=32)), "rows"),
            Setting("32 GPUs, TP=4 and DP=8", 32, smallest_batch(Layout(dp=8, tp=4)), "rows"),
        ],
        premise="every GPU is on the data-parallel axis",
    )


def wandered(make: MakeOptimizer, batch: int, rows: int = 1600) -> float:
    """The standard deviation of weights that start at 0, after steps on gradients that are nothing but noise.

    The noise of a batch is 1 / sqrt(batch), and there are rows // batch steps."""
    draw = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.zeros(2000))
    optimizer = make([w])
    for _ in range(rows // batch):
        w.grad = torch.randn(2000, generator=draw) / batch**0.5
        optimizer.step()
    return float(w.detach().std())


def c96() -> Finding:
    """Let weights stray on noise for as many rows in batches 4 times as large; with 4 times the rate they should stray
    as far."""
    settings, numbers = [], {}
    for name, optimizer in (("SGD", torch.optim.SGD), ("Adam", partial(torch.optim.Adam, betas=(0.0, 0.999)))):
        start = wandered(partial(optimizer, lr=1e-3), 1)
        linear, root = (wandered(partial(optimizer, lr=1e-3 * k), 4) / start for k in (4, 2))
        settings.append(
            Setting(f"{name}: noise with 4 times the rate, over before", 1.0, linear, within=0.1, measured=True)
        )
        numbers[f"{name.lower()}_with_the_root"] = root
    return Finding.of(
        settings, premise="the optimizer is SGD; Adam, which divides by the noise, wants the root", **numbers
    )
