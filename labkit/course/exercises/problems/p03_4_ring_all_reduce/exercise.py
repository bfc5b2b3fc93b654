"""03.4: an all-reduce on a ring: a reduce-scatter, and an all-gather right behind it."""

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, Star, exercise, highest_peak, peak, sends
from labkit.plan.machine.collectives import sent_bytes

SLACK_BYTES = 32 << 10


def ring_all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of x over all ranks, on every rank; x itself stays as it is.   [n*k, d] -> [n*k, d]

    Talk to your neighbours on the ring only: send to the right one, rank + 1, n-th parts of the tensor and never more,
    in 2 (n - 1) steps."""
    n, me = group.size, group.rank
    parts = list(x.clone().chunk(n))
    for step in range(2 * (n - 1)):
        give, take = (me - step) % n, (me - step - 1) % n
        came = group.exchange(parts[give], to=(me + 1) % n, source=(me - 1) % n)
        parts[take] = parts[take] + came if step < n - 1 else came
    return torch.cat(parts)


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks; tensors of megabytes, so that what is held stands above the noise of a process."""
    return [
        Case.of(3, rows=750, width=500).among(Case.of(3, rows=600, width=620), Case.of(3, rows=1500, width=250)),
        Case.of(4, torch.float64, rows=270, width=520),
        Case.of(2, torch.int64, rows=500, width=450),
        Case.of(1, rows=1200, width=830),
    ]


def inputs(case: Case) -> Inputs:
    """A tensor of its own for each rank."""
    return [(case.random(case.n_ranks * case["rows"], case["width"], key=rank),) for rank in range(case.n_ranks)]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The sum."""
    return [torch.stack([x for (x,) in inputs]).sum(0)] * case.n_ranks


def whole(case: Case) -> int:
    """Bytes of the tensor."""
    return int(case.n_ranks * case["rows"] * case["width"] * case.item_bytes)


def law(case: Case, rank: int) -> float:
    """Bytes that a rank sends: 2 (n-1)/n of the tensor's."""
    return sent_bytes("ring", "all_reduce", case.n_ranks, whole(case), rank, case.item_bytes)


PROBLEM = exercise(
    __name__,
    ring_all_reduce,
    laws=(
        sends(
            law,
            "each rank sends 2 (n-1)/n S bytes, to its right neighbour, in 2 (n - 1) messages",
            only=("send",),
            to=lambda case, rank: {(rank + 1) % case.n_ranks},
            messages=lambda case, rank: 2 * (case.n_ranks - 1),
            largest=lambda case, rank: whole(case) / case.n_ranks,
        ),
        peak(
            lambda case, rank: 4 * whole(case) + SLACK_BYTES,
            "no rank ever holds more than four times the tensor",
        ),
    ),
    library="comm.ring.all_reduce",
    star=Star(
        "the sums are taken in one buffer that is the result, beside one part that has just come",
        highest_peak,
        lambda case: whole(case) * (1 + (case.n_ranks > 1) / case.n_ranks) + SLACK_BYTES,
    ),
)
