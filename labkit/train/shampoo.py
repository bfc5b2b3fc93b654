"""Shampoo: the gradient of a matrix, evened out along its rows and along its columns.

    L = beta L + (1 - beta) G G^T         [m, m]   how the rows of G move together
    R = beta R + (1 - beta) G^T G         [n, n]   how the columns do
    D = L^(-1/4) M R^(-1/4)               M: momentum of G, as Adam's
    w = (1 - lr decay) w - lr |A| D/|D|   A: the step that Adam would take, of which only the length is used

Adam divides each element by the root of its own mean square: it thinks that elements have nothing to do with each
other. For a matrix taken as one long vector the whole second moment would have (m n)^2 numbers; Shampoo takes the
product of one for rows and one for columns in its place, m^2 + n^2. With one gradient alone, G = U S V^T and M = G, the
direction is U V^T: what Muon takes by Newton-Schulz. Shampoo remembers earlier gradients, Muon does not.

    blocks      a matrix is cut into blocks of at most 1,024 rows and columns, each with an L and an R of its own
    roots       L = Q diag(l) Q^T gives L^(-1/4) = Q diag(l^(-1/4)) Q^T, in fp32, or float64 for weights in float64.
                In the first `every` steps they are computed in each, because L and R are still young; then in every
                `every`th, and the steps between use the old ones
    grafting    the length of a step comes from Adam, so that Adam's learning rate can stay. The scale of L and R has
                no effect for that reason, and their averages need no correction for the first steps

What is below 1e-6 of the largest eigenvalue is lifted to that: L of a few gradients has many eigenvalues of 0.

The owner of a matrix (by_matrix.py) keeps all of this: M and the mean squares of G, 2 m n numbers, L, R and both roots,
2 (m^2 + n^2). Gradients travel to it in the state's width, and pieces of the step back. Whole matrices lie on one rank
each, so their state does not come out as evenly as that of AdamW. State of all other parameters: AdamW's.

Sources: Gupta, Koren and Singer, arXiv:1802.09568 (the method); Anil et al., arXiv:2002.09018, section 4 (blocks, old
roots, grafting, lifting by the largest eigenvalue); Shi et al., arXiv:2309.06497, sections 2 and 4 (averages that
decay, Adam's length for each block, owners that keep the state and send steps back).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.plan.laws.shampoo import BLOCK, EVERY, SHAMPOO, cut
from labkit.train.by_matrix import ByMatrix

LIFT = 1e-6
"""Of the largest eigenvalue: what is added to all."""
TINY = 1e-30
EPS = 1e-8
"""Adam's."""


def inverse_root_(factor: Tensor, into: Tensor) -> None:
    """factor^(-1/4), of a symmetric matrix without negative eigenvalues.   [s, s] -> into [s, s]

    Computes in the matrix's dtype."""
    values, vectors = torch.linalg.eigh(factor)
    values.clamp_(min=0)  # rounding makes some a little negative
    values.add_(LIFT * values.max()).clamp_(min=TINY).pow_(-0.25)
    torch.matmul(vectors * values, vectors.T, out=into)


class Shampoo(ByMatrix):
    """Shampoo for the groups with `by_matrix`, AdamW for all others: `Shampoo(grouped(params, 0.1), lr=1e-3)`."""

    law = SHAMPOO

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        beta: float = 0.95,
        every: int = EVERY,
        block: int = BLOCK,
        tp: Group | None = None,
    ) -> None:
        """`betas` are Adam's, `beta` is that of L and R. ValueError for impossible numbers."""
        for name, decay in (("betas[0]", betas[0]), ("betas[1]", betas[1]), ("beta", beta)):
            if not 0 <= decay < 1:
                raise ValueError(f"{name} is at least 0 and below 1, got {decay}")
        for name, count in (("every", every), ("block", block)):
            if count < 1:
                raise ValueError(f"{name} is a whole number of at least 1, got {count}")
        self.every, self.block = every, block
        super().__init__(params, lr, weight_decay, tp, {"betas": betas, "beta": beta})

    def work_(self, matrix: Tensor, number: int, group: Mapping[str, Any]) -> None:
        """What has come together is the gradient; it becomes the direction, block by block, in place."""
        kept = self.kept(number)
        if not kept:
            kept["step"] = 0
            for name in ("exp_avg", "exp_avg_sq"):
                kept[name] = matrix.new_zeros(matrix.shape)
        kept["step"] += 1
        (mean, square), (first, second) = (kept["exp_avg"], kept["exp_avg_sq"]), group["betas"]
        mean.lerp_(matrix, 1 - first)
        square.mul_(second).addcmul_(matrix, matrix, value=1 - second)
        for place, (rows, cols) in enumerate(product(*(_windows(size, self.block) for size in matrix.shape))):
            block = matrix[rows, cols]
            left, right = self._roots(kept, place, block, group["beta"])
            direction = left @ mean[rows, cols] @ right
            direction.mul_(_length(kept, rows, cols, group["betas"]) / direction.norm().clamp(min=TINY))
            block.copy_(direction)

    def _roots(self, kept: dict[str, Any], place: int, block: Tensor, beta: float) -> tuple[Tensor, Tensor]:
        """L^(-1/4) and R^(-1/4) of a block, after the block's gradient has been added to L and R."""
        names = [f"{name} {place}" for name in ("left", "right", "left root", "right root")]
        for name, size in zip(names, (*block.shape, *block.shape), strict=True):
            if name not in kept:
                kept[name] = block.new_zeros(size, size)
        left, right, *roots = (kept[name] for name in names)
        left.addmm_(block, block.T, beta=beta, alpha=1 - beta)
        right.addmm_(block.T, block, beta=beta, alpha=1 - beta)
        step = kept["step"]
        if step <= self.every or step % self.every == 0:
            for factor, root in zip((left, right), roots, strict=True):
                inverse_root_(factor, root)
        return roots[0], roots[1]


def _length(kept: Mapping[str, Any], rows: slice, cols: slice, betas: tuple[float, float]) -> Tensor:
    """The length of Adam's step for a block: the root of the sum of its squares."""
    first, second = (1 - beta ** kept["step"] for beta in betas)
    step = kept["exp_avg_sq"][rows, cols].sqrt().div_(second**0.5).add_(EPS).reciprocal_()
    return step.mul_(kept["exp_avg"][rows, cols]).norm() / first


def _windows(size: int, block: int) -> list[slice]:
    parts = cut(size, block)
    return [slice(end - part, end) for end, part in zip(accumulate(parts), parts, strict=True)]
