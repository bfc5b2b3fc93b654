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

Vectors, embeddings and the head step with AdamW: parameter groups with `by_matrix` False (groups.py). State: 4 bytes an
element of a matrix (with bf16 weights and fp32 masters: 2 + 2 + 4 + 4 in all), 8 for the rest.

Where weights are cut, over dp (ZeRO's flat shards) or tp, momentum and the last line work on pieces. In between
pieces are gathered on an owner for each matrix (labkit.comm.owners), which computes; they travel in the width in which
the products compute. Under DDP without tp nothing is sent, and each rank computes all.

Sources: Jordan et al. 2024, kellerjordan.github.io/posts/muon (the method, the coefficients, bf16); Liu et al.
(Moonlight), arXiv:2502.16982, section 2.2 (0.2 sqrt(max), weight decay) and 2.3 (distributed).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from labkit.comm.group import Group
from labkit.comm.owners import Owners, Piece
from labkit.plan.owners import STEPS, Held, Run, orthogonalising_flops

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


class Muon(Optimizer):
    """Muon for the groups with `by_matrix`, AdamW for all others: `Muon(grouped(params, 0.1), lr=1e-3)`.

    `tp` is the group over which parameters with a `shard_dim` are cut. A strategy that cuts further calls `share`."""

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
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        rest = [group for group in groups if not group.get("by_matrix")]
        defaults = {"lr": lr, "weight_decay": weight_decay}
        self.adamw = AdamW(rest or [{"params": []}], lr=lr, weight_decay=weight_decay)
        by_matrix = [{"momentum": momentum, **group} for group in groups if group.get("by_matrix")]
        super().__init__([*by_matrix, *(self.adamw.param_groups if rest else [])], defaults)
        self.tp = tp
        self._tie()
        self.pieces = [
            Piece(p, slice(0, p.numel()), tuple(p.shape), (Run(0, 0, p.numel()),), getattr(p, "shard_dim", None))
            for p in self.matrices
        ]
        self.dp: Owners | None = None
        self._meet()

    @property
    def matrices(self) -> list[Tensor]:
        """What Muon steps on: matrices, or flat shards with pieces of them."""
        return [p for group in self.param_groups if group.get("by_matrix") for p in group["params"]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's optimizers do, which puts new groups and a new state in place of the old."""
        super().load_state_dict(state_dict)
        self._tie()

    def _tie(self) -> None:
        # the same objects: a learning rate that is set on our groups reaches AdamW's
        rest = [group for group in self.param_groups if not group.get("by_matrix")]
        self.adamw.param_groups, self.adamw.state = rest, self.state

    def share(self, pieces: Sequence[Piece], group: Group) -> None:
        """For a strategy that shards over `group`: which pieces of matrices lie here, and who holds the others.

        ValueError for a piece of what is no matrix."""
        for piece in pieces:
            _check_matrix(piece.shape)
        held = [Held(math.prod(piece.shape), orthogonalising_flops(*piece.shape), piece.runs) for piece in pieces]
        self.pieces, self.dp = list(pieces), Owners(group, held)
        self._meet()

    def _meet(self) -> None:
        """Share out over tp the matrices that this rank owns along dp: its tp peers own the other slices of them."""
        here = range(len(self.pieces)) if self.dp is None else _of(self.dp.owners, self.dp.group.rank)
        cut = [k for k in here if self.pieces[k].cut is not None]
        self.cut: dict[int, int] = {}
        self.slices: Owners | None = None
        if self.tp is not None and self.tp.size > 1 and cut:
            self.cut = {k: place for place, k in enumerate(cut)}
            self.slices = Owners(self.tp, [self._slices(self.pieces[k]) for k in cut])

    def _slices(self, piece: Piece) -> Held:
        assert self.tp is not None
        rows, cols = self._whole(piece)
        size = math.prod(piece.shape)
        runs = tuple(Run(rank, rank * size, size) for rank in range(self.tp.size))
        return Held(rows * cols, orthogonalising_flops(rows, cols), runs)

    def _whole(self, piece: Piece) -> tuple[int, int]:
        n = 1 if self.tp is None else self.tp.size
        rows, cols = piece.shape
        return (rows * n if piece.cut == 0 else rows, cols * n if piece.cut == 1 else cols)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on every parameter that has a gradient; every rank that holds pieces of a matrix calls it.

        Raises ValueError, if nobody has called `share`, for what is no matrix."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.dp is None and self.slices is None:
            for piece in self.pieces:  # one after another: nobody waits for an answer
                self._step_matrices([piece])
        else:
            self._step_matrices(self.pieces)
        if self.adamw.param_groups:
            self.adamw.step()
        return loss

    def _step_matrices(self, pieces: Sequence[Piece]) -> None:
        updates = self._updates(pieces)
        mine = [
            None if piece.param is None or piece.param not in updates else updates[piece.param][piece.window]
            for piece in pieces
        ]
        wholes = mine if self.dp is None else self.dp.gather(mine)
        self._orthogonalise_(pieces, wholes)
        if self.dp is not None:
            self.dp.scatter(wholes, mine)
        rules = {p: group for group in self.param_groups for p in group["params"]}
        for p in updates:
            p.mul_(1 - rules[p]["lr"] * rules[p]["weight_decay"])
        for piece, update in zip(pieces, mine, strict=True):
            if piece.param is not None and update is not None:
                scale = rules[piece.param]["lr"] * step_scale(*self._whole(piece))
                piece.param.view(-1)[piece.window].add_(update, alpha=-scale)

    def _updates(self, pieces: Sequence[Piece]) -> dict[Tensor, Tensor]:
        """The momentum that is to be made orthogonal, flat, of each parameter with a gradient."""
        updates: dict[Tensor, Tensor] = {}
        wanted = {piece.param for piece in pieces}
        for group in self.param_groups:
            for p in group["params"] if group.get("by_matrix") else ():
                if p in wanted and p.grad is not None:
                    state = self.state[p]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(p.grad)
                    momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                    ahead = p.grad.lerp(momentum, group["momentum"])
                    updates[p] = ahead.to(product_dtype(ahead.dtype)).view(-1)
                    del ahead
        return updates

    def _orthogonalise_(self, pieces: Sequence[Piece], wholes: Sequence[Tensor | None]) -> None:
        """Newton-Schulz on each whole matrix, or slice of one over tp, in place."""
        if self.slices is None:
            for piece, whole in zip(pieces, wholes, strict=True):
                if whole is not None:
                    _orthogonalise_(whole, piece.shape)
            return
        # rows of slices follow one another in a flat whole; columns do so when they are turned, and
        # Newton-Schulz of a turned matrix is the turned result
        flats = [_turned(wholes[k], pieces[k]) for k in self.cut]
        whole_slices = self.slices.gather(flats)
        for k, piece in enumerate(pieces):
            if k in self.cut:
                whole = whole_slices[self.cut[k]]
                rows, cols = self._whole(piece)
                shape = (cols, rows) if piece.cut == 1 else (rows, cols)
            else:
                whole, shape = wholes[k], (piece.shape[0], piece.shape[1])
            if whole is not None:
                _orthogonalise_(whole, shape)
        self.slices.scatter(whole_slices, flats)
        for k, flat in zip(self.cut, flats, strict=True):
            whole, (rows, cols) = wholes[k], pieces[k].shape
            if pieces[k].cut == 1 and whole is not None and flat is not None:
                whole.view(rows, cols).copy_(flat.view(cols, rows).T)


def _orthogonalise_(flat: Tensor, shape: Sequence[int]) -> None:
    _check_matrix(shape)
    rows, cols = shape
    flat.view(rows, cols).copy_(orthogonalised(flat.view(rows, cols)))


def _check_matrix(shape: Sequence[int]) -> None:
    if len(shape) != 2:
        raise ValueError(
            f"Muon steps on matrices, got a parameter of shape {tuple(shape)}: give it a group without by_matrix, or, "
            "if it is a flat shard, a strategy that knows the matrices in it (ZeRO1, ZeRO2, ZeRO3)"
        )


def _turned(whole: Tensor | None, piece: Piece) -> Tensor | None:
    if whole is None or piece.cut == 0:
        return whole
    return whole.view(*piece.shape).T.contiguous().view(-1)


def _of(owners: Sequence[int], rank: int) -> list[int]:
    return [k for k, owner in enumerate(owners) if owner == rank]
