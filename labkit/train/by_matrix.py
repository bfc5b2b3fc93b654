"""What optimizers on whole matrices share: matrices come together on their owners, who work, and pieces go back.

    rank 0      piece of g -> what travels --+                       +--> piece of the step -> decay, step
                                             +-> the owner: whole ---+
    rank 1      piece of g -> what travels --+      matrix, work     +--> piece of the step -> decay, step

Where weights are cut, over dp (ZeRO's flat shards) or over tp, everything that treats each element by itself works on
pieces. In between pieces are gathered on an owner for each matrix (labkit.comm.matrix_owners), which computes with the
whole. Along dp the owner gets this tp rank's slice of a matrix; along tp one of the owners gets all slices. Under DDP
without tp nothing is sent, and each rank computes all.

Without tp the exchange is hidden: the pieces of one matrix travel while its owner works on another, and while AdamW
steps on all else (`MatrixOwners.in_turn`; its seconds: labkit.plan.laws.muon). With tp an owner along dp has to meet
its tp peers for each matrix, so there all pieces are gathered, all is worked on, and all answers go back.

An optimizer says four things (`ByMatrix`): what travels for a parameter, what is done with the whole matrix, by which
factor the result is scaled, and its law (labkit.plan.partition.matrices), from which the owners' shares of the work
follow. What it keeps of a whole matrix is on the owner alone (`kept`), and is saved with its piece of that matrix.

Vectors, embeddings and the head step with AdamW: parameter groups with `by_matrix` False (groups.py).

Source: Liu et al. (Moonlight), arXiv:2502.16982, section 2.3; Shi et al., arXiv:2309.06497, section 4 (owners that
compute and send the steps back).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from labkit.comm.group import Group
from labkit.comm.matrix_owners import MatrixOwners, Piece
from labkit.plan.contracts import shard_dim_of
from labkit.plan.partition.matrices import MatrixLaw
from labkit.plan.partition.owners import ElementRun, PlacedMatrix


class ByMatrix(Optimizer):
    """An optimizer on whole matrices for the groups with `by_matrix`, and AdamW for all others.

    `tp` is the group over which parameters with a `shard_dim` are cut. A strategy that cuts further calls `share`."""

    law: ClassVar[MatrixLaw]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        tp: Group | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Groups without `by_matrix` go to AdamW; `options` are those of the others."""
        listed = list(params)
        groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
        rest = [group for group in groups if not group.get("by_matrix")]
        defaults = {"lr": lr, "weight_decay": weight_decay}
        self.adamw = AdamW(rest or [{"params": []}], lr=lr, weight_decay=weight_decay)
        by_matrix = [{**(options or {}), **group} for group in groups if group.get("by_matrix")]
        super().__init__([*by_matrix, *(self.adamw.param_groups if rest else [])], defaults)
        self.tp = tp
        self._tie()
        self.pieces = [
            Piece(p, slice(0, p.numel()), tuple(p.shape), (ElementRun(0, 0, p.numel()),), shard_dim_of(p))
            for p in self.matrices
        ]
        self.dp: MatrixOwners | None = None
        self._meet()

    # -- what an optimizer says --------------------------------------------------------------------------------------

    def travels(self, p: Tensor, group: Mapping[str, Any]) -> Tensor:
        """What the owner needs of a parameter, or of this rank's flat piece, in a new flat tensor: the gradient, unless
        the optimizer says otherwise."""
        assert p.grad is not None
        return p.grad.detach().clone().view(-1)

    def work_(self, matrix: Tensor, number: int, group: Mapping[str, Any]) -> None:
        """The owner's work: what has come together, [rows, cols], becomes the direction of the step, in place.

        `number` is the same in every step, and `group` has the options of the matrix."""
        raise TypeError(f"{type(self).__name__} does not say what it does with a whole matrix: define work_")

    def scale(self, rows: int, cols: int) -> float:
        """The factor of the direction in the step, beside the learning rate."""
        return 1.0

    # -- who has what ------------------------------------------------------------------------------------------------

    @property
    def matrices(self) -> list[Tensor]:
        """What is stepped on by matrix: matrices, or flat shards with pieces of them."""
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
            self._check_matrix(piece.local_shape)
        held = [
            PlacedMatrix(math.prod(piece.local_shape), self._flops(piece.local_shape), piece.runs) for piece in pieces
        ]
        self.pieces, self.dp = list(pieces), MatrixOwners(group, held)
        self._meet()

    def _flops(self, shape: Sequence[int]) -> int:
        rows, cols = shape
        return self.law.flops(rows, cols)

    def _meet(self) -> None:
        """Share out over tp the matrices that this rank owns along dp: its tp peers own the other slices of them."""
        numbers = range(len(self.pieces)) if self.dp is None else _of(self.dp.owners, self.dp.group.rank)
        cut = [k for k in numbers if self.pieces[k].shard_dim is not None]
        self.cut: dict[int, int] = {}
        self.slices: MatrixOwners | None = None
        if self.tp is not None and self.tp.size > 1 and cut:
            self.cut = {k: place for place, k in enumerate(cut)}
            self.slices = MatrixOwners(self.tp, [self._slices(self.pieces[k]) for k in cut])

    def _slices(self, piece: Piece) -> PlacedMatrix:
        assert self.tp is not None
        rows, cols = self._whole(piece)
        size = math.prod(piece.local_shape)
        runs = tuple(ElementRun(rank, rank * size, size) for rank in range(self.tp.size))
        return PlacedMatrix(rows * cols, self.law.flops(rows, cols), runs)

    def _whole(self, piece: Piece) -> tuple[int, int]:
        n = 1 if self.tp is None else self.tp.size
        rows, cols = piece.local_shape
        return (rows * n if piece.shard_dim == 0 else rows, cols * n if piece.shard_dim == 1 else cols)

    # -- what owners keep --------------------------------------------------------------------------------------------

    def kept(self, number: int) -> dict[str, Any]:
        """What this rank keeps, as an owner, of the matrix of this number: an entry of `state`, empty at first."""
        entry: dict[str, Any] = self.state.setdefault(f"matrix {number}", {})  # type: ignore[call-overload]
        return entry

    def owns(self, number: int) -> bool:
        """True if this rank does the owner's work for the matrix of this number."""
        if self.dp is not None and self.dp.owners[number] != self.dp.group.rank:
            return False
        if self.slices is None or number not in self.cut:
            return True
        return self.slices.owners[self.cut[number]] == self.slices.group.rank

    def kept_of(self, param: Tensor, window: slice) -> dict[str, Any]:
        """What this rank keeps as the owner of the matrix of which these elements are a piece; {} if it is not that."""
        number = self._number_of(param, window)
        return {} if number is None else dict(self.state.get(f"matrix {number}", {}))  # type: ignore[call-overload]

    def keep_of(self, param: Tensor, window: slice, kept: Mapping[str, Any]) -> None:
        """Put back what `kept_of` gave on the rank that was the owner then, if this rank is the owner now."""
        number = self._number_of(param, window)
        if number is not None and kept and self.owns(number):
            for key, value in kept.items():
                tensor = torch.as_tensor(value)  # a copy: what is kept changes in place
                self.kept(number)[key] = tensor.to(param, copy=True) if tensor.dim() else tensor.item()

    def _number_of(self, param: Tensor, window: slice) -> int | None:
        numbers = (k for k, piece in enumerate(self.pieces) if piece.param is param and piece.window == window)
        return next(numbers, None)

    # -- the step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on every parameter that has a gradient; every rank that holds pieces of a matrix calls it.

        Raises ValueError, if nobody has called `share`, for what is no matrix."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        numbers = range(len(self.pieces))
        if self.dp is None and self.slices is None:
            for number in numbers:  # one after another: nobody waits for an answer
                self._step_matrices([number])
            self._step_rest()
        elif self.slices is None:
            self._step_matrices(numbers, self._step_rest)  # AdamW steps while the first pieces travel
        else:
            self._step_matrices(numbers)
            self._step_rest()
        return loss

    def _step_rest(self) -> None:
        if self.adamw.param_groups:
            self.adamw.step()

    def _step_matrices(self, numbers: Sequence[int], meanwhile: Callable[[], None] | None = None) -> None:
        pieces = [self.pieces[number] for number in numbers]
        rules = {p: group for group in self.param_groups if group.get("by_matrix") for p in group["params"]}
        wanted = {piece.param for piece in pieces}
        flats = {p: self.travels(p, rules[p]) for p in rules if p in wanted and p.grad is not None}
        own = [
            None if piece.param is None or piece.param not in flats else flats[piece.param][piece.window]
            for piece in pieces
        ]
        if self.dp is not None and self.slices is None:
            self.dp.in_turn(own, lambda number, whole: self._direct_(number, whole, rules), meanwhile)
        else:
            wholes = own if self.dp is None else self.dp.gather(own)
            self._work_(numbers, wholes, rules)
            if self.dp is not None:
                self.dp.scatter(wholes, own)
        for p in flats:
            p.mul_(1 - rules[p]["lr"] * rules[p]["weight_decay"])
        for piece, direction in zip(pieces, own, strict=True):
            if piece.param is not None and direction is not None:
                scale = rules[piece.param]["lr"] * self.scale(*self._whole(piece))
                piece.param.view(-1)[piece.window].add_(direction, alpha=-scale)

    def _work_(
        self, numbers: Sequence[int], wholes: Sequence[Tensor | None], rules: Mapping[Tensor, Mapping[str, Any]]
    ) -> None:
        """The owner's work on each whole matrix, those that tp has cut put together first, in place."""
        # rows of slices follow one another in a flat whole; columns do so when they are turned
        turned = [_turned(wholes[k], self.pieces[k]) for k in self.cut]
        slices = self.slices.gather(turned) if self.slices is not None else []
        for number, whole in zip(numbers, wholes, strict=True):
            flat = slices[self.cut[number]] if number in self.cut else whole
            if flat is not None:
                self._direct_(number, flat, rules)
        if self.slices is not None:
            self.slices.scatter(slices, turned)
        for number, part in zip(self.cut, turned, strict=True):
            whole, (rows, cols) = wholes[number], self.pieces[number].local_shape
            if self.pieces[number].shard_dim == 1 and whole is not None and part is not None:
                whole.view(rows, cols).copy_(part.view(cols, rows).T)

    def _direct_(self, number: int, flat: Tensor, rules: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """The owner's work on one whole matrix, in place. One that tp has cut along its columns lies turned."""
        piece = self.pieces[number]
        assert piece.param is not None  # an owner holds a piece
        shape = self._whole(piece) if number in self.cut else piece.local_shape
        self._check_matrix(shape)
        rows, cols = shape
        by_columns = number in self.cut and piece.shard_dim == 1
        matrix = flat.view(cols, rows).T if by_columns else flat.view(rows, cols)
        self.work_(matrix, number, rules[piece.param])

    def _check_matrix(self, shape: Sequence[int]) -> None:
        if len(shape) != 2:
            raise ValueError(
                f"{type(self).__name__} steps on matrices, got a parameter of shape {tuple(shape)}: give it a group "
                "without by_matrix, or, if it is a flat shard, a strategy that knows the matrices in it (ZeRO1, ZeRO2, "
                "ZeRO3)"
            )


def _turned(whole: Tensor | None, piece: Piece) -> Tensor | None:
    if whole is None or piece.shard_dim == 0:
        return whole
    return whole.view(*piece.local_shape).T.contiguous().view(-1)


def _of(owners: Sequence[int], rank: int) -> list[int]:
    return [k for k, owner in enumerate(owners) if owner == rank]
