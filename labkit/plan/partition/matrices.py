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

Who owns what is the rule of plan.partition.owners and the layout that of labkit.parallel.sharded, so these numbers are
those of a real step. Each expert's matrices are matrices like others, and so is a router's, which tp leaves whole. With
ep those of experts are shared along expert_dp, in a step of their own. Latent attention's matrices are known by their
sizes alone: labkit's GPT does not have them. Source: Liu et al., arXiv:2502.16982, section 2.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from labkit.plan.model.sizes import Sizes
from labkit.plan.partition.owners import ElementRun, PlacedMatrix, assign, runs_of, sent


class Matrix(NamedTuple):
    """A matrix [rows, cols], whole; `dim` is the one along which tp cuts it, None for one that it leaves whole."""

    rows: int
    cols: int
    dim: int | None

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return self.rows * self.cols

    def slice_of(self, tp: int) -> tuple[int, int]:
        """The shape of a rank's slice of it."""
        if self.dim is None:
            return self.rows, self.cols
        return (self.rows // tp, self.cols) if self.dim == 0 else (self.rows, self.cols // tp)


def nothing(rows: int, cols: int) -> int:
    """0 numbers: the factors of an optimizer whose owners keep none."""
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
    """A block's matrix by its name in the planner's layers; of experts one of its `experts.0.up`."""
    d, heads, keys = shape.d_model, shape.n_head * shape.width, shape.kv_heads * shape.width
    of, _, last = name.rpartition(".")
    hidden = {"": shape.hidden, "shared": shape.n_shared * shape.expert_hidden}.get(of, shape.expert_hidden)
    sizes: dict[str, tuple[int, int, int | None]] = {
        "query": (heads, d, 0), "key": (keys, d, 0), "value": (keys, d, 0), "out": (d, heads, 1),
        "gate": (hidden, d, 0), "up": (hidden, d, 0), "down": (d, hidden, 1), "router": (shape.n_expert, d, None),
    }  # fmt: skip
    if shape.kv_lora is not None:
        cut = {"query": 0, "key_value": 0, "out": 1}
        inner = zip(shape.attention_names, shape.attention_products, strict=True)
        sizes |= {latent: (out, inside, cut.get(latent)) for latent, (inside, out) in inner}
    return Matrix(*sizes[last])


def matrices_of(shape: Sizes, name: str, size: int, tp: int) -> list[Matrix]:
    """The matrices under one name, `size` elements on this rank: several where experts are walked together."""
    matrix = matrix_of(shape, name)
    rows, cols = matrix.slice_of(tp)
    return [matrix] * (size // (rows * cols) if name.startswith("experts.") else 1)


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
        slices = [matrix.slice_of(tp) for matrix in self.matrices]
        sizes = [[math.prod(matrix.slice_of(tp)) for matrix in buffer] for buffer in buffers]
        runs = [run for buffer in sizes for run in runs_of(buffer, n)]
        self.held = [PlacedMatrix(r * c, law.flops(r, c), own) for (r, c), own in zip(slices, runs, strict=True)]
        self.owners = assign(self.held, n)
        self.shards = [-(-sum(buffer) // n) for buffer in sizes]
        self.owned_matrices = self.owned_by(place)
        self.cut = [self.matrices[k] for k in self.owned_matrices if self.is_cut(self.matrices[k])]
        self.slices = [self.slice(matrix) for matrix in self.cut]
        self.slice_owners = assign(self.slices, tp)

    def is_cut(self, matrix: Matrix) -> bool:
        """True if each rank of tp has a slice of it."""
        return self.tp > 1 and matrix.dim is not None

    def owned_by(self, place: int) -> list[int]:
        """The numbers of the matrices whose slices this rank of dp owns."""
        return [k for k, owner in enumerate(self.owners) if owner == place]

    def slice(self, matrix: Matrix) -> PlacedMatrix:
        """A matrix as the ranks of tp hold it: one slice on each, and the flops of the whole."""
        part = matrix.numel // self.tp
        flops = self.law.flops(matrix.rows, matrix.cols)
        return PlacedMatrix(matrix.numel, flops, tuple(ElementRun(rank, rank * part, part) for rank in range(self.tp)))

    @cached_property
    def mine(self) -> list[Matrix]:
        """The matrices that this rank computes with: what tp leaves whole each of its ranks does."""
        return [self.matrices[k] for k in self.owned_matrices if not self.is_cut(self.matrices[k])] + self.together

    @cached_property
    def together(self) -> list[Matrix]:
        """Those of them that it puts together from slices of its peers in tp."""
        return [matrix for matrix, owner in zip(self.cut, self.slice_owners, strict=True) if owner == self.slot]

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
            cut = [matrix for matrix in matrices if self.is_cut(matrix)]
            owned = [*zip(cut, assign([self.slice(matrix) for matrix in cut], self.tp), strict=True)]
            owned += [(matrix, slot) for matrix in matrices if not self.is_cut(matrix) for slot in range(self.tp)]
            for matrix, slot in owned:
                history = self.law.kept(matrix.rows, matrix.cols) * self.wide
                kept[place, slot] = kept.get((place, slot), 0) + history
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
        gathered = sum(self.held[k].numel for k in self.owned_matrices if len(self.held[k].runs) > 1)
        if self.tp > 1:
            gathered += sum(matrix.numel // self.tp for matrix in self.cut if matrix.dim == 1)
            gathered += sum(matrix.numel for matrix in self.together)
        scratch = max((self.scratch(matrix) for matrix in self.mine), default=0)
        return max(highest, pieces + (gathered + scratch) * self.width)

    def alone(self, matrix: Matrix, narrows: bool) -> int:
        """Bytes of one matrix that nobody has cut: what would travel, made narrow, and the owner's work."""
        ahead = matrix.numel * (self.wide + self.width * narrows)
        return max(ahead, (matrix.numel + self.scratch(matrix)) * self.width)


def busiest_flops(law: MatrixLaw, shape: Sizes, n_blocks: int, n: int, experts: int = 0, n_same: int = 1) -> float:
    """Flops of a step on the rank that has the most, if n ranks share `n_blocks` blocks: one whole matrix at
    least. (Owners are that even where each rank holds pieces of several matrices.)

    With `experts` of each block on a rank, which `n_same` ranks share: theirs on top."""
    attention = shape.attention_names
    mlp = ("gate", "up", "down") if shape.gated else ("up", "down")
    shared = [f"shared.{name}" for name in mlp] if shape.n_shared else []
    mixed = n_blocks * shape.n_mixed / shape.n_layer
    kinds = [
        (n_blocks - mixed, n, (*attention, *mlp)),
        (mixed, n, (*attention, "router", *shared)),
        (mixed * experts, n_same, [f"experts.0.{name}" for name in mlp]),
    ]
    work, least = 0.0, 0.0
    for count, ranks, names in kinds:
        flops = [law.flops(*matrix_of(shape, name)[:2]) for name in names]
        work += count * sum(flops) / ranks
        least = max(least, max(flops) * (count > 0))
    return max(work, least)


def sent_over(steps: Iterable[MatrixStep]) -> tuple[int, int]:
    """Bytes that a rank sends over dp and over tp in a step of all its stages."""
    pairs = [step.sent() for step in steps]
    return sum(dp for dp, _ in pairs), sum(tp for _, tp in pairs)
