"""03.3: an all-gather from send and recv alone, on a ring."""

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, Star, exercise, highest_peak, peak, sends
from labkit.plan.machine.collectives import sent_bytes

SLACK_BYTES = 32 << 10


def ring_all_gather(x: Tensor, group: Group) -> Tensor:
    """The parts of all ranks, joined along dim 0 in rank order, on every rank.   [k, d] -> [n*k, d]

    Talk to your neighbours on the ring only: send to the right one, rank + 1, and in each of n - 1 steps one part."""
    n, me = group.size, group.rank
    parts = [x] * n
    for step in range(n - 1):
        give, take = (me - step) % n, (me - step - 1) % n
        parts[take] = group.exchange(parts[give], to=(me + 1) % n, source=(me - 1) % n)
    return torch.cat(parts)


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks; parts of 50 KB and more, so that what is held can be told from a message's scratch."""
    return [
        Case.of(3, rows=300, width=60),
        Case.of(4, torch.float64, rows=90, width=100),
        Case.of(2, torch.int64, rows=110, width=70),
        Case.of(1, rows=200, width=80),
    ]


def inputs(case: Case) -> Inputs:
    """A part for each rank."""
    return [(case.random(case["rows"], case["width"], key=rank),) for rank in range(case.n_ranks)]


def answer(case: Case, inputs: Inputs) -> Answers:
    """All parts, joined."""
    return [torch.cat([x for (x,) in inputs])] * case.n_ranks


def whole(case: Case) -> int:
    """Bytes of the result."""
    return int(case.n_ranks * case["rows"] * case["width"] * case.item_bytes)


def law(case: Case, rank: int) -> float:
    """Bytes that a rank sends: (n-1)/n of the result's."""
    return sent_bytes("ring", "all_gather", case.n_ranks, whole(case), rank, case.item_bytes)


PROBLEM = exercise(
    __name__,
    ring_all_gather,
    laws=(
        sends(
            law,
            "each rank sends (n-1)/n S bytes, to its right neighbour, in n - 1 messages",
            only=("send",),
            to=lambda case, rank: {(rank + 1) % case.n_ranks},
            messages=lambda case, rank: case.n_ranks - 1,
        ),
        peak(
            lambda case, rank: 3 * whole(case) + SLACK_BYTES,
            "no rank ever holds more than three times the result",
        ),
    ),
    library="comm.ring.all_gather",
    star=Star(
        "each part lands where it belongs, so that a rank holds the result once and little else",
        highest_peak,
        lambda case: whole(case) + SLACK_BYTES,
    ),
)
