"""02.1: every rank gets the tensor of a rank some places away."""

from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends


def shift_along_ring(x: Tensor, by: int, group: Group) -> Tensor:
    """Everybody's x moves `by` places to the right on the ring 0, 1, ..., n-1, 0: rank r ends with a new tensor, a copy
    of the x of the rank `by` places to its left.   [k of this rank, d] -> [k of that rank, d]

    `by` is the same on all ranks, and any whole number: negative is to the left, more than n goes round. Every x goes
    straight to where it belongs, in one message; if it belongs where it is, nothing is sent. Ranks may hold different
    numbers of rows: a message carries its shape."""
    n, me = group.size, group.rank
    if by % n == 0:
        return x.clone()
    return group.exchange(x, to=(me + by) % n, source=(me - by) % n)


def cases() -> list[Case]:
    """Worlds of 1 to 7 ranks. First `by` is below n, then negative, then above n: a case of its own for each, so that
    one mistake is always told by the same case."""
    return [Case.of(3, by=2, rows=(3, 1, 2)), Case.of(3, by=-1, rows=(1, 3, 2)),
            Case.of(4, torch.float64, by=9, rows=(2, 2, 5, 1)).among(
                Case.of(5, torch.float16, by=9, rows=(2, 3, 1, 5, 2)),
                Case.of(7, torch.float64, by=16, rows=(1, 3, 2, 5, 1, 2, 4))),
            Case.of(4, torch.int64, by=-8, rows=(1, 2, 1, 3)), Case.of(2, torch.bfloat16, by=-3, rows=(4, 2)),
            Case.of(1, by=2, rows=(3,))]  # fmt: skip


def inputs(case: Case) -> Inputs:
    """A tensor of its own for each rank."""
    return [(case.random(rows, 5, key=rank), case["by"]) for rank, rows in enumerate(case["rows"])]


def play(attempt: Any, group: Group, x: Tensor, by: int) -> Any:
    """Run the attempt; a tensor that shares x's memory is no new one."""
    y = attempt(x, by, group)
    alias = isinstance(y, Tensor) and y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    return "x itself, which the caller may change: a copy was asked for" if alias else y


def answer(case: Case, inputs: Inputs) -> Answers:
    """The list of all tensors, rotated."""
    order = [x for x, _ in inputs]
    return [order[(index - case["by"]) % case.n_ranks] for index in range(case.n_ranks)]


PROBLEM = exercise(
    __name__,
    shift_along_ring,
    laws=(
        sends(
            lambda case, rank: case["rows"][rank] * 5 * case.item_bytes if case["by"] % case.n_ranks else 0,
            "each rank sends its own tensor once, straight to the rank that wants it; nothing if that is itself",
            only=("send",),
            to=lambda case, rank: {(rank + case["by"]) % case.n_ranks},
            messages=lambda case, rank: 1,
        ),
    ),
)
