"""03.2: a reduce-scatter from send and recv alone, on a ring."""

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends
from labkit.plan.machine.collectives import sent_bytes


def ring_reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """The sum of x over all ranks, cut along dim 0; this rank keeps part `group.rank`.   [n*k, d] -> [k, d]

    Talk to your neighbours on the ring only: send to the right one, rank + 1, and n - 1 parts in all, not whole
    tensors."""
    n, me = group.size, group.rank
    parts = list(x.clone().chunk(n))
    for step in range(n - 1):
        give, take = (me - step - 1) % n, (me - step - 2) % n
        parts[take] = parts[take] + group.exchange(parts[give], to=(me + 1) % n, source=(me - 1) % n)
    return parts[me]


def cases() -> list[Case]:
    """Worlds of 1 to 7 ranks."""
    return [
        Case.of(2, rows=3, width=5),
        Case.of(3, torch.float64, rows=2, width=7),
        Case.of(4, torch.int64, rows=1, width=3).among(
            Case.of(5, torch.float64, rows=2, width=4), Case.of(7, torch.int64, rows=1, width=6)
        ),
        Case.of(1, rows=4, width=2),
    ]


def inputs(case: Case) -> Inputs:
    """A tensor of its own for each rank."""
    return [(case.random(case.n_ranks * case["rows"], case["width"], key=rank),) for rank in range(case.n_ranks)]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The parts of the sum."""
    return torch.stack([x for (x,) in inputs]).sum(0).chunk(case.n_ranks)


def law(case: Case, rank: int) -> float:
    """Bytes that a rank sends: (n-1)/n of the tensor's."""
    whole = case.n_ranks * case["rows"] * case["width"] * case.item_bytes
    return sent_bytes("ring", "reduce_scatter", case.n_ranks, whole, rank, case.item_bytes)


PROBLEM = exercise(
    __name__,
    ring_reduce_scatter,
    laws=(
        sends(
            law,
            "each rank sends (n-1)/n S bytes, to its right neighbour, in n - 1 messages",
            only=("send",),
            to=lambda case, rank: {(rank + 1) % case.n_ranks},
            messages=lambda case, rank: case.n_ranks - 1,
        ),
    ),
    library="comm.ring.reduce_scatter",
)
