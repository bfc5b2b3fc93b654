"""Large batches: LARS and LAMB, which give every layer a step of its own length, linear scaling, and warm-up.

With n times the batch there are n times fewer steps, so each must be longer: learning rate times n (`linear_scaling`).
If a step is too long, training diverges, first where the update is large beside the weight. The trust ratio measures
that layer by layer:

    layer        |w|    |update|   ratio = |w| / |update|      step = lr * ratio * update, so |step| = lr * |w|:
    embedding    50.0     0.01      5000                       every layer moves by the same share of itself
    block 7      12.0     3.00         4

    LARS    u = g + decay * w    ratio = trust * |w| / (|g| + decay * |w|)    v = momentum * v + lr * ratio * u;  w -= v
    LAMB    u = m^ / (sqrt(v^) + eps) + decay * w    ratio = |w| / |u|        w -= lr * ratio * u

Vectors (biases, norms; dim 1 or 0) are excluded: ratio 1 and no decay. A parameter group says otherwise with
`"adapt": True` or False (False: ratio 1, decay as the group has it). A weight or update of norm 0 has ratio 1.

A norm needs the whole layer: `needs_whole_layers` tells strategies that cut layers (flat ZeRO shards, tensor parallel)
that these two cannot run there. State: LARS 4 bytes a parameter in fp32, LAMB 8. Sends nothing.

Sources: You et al., 1708.03888, algorithm 1 (LARS); You et al., 1904.00962, algorithm 2 (LAMB); Goyal et al.,
1706.02677, sections 2.1 (linear scaling) and 2.2 (gradual warm-up).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from labkit.plan.contracts import shard_dim_of

SHAPES = ("constant", "linear", "cosine")


class _LayerWise(Optimizer):
    """The common part of LARS and LAMB: parameter groups, checks, and the loop over layers."""

    needs_whole_layers = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does. Raises ValueError for impossible numbers or a layer that is cut over ranks."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", "weight_decay", "momentum", "trust", "eps"):
            if name in group and not group[name] >= 0:
                raise ValueError(f"{name} must be 0 or more, got {group[name]}")
        for beta in (group.get("momentum", 0.0), *group.get("betas", ())):
            if not 0 <= beta < 1:
                raise ValueError(f"momentum and betas are at least 0 and below 1, got {beta}")
        cut = [tuple(p.shape) for p in group["params"] if shard_dim_of(p) is not None]
        if cut:
            raise ValueError(
                f"{type(self).__name__} needs whole layers for their norms, and {len(cut)} parameters are cut over "
                f"tensor-parallel ranks (the first has {cut[0]} here): use AdamW or SGD there"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on every parameter that has a gradient. Raises ValueError for a sparse gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise ValueError(
                        f"{type(self).__name__} needs dense gradients: make the embedding with sparse=False"
                    )
                rule = group
                if group["adapt"] is None:
                    whole = p.dim() > 1
                    rule = {**group, "adapt": whole, "weight_decay": group["weight_decay"] if whole else 0.0}
                self.update_(p, p.grad, self.state[p], rule)
        return loss

    def update_(self, w: Tensor, g: Tensor, state: dict[str, Any], rule: dict[str, Any]) -> None:
        """Change one layer's weight; LARS and LAMB say how."""
        raise TypeError("use LARS or LAMB")


class LARS(_LayerWise):
    """SGD with momentum and a trust ratio for each layer. With ratio 1 and a constant lr it is torch's SGD.

    `trust` is the paper's eta. The learning rate is inside the momentum, as in the paper."""

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ):
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "adapt": None}
        )

    def update_(self, w: Tensor, g: Tensor, state: dict[str, Any], rule: dict[str, Any]) -> None:
        """v = momentum * v + lr * ratio * (g + decay * w);  w = w - v"""
        update = g.add(w, alpha=rule["weight_decay"])
        if rule["adapt"]:
            update.mul_(_ratio(_norm(w), _norm(g) + rule["weight_decay"] * _norm(w), rule["trust"]))
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(w)
        velocity = state["momentum_buffer"].mul_(rule["momentum"]).add_(update, alpha=rule["lr"])
        w.sub_(velocity)


class LAMB(_LayerWise):
    """AdamW with a trust ratio for each layer. With ratio 1 it is torch's AdamW.

    `clip` is the paper's phi: |w| is taken between these two numbers in the ratio (None: as it is)."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        clip: tuple[float, float] | None = None,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "clip": clip, "adapt": None}
        super().__init__(params, defaults)

    def update_(self, w: Tensor, g: Tensor, state: dict[str, Any], rule: dict[str, Any]) -> None:
        """u = m^ / (sqrt(v^) + eps) + decay * w;  w = w - lr * ratio * u"""
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(w), exp_avg_sq=torch.zeros_like(w))
        state["step"] += 1
        (beta1, beta2), t = rule["betas"], state["step"]
        mean = state["exp_avg"].mul_(beta1).add_(g, alpha=1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        update = (mean / (1 - beta1**t)).div_((square / (1 - beta2**t)).sqrt_().add_(rule["eps"]))
        update.add_(w, alpha=rule["weight_decay"])
        if rule["adapt"]:
            size = _norm(w) if rule["clip"] is None else _norm(w).clamp(*rule["clip"])
            update.mul_(_ratio(size, _norm(update)))
        w.sub_(update, alpha=rule["lr"])


def _norm(x: Tensor) -> Tensor:
    """The Euclidean norm, a tensor without dimensions; summed in fp32 at least."""
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))


def _ratio(weight: Tensor, update: Tensor, trust: float = 1.0) -> Tensor:
    # stays on the device: asking for the number would make a GPU wait at every layer
    return torch.where((weight > 0) & (update > 0), trust * weight / update, torch.ones_like(weight))


def linear_scaling(base_lr: float, base_batch: int, batch: int) -> float:
    """The learning rate for `batch` samples a step, if `base_lr` is right for `base_batch`: in proportion.

    Raises ValueError for a batch below 1."""
    if base_batch < 1 or batch < 1:
        raise ValueError(f"a batch has at least 1 sample, got base_batch={base_batch} and batch={batch}")
    return base_lr * batch / base_batch


@dataclass(frozen=True)
class Warmup:
    """A factor of the learning rate for each step: up in a line from `start` to 1 over `steps`, then by `shape`.

          1 |     ____________ constant
            |   / \\   cosine, linear: down to `floor` at step `total`        LambdaLR(optimizer, Warmup(steps=100))
      start | /      \\__
            +--|--------|--->  step
             steps    total

    With start = base_batch / batch the first step is as long as it was for the small batch. Raises ValueError for
    numbers that do not fit together."""

    steps: int
    start: float = 0.0
    total: int | None = None
    shape: str = "constant"
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 0 or self.start < 0 or self.floor < 0:
            raise ValueError(f"steps, start and floor are 0 or more, got {self.steps}, {self.start} and {self.floor}")
        if self.shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {self.shape!r}")
        if (self.shape == "constant") != (self.total is None):
            raise ValueError(
                f"total= says where linear and cosine end, constant has no end; got {self.total}, {self.shape}"
            )
        if self.total is not None and self.total <= self.steps:
            raise ValueError(f"total={self.total} steps must be more than the {self.steps} of warm-up")

    def __call__(self, step: int) -> float:
        """The factor at `step`, counted from 0."""
        if step < self.steps:
            return self.start + (1 - self.start) * step / self.steps
        if self.total is None:
            return 1.0
        done = min(1.0, (step - self.steps) / (self.total - self.steps))
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.floor + (1 - self.floor) * left
