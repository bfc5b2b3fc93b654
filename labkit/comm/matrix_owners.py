"""Owner computes: matrices that lie in pieces on the ranks of a group come together on one rank each, and go back.

    rank 0    |q q q|u u|               gather     q whole on 0      u whole on 1       pieces travel to the owners
    rank 1    |u u u u|                 (work)     f(q)              f(u)
                                        scatter    |f f f|f f|       |f f f f|         each gets its piece of the answer

The owners are those of plan.partition.owners: each rank holds a piece of what it owns, and the work is shared out.
Messages go matrix by matrix in an order that is the same on all ranks, and nobody waits for a later one: it cannot
deadlock. `in_turn` does all three and hides the messages of one matrix behind the work on another:

    on the way in     q       u       v
    work                      q       u       v              of an owner of three matrices
    on the way out                    f(q)    f(u)    f(v)

    bytes sent per rank    `sent` elements of plan.partition.owners: its pieces of others' matrices, theirs of its own
    memory                 the whole matrices that it owns, but for those that it holds whole already

Source: the scheme follows "Distributed Muon" of Liu et al. (Moonlight), arXiv:2502.16982, section 2.3, which gathers a
matrix on every rank that holds a piece of it; here one of these computes and the others wait for the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from labkit.comm.group import Group, Work
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
        arriving, sends = self._start(pieces)
        wholes: list[Tensor | None] = [None] * len(pieces)
        for number, whole in arriving.items():
            wholes[number] = whole.wait()
        for message in sends:
            message.wait()
        return wholes

    def scatter(self, wholes: Sequence[Tensor | None], pieces: Sequence[Tensor | None]) -> None:
        """The other way: writes this rank's piece of each whole matrix into `pieces`."""
        sends, expected = list[Work](), list[Work]()
        for number, (owner, whole, piece) in enumerate(zip(self.owners, wholes, pieces, strict=True)):
            if whole is not None:
                assert piece is not None
                sends += self._answer(number, whole, piece)
            elif piece is not None:
                expected.append(self.group.recv_start(owner, into=piece))
        for message in [*expected, *sends]:
            message.wait()

    def in_turn(
        self,
        pieces: Sequence[Tensor | None],
        work: Callable[[int, Tensor], None],
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """`gather`, `work(number, whole)` in place on what this rank owns, `scatter` into `pieces`: matrix by matrix.

        All pieces leave before the first work, and each answer leaves as soon as it is there, so that they travel while
        this rank works; `meanwhile` is called while the first pieces come. Sends the bytes of gather and scatter, and
        leaves the same numbers."""
        (arriving, sends), answers = self._start(pieces), list[Work]()
        if meanwhile is not None:
            meanwhile()
        for number, expected in arriving.items():
            whole, piece = expected.wait(), pieces[number]
            assert piece is not None
            work(number, whole)
            answers += self._answer(number, whole, piece)
        for message in sends:  # before answers come into the same memory
            message.wait()
        for owner, piece in zip(self.owners, pieces, strict=True):
            if owner != self.group.rank and piece is not None:
                self.group.recv(owner, into=piece)
        for message in answers:
            message.wait()

    def _start(self, pieces: Sequence[Tensor | None]) -> tuple[dict[int, _Arriving], list[Work]]:
        """Let all pieces leave for their owners: what comes for this rank's own matrices, by number, and what it sends.

        Nobody waits before everything of its own is on the way: two owners would let each other wait in turn."""
        group, sends, arriving = self.group, list[Work](), dict[int, _Arriving]()
        for number, (held, owner, piece) in enumerate(zip(self.held, self.owners, pieces, strict=True)):
            if owner != group.rank:
                sends += [] if piece is None else [group.send(piece, owner)]
                continue
            assert piece is not None
            whole, messages = piece, []
            if piece.numel() != held.numel:
                whole = piece.new_empty(held.numel)
                for rank, start, count in held.runs:
                    window = whole[start : start + count]
                    if rank == group.rank:
                        window.copy_(piece)
                    else:
                        messages.append(group.recv_start(rank, into=window))
            arriving[number] = _Arriving(whole, messages)
        return arriving, sends

    def _answer(self, number: int, whole: Tensor, piece: Tensor) -> list[Work]:
        """Let the parts of an owned matrix leave for those who hold pieces; this rank's own is copied."""
        sends = []
        for rank, start, count in self.held[number].runs:
            if rank != self.group.rank:
                sends.append(self.group.send(whole[start : start + count], rank))
            elif whole is not piece:
                piece.copy_(whole[start : start + count])
        return sends


class _Arriving(NamedTuple):
    """A whole matrix, and the messages with those pieces of it that are not there yet."""

    whole: Tensor
    messages: list[Work]

    def wait(self) -> Tensor:
        """The whole matrix, as soon as all pieces are there."""
        for message in self.messages:
            message.wait()
        return self.whole
