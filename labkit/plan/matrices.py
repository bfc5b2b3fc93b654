"""An optimizer that needs whole matrices, on one rank: what it gathers as an owner, sends, holds and computes.

    flat shards    pieces of this rank's slices of matrices       over dp: `held`       an owner among the ranks of dp
    slices         whole along dp on their owner                  over tp: `slices`     an owner among its peers in tp
    matrices       whole: the owner's work

A `MatrixLaw` says of one optimizer what it does with a matrix, in numbers; `MatrixStep` says what follows from that for
a rank. All laws of the planner ask these two, and so does the optimizer itself (labkit.train.by_matrix).

    bytes sent     pieces to their owners and answers back, in the optimizer's width; AdamW sends none
    memory         between steps what the law keeps, in pieces or on owners; in the step besides: each piece, each
                   gathered element, and the scratch of the matrix with the most
    flops          those of a matrix, on its owner alone

Who owns what is the rule of labkit.plan.owners and the layout that of labkit.parallel.sharded, so these numbers are
those of a real step. Source: Liu et al., arXiv:2502.16982, section 2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from labkit.plan.groups import HIDDEN
from labkit.plan.owners import Held, Run, assign, runs_of, sent
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


def nothing(rows: int, cols: int) -> int:
    """What an owner keeps of a matrix, if it keeps nothing."""
    return 0


@dataclass(frozen=True)
class MatrixLaw:
    """What an optimizer does with a matrix of a block, whole; all other parameters step with AdamW.

    elements    numbers that it keeps for each element of the matrix
    owned       True: the owner keeps these for its whole matrices; False: they stay where the pieces are
    factors     [rows, cols] -> numbers that the owner keeps for the matrix besides
    flops       [rows, cols] -> the owner's work in a step; owners are chosen by it
    scratch     [rows, cols] -> elements that the owner holds in the step beside the matrix itself
    narrow      True: pieces travel, and the owner computes, in bf16 (in float64 for weights in float64);
                False: in the width of the optimizer's state
    words       what the owner keeps besides, for a formula; "" for nothing"""

    elements: int
    owned: bool
    flops: Callable[[int, int], int]
    scratch: Callable[[int, int], int]
    narrow: bool
    factors: Callable[[int, int], int] = nothing
    words: str = ""

    def width(self, wide: int) -> int:
        """Bytes of an element that travels, where one of the optimizer's state has `wide`."""
        return 2 if self.narrow and wide < 8 else wide

    def products(self, wide: int) -> str:
        """The precision of the owner's products."""
        return "fp64" if wide == 8 else "bf16" if self.narrow else "fp32"

    @property
    def spread(self) -> int:
        """Numbers for each element that stay with the pieces, and are sharded as these are."""
        return 0 if self.owned else self.elements

    @property
    def keeps(self) -> bool:
        """True if owners keep anything between steps."""
        return self.owned or self.factors is not nothing

    def kept(self, rows: int, cols: int) -> int:
        """Numbers that the owner keeps of a matrix between steps."""
        return self.elements * rows * cols * self.owned + self.factors(rows, cols)


def matrix_of(shape: Sizes, name: str) -> Matrix:
    """A block's matrix by its name in the planner's layers."""
    d, heads = shape.d_model, shape.n_head * shape.width
    if name in ("out", "down"):
        return Matrix(d, heads if name == "out" else shape.hidden, 1)
    return Matrix({"query": heads, "key": shape.kv_heads * shape.width, "value": shape.kv_heads * shape.width}.get(
        name, shape.hidden), d, 0)  # fmt: skip


class MatrixStep:
    """The step on the matrices of one stage. `buffers` are the flat buffers in which they lie, in order.

    n, place    ranks that share the state, and which of them this is;   tp, slot    the same of tensor parallelism
    wide        bytes of a number of the optimizer's state;              width       of an element that travels"""

    def __init__(
        self, law: MatrixLaw, buffers: Sequence[Sequence[Matrix]], n: int, place: int, tp: int, slot: int, wide: int
    ) -> None:
        self.law, self.buffers, self.n, self.place, self.tp, self.slot = law, buffers, n, place, tp, slot
        self.width, self.wide = law.width(wide), wide
        self.matrices = [matrix for buffer in buffers for matrix in buffer]
        sizes = [[matrix.numel // tp for matrix in buffer] for buffer in buffers]
        runs = [run for buffer in sizes for run in runs_of(buffer, n)]
        slices = [matrix.slice_of(tp) for matrix in self.matrices]
        self.held = [Held(r * c, law.flops(r, c), own) for (r, c), own in zip(slices, runs, strict=True)]
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
        flops = self.law.flops(matrix.rows, matrix.cols)
        return Held(matrix.numel, flops, tuple(Run(rank, rank * part, part) for rank in range(self.tp)))

    @cached_property
    def mine(self) -> list[Matrix]:
        """The matrices that this rank computes with."""
        owners = zip(self.here, self.slice_owners, strict=True)
        return [self.matrices[k] for k, owner in owners if owner == self.slot]

    def scratch(self, matrix: Matrix) -> int:
        """Elements that the owner holds while it computes with this matrix, beside the matrix."""
        return self.law.scratch(matrix.rows, matrix.cols)

    @cached_property
    def kept(self) -> int:
        """Bytes that this rank keeps between steps, as an owner."""
        return sum(self.law.kept(matrix.rows, matrix.cols) for matrix in self.mine) * self.wide

    @cached_property
    def kept_by_all(self) -> dict[tuple[int, int], int]:
        """Bytes that each rank, (place, slot), keeps as an owner; ranks that own nothing are left out."""
        of: dict[int, list[Matrix]] = {}
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            of.setdefault(owner, []).append(matrix)
        kept: dict[tuple[int, int], int] = {}
        for place, matrices in of.items():
            slots = assign([self.slice(matrix) for matrix in matrices], self.tp)
            for matrix, slot in zip(matrices, slots, strict=True):
                more = self.law.kept(matrix.rows, matrix.cols) * self.wide
                kept[place, slot] = kept.get((place, slot), 0) + more
        return kept

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
        scratch = max((self.scratch(matrix) for matrix in self.mine), default=0)
        return max(highest, pieces + (gathered + scratch) * self.width)

    def alone(self, matrix: Matrix, narrows: bool) -> int:
        """Bytes of one matrix that nobody has cut: what would travel, made narrow, and the owner's work."""
        ahead = matrix.numel * (self.wide + self.width * narrows)
        return max(ahead, (matrix.numel + self.scratch(matrix)) * self.width)


def busiest_flops(law: MatrixLaw, shape: Sizes, n_blocks: int, n: int) -> float:
    """Flops of a step on the rank that has the most, if n ranks share `n_blocks` blocks: one whole matrix at least.
    (Owners are that even where each rank holds pieces of several matrices.)"""
    names = [name for name in HIDDEN if name != "gate" or shape.gated]
    each = [law.flops(*matrix_of(shape, name)[:2]) for name in names]
    return max(n_blocks * sum(each) / n, max(each))


def sent_over(steps: Iterable[MatrixStep]) -> tuple[int, int]:
    """Bytes that a rank sends over dp and over tp in a step of all its stages."""
    pairs = [step.sent() for step in steps]
    return sum(dp for dp, _ in pairs), sum(tp for _, tp in pairs)
