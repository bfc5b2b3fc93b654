"""Muon: momentum, made orthogonal. The step for a matrix has all its singular values near 1.

    m = mu m + (1 - mu) g         momentum: 4 bytes an element, where Adam has 8
    u = (1 - mu) g + mu m         Nesterov's look ahead
    u = U S V^T  ->  ~ U V^T      Newton-Schulz: no SVD, but products alone, which GPUs and bf16 are good at
    w = (1 - lr decay) w - lr 0.2 sqrt(max(rows, cols)) U V^T

A gradient of a matrix is often nearly of low rank: a few directions have large singular values, and a step along it
learns nothing about the others. U V^T weighs all directions alike.

Newton-Schulz begins with x = u / |u|, whose singular values lie in 0 to 1, and repeats

    x = a x + (b A + c A A) x,   A = x x^T       each singular value s becomes  a s + b s^3 + c s^5
    a, b, c = 3.4445, -4.7750, 2.0315            5 times, in bf16

The coefficients are not those that converge to 1: the slope a at 0 is as steep as possible, so that small singular
values rise quickly (five steps bring 0.01 to 0.70; the classic 1.5 s - 0.5 s^3 brings it to 0.08), and in return all
that begin between 0.01 and 1 end somewhere between 0.68 and 1.14. What is far below 0.001 stays small.

U V^T has entries of a root mean square of 1 / sqrt(max(rows, cols)). The factor 0.2 sqrt(max(rows, cols)) makes it 0.2,
which is what AdamW's steps have, so that both share one learning rate and one weight decay.

Vectors, embeddings and the head step with AdamW. State: 4 bytes an element of a matrix (with bf16 weights and fp32
masters: 2 + 2 + 4 + 4 in all), 8 for the rest.

Where weights are cut, momentum and the last line work on pieces, and Newton-Schulz on whole matrices, which come
together on their owners (by_matrix.py). What travels is u, in the width in which the products compute.

Sources: Jordan et al. 2024, kellerjordan.github.io/posts/muon (the method, the coefficients, bf16); Liu et al.
(Moonlight), arXiv:2502.16982, section 2.2 (0.2 sqrt(max), weight decay) and 2.3 (distributed).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.plan.laws.muon import MUON, STEPS
from labkit.train.by_matrix import ByMatrix

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
RMS = 0.2


def orthogonalised(u: Tensor, steps: int = STEPS) -> Tensor:
    """A matrix with the singular vectors of u, and singular values near 1.   [rows, cols] -> same

    Computes in bf16, in float64 for a matrix in float64. Raises ValueError for what is no matrix."""
    if u.dim() != 2:
        raise ValueError(f"Newton-Schulz works on a matrix [rows, cols], got shape {tuple(u.shape)}")
    a, b, c = COEFFICIENTS
    x = u.to(product_dtype(u.dtype))
    x = x.T if u.shape[0] > u.shape[1] else x  # the smaller side is the one that is squared
    x = x / x.norm().clamp(min=EPS)  # the largest singular value is at most the Frobenius norm
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if u.shape[0] > u.shape[1] else x


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which Newton-Schulz computes, and in which pieces travel."""
    return dtype if dtype == torch.float64 else torch.bfloat16


def step_scale(rows: int, cols: int) -> float:
    """What makes the root mean square of an orthogonal matrix's entries 0.2, that of AdamW's steps."""
    return RMS * math.sqrt(max(rows, cols))


class Muon(ByMatrix):
    """Muon for the groups with `by_matrix`, AdamW for all others: `Muon(grouped(params, 0.1), lr=1e-3)`."""

    law = MUON

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        tp: Group | None = None,
    ) -> None:
        """Groups without `by_matrix` go to AdamW. Raises ValueError for impossible numbers."""
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is at least 0 and below 1, got {momentum}")
        super().__init__(params, lr, weight_decay, tp, {"momentum": momentum})

    def travels(self, p: Tensor, group: Mapping[str, Any]) -> Tensor:
        """The momentum that is to be made orthogonal, in the dtype of the products."""
        assert p.grad is not None
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
        ahead = p.grad.lerp(momentum, group["momentum"])
        return ahead.to(product_dtype(ahead.dtype)).view(-1)

    def work_(self, matrix: Tensor, number: int, group: Mapping[str, Any]) -> None:
        """Newton-Schulz, in place. Of a turned matrix it is the turned result."""
        matrix.copy_(orthogonalised(matrix))

    def scale(self, rows: int, cols: int) -> float:
        """That of AdamW's steps."""
        return step_scale(rows, cols)
