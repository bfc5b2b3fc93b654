"""Muon on one rank: which pieces of matrices it has, what it gathers as an owner, sends, holds and computes.

    flat shards    pieces of this rank's slices of matrices       over dp: `held`       an owner among the ranks of dp
    slices         whole along dp on their owner                  over tp: `slices`     an owner among its peers in tp
    matrices       whole: Newton-Schulz

    bytes sent     pieces to their owners and answers back, in bf16 (2 bytes an element; 8 in float64); AdamW sends none
    memory         of an element between steps, bf16 with fp32 masters: weight 2 + gradient 2 + master 4 + momentum 4,
                   of which ZeRO shards 4 to 12; in the step besides: 2 for each piece, 2 for each gathered element, and
                   two copies of the matrix and two of the square of its smaller side
    flops          5 (4 s s l + 2 s s s) for a matrix s x l, on its owner alone

Who owns what is the rule of labkit.plan.owners and the layout that of labkit.parallel.sharded, so these numbers are
those of a real step. Sources: labkit.train.muon; Liu et al., arXiv:2502.16982, sections 2.2 and 2.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from labkit.plan.groups import HIDDEN
from labkit.plan.owners import Held, Run, assign, orthogonalising_flops, runs_of, sent
from labkit.plan.sizes import Sizes


class Matrix(NamedTuple):
    """A matrix [rows, cols], whole; `dim` is the one along which tp cuts it."""

    rows: int
    cols: int
    dim: int

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return self.rows * self.cols

    def slice_of(self, tp: int) -> tuple[int, int]:
        """The shape of a rank's slice of it."""
        return (self.rows // tp, self.cols) if self.dim == 0 else (self.rows, self.cols // tp)

    @property
    def scratch(self) -> int:
        """Elements that Newton-Schulz holds besides: this step's x and the next one, A, and b A + c A A."""
        return 2 * self.numel + 2 * min(self.rows, self.cols) ** 2


def matrix_of(shape: Sizes, name: str) -> Matrix:
    """A block's matrix by its name in the planner's layers."""
    d, heads = shape.d_model, shape.n_head * shape.width
    if name in ("out", "down"):
        return Matrix(d, heads if name == "out" else shape.hidden, 1)
    return Matrix({"query": heads, "key": shape.kv_heads * shape.width, "value": shape.kv_heads * shape.width}.get(
        name, shape.hidden), d, 0)  # fmt: skip


class MuonStep:
    """Muon's step on the matrices of one stage. `buffers` are the flat buffers in which they lie, in order.

    n, place    ranks that share the state, and which of them this is;   tp, slot    the same of tensor parallelism
    width       bytes of an element of products and messages;            wide        of momentum"""

    def __init__(
        self, buffers: Sequence[Sequence[Matrix]], n: int, place: int, tp: int, slot: int, width: int, wide: int
    ) -> None:
        self.buffers, self.n, self.place, self.tp, self.slot = buffers, n, place, tp, slot
        self.width, self.wide = width, wide
        self.matrices = [matrix for buffer in buffers for matrix in buffer]
        sizes = [[matrix.numel // tp for matrix in buffer] for buffer in buffers]
        runs = [run for buffer in sizes for run in runs_of(buffer, n)]
        slices = [matrix.slice_of(tp) for matrix in self.matrices]
        self.held = [Held(r * c, orthogonalising_flops(r, c), own) for (r, c), own in zip(slices, runs, strict=True)]
        self.owners = assign(self.held, n)
        self.shards = [-(-sum(buffer) // n) for buffer in sizes]
        self.here = self.owned_by(place)
        self.slices = [self.slice(self.matrices[k]) for k in self.here]
        self.slice_owners = assign(self.slices, tp)

    def owned_by(self, place: int) -> list[int]:
        """The numbers of the matrices whose slices this rank of dp owns."""
        return [k for k, owner in enumerate(self.owners) if owner == place]

    def slice(self, matrix: Matrix) -> Held:
        """Where the slices of a matrix lie along tp."""
        part = matrix.numel // self.tp
        flops = orthogonalising_flops(matrix.rows, matrix.cols)
        return Held(matrix.numel, flops, tuple(Run(rank, rank * part, part) for rank in range(self.tp)))

    @property
    def mine(self) -> list[Matrix]:
        """The matrices that this rank computes with."""
        owners = zip(self.here, self.slice_owners, strict=True)
        return [self.matrices[k] for k, owner in owners if owner == self.slot]

    def sent(self) -> tuple[int, int]:
        """Bytes that this rank sends in a step over dp, and over tp."""
        over_tp = sent(self.slices, self.slice_owners, self.slot) if self.tp > 1 else 0
        return sent(self.held, self.owners, self.place) * self.width, over_tp * self.width

    def temporaries(self, whole: bool) -> int:
        """Bytes at the highest moment of the step. `whole`: nothing is cut, and one matrix comes after the other."""
        narrows = self.width < self.wide
        if whole and self.tp == 1:
            return max((self.alone(matrix, narrows) for matrix in self.matrices), default=0)
        highest = pieces = 0
        for size in self.shards:
            highest = max(highest, pieces + size * (self.wide + self.width * narrows))
            pieces += size * self.width
        gathered = sum(self.held[k].numel for k in self.here if len(self.held[k].runs) > 1)
        if self.tp > 1:
            gathered += sum(self.matrices[k].numel // self.tp for k in self.here if self.matrices[k].dim == 1)
            gathered += sum(matrix.numel for matrix in self.mine)
        scratch = max((matrix.scratch for matrix in self.mine), default=0)
        return max(highest, pieces + (gathered + scratch) * self.width)

    def alone(self, matrix: Matrix, narrows: bool) -> int:
        """Bytes of one matrix that nobody has cut: its momentum, rounded, and Newton-Schulz."""
        ahead = matrix.numel * (self.wide + self.width * narrows)
        return max(ahead, (matrix.numel + matrix.scratch) * self.width)


def busiest_flops(shape: Sizes, n_blocks: int, n: int) -> float:
    """Flops of Newton-Schulz on the rank that has the most, if n ranks share `n_blocks` blocks: one whole matrix at
    least. (Owners are that even where each rank holds pieces of several matrices.)"""
    names = [name for name in HIDDEN if name != "gate" or shape.gated]
    each = [orthogonalising_flops(*matrix_of(shape, name)[:2]) for name in names]
    return max(n_blocks * sum(each) / n, max(each))


def law(steps: Iterable[MuonStep]) -> tuple[int, int]:
    """Bytes that a rank sends over dp and over tp in a step of all its stages."""
    pairs = [step.sent() for step in steps]
    return sum(dp for dp, _ in pairs), sum(tp for _, tp in pairs)
