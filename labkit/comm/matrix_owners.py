"""Owner computes: matrices that lie in pieces on the ranks of a group come together on one rank each, and go back.

    rank 0    |q q q|u u|               gather     q whole on 0      u whole on 1       pieces travel to the owners
    rank 1    |u u u u|                 (work)     f(q)              f(u)
                                        scatter    |f f f|f f|       |f f f f|         each gets its piece of the answer

The owners are those of plan.partition.owners: each rank holds a piece of what it owns, and the work is shared out.
Messages go matrix by matrix in an order that is the same on all ranks, and nobody waits for a later one: it cannot
deadlock.

    bytes sent per rank    `sent` elements of plan.partition.owners: its pieces of others' matrices, theirs of its own
    memory                 the whole matrices that it owns, but for those that it holds whole already

Source: the scheme follows "Distributed Muon" of Liu et al. (Moonlight), arXiv:2502.16982, section 2.3, which gathers a
matrix on every rank that holds a piece of it; here one of these computes and the others wait for the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from labkit.comm.group import Group
from labkit.plan.partition.owners import ElementRun, PlacedMatrix, assign


class Piece(NamedTuple):
    """A matrix of which an optimizer steps on a part: elements `window` of `param` (None: no part of it is here).

    local_shape   of the matrix on this rank: under tensor parallelism of its slice, which is cut along `shard_dim`
    runs          where all pieces of it lie in the group that it is sharded over
    """

    param: Tensor | None
    window: slice
    local_shape: tuple[int, ...]
    runs: tuple[ElementRun, ...]
    shard_dim: int | None


class MatrixOwners:
    """Where the pieces of some matrices lie in a group, and which rank owns which matrix."""

    def __init__(self, group: Group, held: Sequence[PlacedMatrix]) -> None:
        """All ranks give the same `held`."""
        self.group, self.held = group, tuple(held)
        self.owners = assign(self.held, group.size)

    def gather(self, pieces: Sequence[Tensor | None]) -> list[Tensor | None]:
        """This rank's piece of each matrix, flat, None for no piece -> the whole flat matrices that it owns, None
        for those of others. A matrix that this rank holds whole is the piece itself.   [k] -> [numel]"""
        wholes: list[Tensor | None] = []
        sends = []
        for held, owner, piece in zip(self.held, self.owners, pieces, strict=True):
            if owner != self.group.rank:
                sends += [] if piece is None else [self.group.send(piece, owner)]
                wholes.append(None)
                continue
            assert piece is not None
            whole = piece if piece.numel() == held.numel else piece.new_empty(held.numel)
            for rank, start, count in held.runs:
                if rank != self.group.rank:
                    self.group.recv(rank, into=whole[start : start + count])
                elif whole is not piece:
                    whole[start : start + count] = piece
            wholes.append(whole)
        for work in sends:
            work.wait()
        return wholes

    def scatter(self, wholes: Sequence[Tensor | None], pieces: Sequence[Tensor | None]) -> None:
        """The other way: writes this rank's piece of each whole matrix into `pieces`."""
        sends = []
        for held, owner, whole, piece in zip(self.held, self.owners, wholes, pieces, strict=True):
            if whole is None:
                if piece is not None:
                    self.group.recv(owner, into=piece)
                continue
            for rank, start, count in held.runs:
                if rank != self.group.rank:
                    sends.append(self.group.send(whole[start : start + count], rank))
                elif whole is not piece:
                    assert piece is not None
                    piece.copy_(whole[start : start + count])
        for work in sends:
            work.wait()
