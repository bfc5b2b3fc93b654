"""Muon on one rank: which pieces of matrices it has, what it gathers as an owner, sends, holds and computes.

    flat shards    pieces of this rank's slices of matrices       over dp: `held`       an owner among the ranks of dp
    slices         whole along dp on their owner                  over tp: `slices`     an owner among its peers in tp
    matrices       whole: Newton-Schulz

    bytes sent     pieces to their owners and answers back, in bf16 (2 bytes an element; 8 in float64); AdamW sends none
    memory         of an element between steps, bf16 with fp32 masters: weight 2 + gradient 2 + master 4 + momentum 4,
                   of which ZeRO shards 4 to 12; in the step besides: 2 for each piece, 2 for each gathered element, and
                   two copies of the matrix and two of the square of its smaller side
    flops          5 (4 s s l + 2 s s s) for a matrix s x l, on its owner alone

Each expert's matrices are matrices like others, and so is a router's, which tp leaves whole. With ep those of experts
are shared along expert_dp, in a step of their own.

Who owns what is the rule of labkit.plan.owners and the layout that of labkit.parallel.sharded, so these numbers are
those of a real step. Latent attention's matrices are known by their sizes alone: labkit's GPT does not have them.
Sources: labkit.train.muon; Liu et al., arXiv:2502.16982, sections 2.2 and 2.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from labkit.plan.owners import Held, Run, assign, orthogonalising_flops, runs_of, sent
from labkit.plan.sizes import Sizes


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

    @property
    def scratch(self) -> int:
        """Elements that Newton-Schulz holds besides: this step's x and the next one, A, and b A + c A A."""
        return 2 * self.numel + 2 * min(self.rows, self.cols) ** 2


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
        names = ("query_in", "query", "latent", "key_value", "out")
        inner = zip(names, shape.attention_products, (None, 0, None, 0, 1), strict=True)
        sizes |= {latent: (out, inside, dim) for latent, (inside, out), dim in inner}
    return Matrix(*sizes[last])


def matrices_of(shape: Sizes, name: str, size: int, tp: int) -> list[Matrix]:
    """The matrices under one name, `size` elements on this rank: several where experts are walked together."""
    matrix = matrix_of(shape, name)
    rows, cols = matrix.slice_of(tp)
    return [matrix] * (size // (rows * cols) if name.startswith("experts.") else 1)


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
        slices = [matrix.slice_of(tp) for matrix in self.matrices]
        sizes = [[math.prod(matrix.slice_of(tp)) for matrix in buffer] for buffer in buffers]
        runs = [run for buffer in sizes for run in runs_of(buffer, n)]
        self.held = [Held(r * c, orthogonalising_flops(r, c), own) for (r, c), own in zip(slices, runs, strict=True)]
        self.owners = assign(self.held, n)
        self.shards = [-(-sum(buffer) // n) for buffer in sizes]
        self.here = self.owned_by(place)
        self.cut = [self.matrices[k] for k in self.here if tp > 1 and self.matrices[k].dim is not None]
        self.slices = [self.slice(matrix) for matrix in self.cut]
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
        """The matrices that this rank computes with: what tp leaves whole each of its ranks does."""
        whole = [self.matrices[k] for k in self.here if self.tp == 1 or self.matrices[k].dim is None]
        return whole + self.together

    @property
    def together(self) -> list[Matrix]:
        """Those of them that it puts together from slices of its peers in tp."""
        return [matrix for matrix, owner in zip(self.cut, self.slice_owners, strict=True) if owner == self.slot]

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
            gathered += sum(matrix.numel // self.tp for matrix in self.cut if matrix.dim == 1)
            gathered += sum(matrix.numel for matrix in self.together)
        scratch = max((matrix.scratch for matrix in self.mine), default=0)
        return max(highest, pieces + (gathered + scratch) * self.width)

    def alone(self, matrix: Matrix, narrows: bool) -> int:
        """Bytes of one matrix that nobody has cut: its momentum, rounded, and Newton-Schulz."""
        ahead = matrix.numel * (self.wide + self.width * narrows)
        return max(ahead, (matrix.numel + matrix.scratch) * self.width)


def busiest_flops(shape: Sizes, n_blocks: int, n: int, experts: int = 0, n_same: int = 1) -> float:
    """Flops of Newton-Schulz on the rank that has the most, if n ranks share `n_blocks` blocks: one whole matrix at
    least. (Owners are that even where each rank holds pieces of several matrices.)

    With `experts` of each block on a rank, which `n_same` ranks share: theirs on top."""
    latent = shape.kv_lora is not None
    attention = ("query_in", "query", "latent", "key_value", "out") if latent else ("query", "key", "value", "out")
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
        each = [orthogonalising_flops(*matrix_of(shape, name)[:2]) for name in names]
        work += count * sum(each) / ranks
        least = max(least, max(each) * (count > 0))
    return max(work, least)


def law(steps: Iterable[MuonStep]) -> tuple[int, int]:
    """Bytes that a rank sends over dp and over tp in a step of all its stages."""
    pairs = [step.sent() for step in steps]
    return sum(dp for dp, _ in pairs), sum(tp for _, tp in pairs)
