"""Claims on gradients: what backward needs, and what happens to gradients that are averaged, scaled or forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.capped import run
from labkit.comm.group import Group
from labkit.course.claims.finding import Finding, Setting
from labkit.parallel.ddp import DDP

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def net(seed: int = 0) -> nn.Sequential:
    """Three linear layers in float64, the same for the same seed.   [n, 8] -> [n, 1]"""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def rows(n: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets.   -> [n, 8], [n, 1]"""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 8, generator=draw).double(), torch.randn(n, 1, generator=draw).double()


def moved_by(make: MakeOptimizer, factor: float, clip: float | None = None, steps: int = 3) -> float:
    """The distance that one layer moves in `steps` steps if its gradients are multiplied by `factor`. With `clip`, the
    gradients of all layers are multiplied, and then clipped to this norm."""
    model = net()
    params = list(model.parameters())
    layer = params[2]
    before, optimizer = layer.detach().clone(), make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        x, y = rows(32, seed=step)
        (model(x) - y).square().mean().backward()
        for p in params if clip else [layer]:
            assert p.grad is not None
            p.grad.mul_(factor)
        if clip:
            nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
    return float((layer.detach() - before).norm())


def ratio(make: MakeOptimizer, factor: float, clip: float | None = None) -> float:
    """The distance that a layer moves if its gradients are multiplied by `factor`, over the distance without."""
    return moved_by(make, factor, clip) / moved_by(make, 1.0, clip)


def c42() -> Finding:
    """Make a layer's gradients a thousand times smaller, and compare how far AdamW moves it."""
    adamw = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)
    return Finding.of(
        [
            Setting("how far AdamW moves it, gradients / 1,000", 1e-3, ratio(adamw, 1e-3), measured=True),
            Setting("how far AdamW moves it, gradients / 10", 0.1, ratio(adamw, 0.1), measured=True),
        ],
        sgd=ratio(partial(torch.optim.SGD, lr=1e-3), 1e-3),
        where_eps_matters=ratio(adamw, 1e-7),
    )


class Descent:
    """SGD with momentum in five lines, for ranks: torch's own loads its compiler first, which takes a second."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1, momentum: float = 0.0) -> None:
        self.param_groups = [{"params": list(params), "lr": lr, "momentum": momentum}]
        self.velocity = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]  # type: ignore[attr-defined]

    @torch.no_grad()
    def step(self) -> None:
        """v = momentum v + g;  w = w - lr v"""
        group: Any = self.param_groups[0]
        for p, v in zip(group["params"], self.velocity, strict=True):
            v.mul_(group["momentum"]).add_(p.grad)
            p.sub_(v, alpha=group["lr"])


def average_of_shards(group: Group, sizes: tuple[int, ...]) -> float:
    """The relative difference between DDP's mean of the ranks' gradients and the gradient of all rows, in float64."""
    x, y = rows(sum(sizes))
    start = sum(sizes[: group.rank])
    window = slice(start, start + sizes[group.rank])
    model, whole = net(), net()
    sync = DDP(model, group, Descent)  # type: ignore[arg-type]
    (model(x[window]) - y[window]).square().mean().backward()
    sync.finish()
    (whole(x) - y).square().mean().backward()
    averaged, wanted = (
        torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]) for module in (model, whole)
    )
    sync.close()
    return float((averaged - wanted).norm() / wanted.norm())


def shards(group: Group) -> tuple[float, float]:
    """`average_of_shards` for equal shards and for ragged ones."""
    return average_of_shards(group, (16, 16)), average_of_shards(group, (28, 4))


def c57() -> Finding:
    """Run DDP on two processes in float64, with 16 rows on each and with 28 and 4, and one process with all 32."""
    equal, ragged = run(shards, n_ranks=2)[0].value
    return Finding.of(
        [
            Setting("16 and 16 rows: relative error", 1e-12, equal, rule="below", measured=True),
            Setting("28 and 4 rows: relative error", 1e-12, ragged, rule="below", measured=True),
        ],
        premise="every rank has as many rows (tokens) as any other",
    )


def wrong_without(weights: bool, activations: bool) -> str:
    """The gradients of y = x W^T that come out wrong if weights or inputs are zeroed between forward and backward."""
    x, w = rows(4)[0].requires_grad_(), rows(3, seed=2)[0].requires_grad_()
    seed = torch.ones(4, 3).double()
    right = torch.autograd.grad(F.linear(x, w), (x, w), seed)
    y = F.linear(x, w)
    if weights:
        w.data.zero_()
    if activations:
        x.data.zero_()
    spoiled = torch.autograd.grad(y, (x, w), seed)
    names = [name for name, a, b in zip(("error", "weight"), spoiled, right, strict=True) if not torch.equal(a, b)]
    return " and ".join(names) or "none"


def c67() -> Finding:
    """Set weights, then inputs, to zero between forward and backward, and see which gradient breaks."""
    return Finding.of(
        [
            Setting("weights lost: what breaks", "error", wrong_without(True, False), measured=True),
            Setting("activations lost: what breaks", "weight", wrong_without(False, True), measured=True),
        ]
    )


def c69() -> Finding:
    """Leave the losses of 8 micro-batches undivided, and compare how far a layer moves, for SGD, clipping and AdamW."""
    sgd, adamw = partial(torch.optim.SGD, lr=1e-4), partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)
    return Finding.of(
        [
            Setting("SGD", 8.0, ratio(sgd, 8.0), "times", measured=True),
            Setting("SGD, clipped to a norm of 0.01", 8.0, ratio(sgd, 8.0, clip=0.01), "times", measured=True),
            Setting("AdamW", 8.0, ratio(adamw, 8.0), "times", measured=True),
        ],
        premise="the step is as long as the gradient: SGD, and no clipping",
    )


def chain(sizes: tuple[int, int, int, int], transposed: bool) -> tuple[str, float]:
    """dL/dW1 of h3 = W3 W2 W1 x, L = |h3 - y|^2 / 2 by a formula: whether it can be computed, and its relative error.

    transposed: (h3 - y) W3^T W2^T x^T as it stands; else W2^T W3^T (h3 - y) x^T."""
    draw = torch.Generator().manual_seed(0)
    w1, w2, w3 = (torch.randn(b, a, generator=draw).double() for a, b in zip(sizes, sizes[1:], strict=False))
    x, y = torch.randn(sizes[0], 1, generator=draw).double(), torch.randn(sizes[3], 1, generator=draw).double()
    w1.requires_grad_()
    off = w3 @ w2 @ w1 @ x - y
    (off.square().sum() / 2).backward()
    off = off.detach()
    try:
        # for the products to match, the error is taken as a row: a column times a matrix has no product
        gradient = (off.T @ w3.T @ w2.T).T @ x.T if transposed else w2.T @ w3.T @ off @ x.T
    except RuntimeError:
        return "shapes do not match", float("inf")
    assert w1.grad is not None
    return "a gradient", float((gradient - w1.grad).norm() / w1.grad.norm())


def c104() -> Finding:
    """Compute the formula as it stands, for layers of different widths and of one width, and compare with autograd."""
    ragged, square = chain((2, 3, 4, 5), True), chain((4, 4, 4, 4), True)
    return Finding.of(
        [
            Setting("widths 2, 3, 4, 5", "a gradient", ragged[0], measured=True),
            Setting("four times width 4: relative error", 1e-12, square[1], rule="below", measured=True),
        ],
        error_in_the_right_order=chain((2, 3, 4, 5), False)[1],
    )


def c105() -> Finding:
    """Compute gradients, call zero_grad on the optimizer and on the module, and see what is left."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def left(forget: Callable[[], None]) -> str:
        model(rows(4)[0]).sum().backward()
        forget()
        return "None" if model[0].weight.grad is None else "zeros"

    return Finding.of(
        [
            Setting("optimizer.zero_grad()", "zeros", left(optimizer.zero_grad), measured=True),
            Setting("model.zero_grad()", "zeros", left(model.zero_grad), measured=True),
        ]
    )
