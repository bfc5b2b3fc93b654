"""03.5: an all-gather of parts whose lengths nobody knows, with collectives that want the same shape everywhere."""

import random

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, Star, exercise, sends
from labkit.course.judge.run_record import RunRecord

COUNT_BYTES = 8
LONGEST = 9


def ragged_all_gather(x: Tensor, group: Group) -> Tensor:
    """The rows of all ranks, joined in rank order, on every rank.   [k, d] -> [sum of all k, d]

    k differs from rank to rank, may be 0, and nobody knows that of another. Use `all_gather` and `broadcast` only: they
    want the same shape on every rank. A rank may send n - 1 times one int64, to tell k, and n - 1 times the longest
    part."""
    lengths = group.all_gather(torch.tensor([len(x)], device=group.device))
    padded = x.new_zeros(int(lengths.max()), x.shape[1])
    padded[: len(x)] = x
    gathered = group.all_gather(padded).chunk(group.size)
    return torch.cat([part[:length] for part, length in zip(gathered, lengths, strict=True)])


def cases() -> list[Case]:
    """Worlds of 1 to 7 ranks; in the first a rank in the middle has no rows. In the second, rows are so many that bf16,
    the dtype of the rows, has no number for them."""
    return [
        Case.of(3, width=5, empty=(1,)),
        Case.of(3, torch.bfloat16, width=2, empty=(2,), least=257),
        Case.of(4, torch.float64, width=3, empty=(0, 3)),
        Case.of(2, torch.int64, width=7, empty=()).among(
            Case.of(5, torch.bfloat16, width=2, empty=(4,)), Case.of(7, torch.int32, width=4, empty=(2, 3))
        ),
        Case.of(1, width=2, empty=()),
    ]


def lengths_of(case: Case) -> list[int]:
    """Rows by rank, all different but those that are empty; odd numbers where they begin at `least`."""
    lengths = range(case["least"], case["least"] + 2 * LONGEST, 2) if "least" in case.what else range(1, LONGEST + 1)
    drawn = random.Random(case.seed).sample(lengths, case.n_ranks)
    return [0 if rank in case["empty"] else length for rank, length in enumerate(drawn)]


def inputs(case: Case) -> Inputs:
    """A part for each rank; the last row of each is zero, as rows of data may be."""
    parts = [case.random(length, case["width"], key=rank) for rank, length in enumerate(lengths_of(case))]
    return [(torch.cat([x[:-1], torch.zeros_like(x[-1:])]),) for x in parts]


def answer(case: Case, inputs: Inputs) -> Answers:
    """All parts, joined."""
    return [torch.cat([x for (x,) in inputs])] * case.n_ranks


def row_bytes(case: Case) -> int:
    """Bytes of one row."""
    return int(case["width"] * case.item_bytes)


def most(case: Case, rank: int) -> tuple[float, float]:
    """(least, most) bytes that a rank sends: at most a count and the longest part to n - 1 others."""
    return 0, (case.n_ranks - 1) * (COUNT_BYTES + max(lengths_of(case)) * row_bytes(case))


def carried(record: RunRecord) -> float:
    """Bytes that all ranks together move. The record counts a broadcast once, but n - 1 ranks receive the tensor."""
    n = record.case.n_ranks
    events = [event for rank in range(n) for event in record.sent(rank)]
    return sum(event.n_bytes * (n - 1 if event.what == "broadcast" else 1) for event in events)


PROBLEM = exercise(
    __name__,
    ragged_all_gather,
    laws=(
        sends(
            most,
            "each rank sends at most n - 1 times the longest part and a count, by all_gather and broadcast",
            only=("all_gather", "broadcast"),
        ),
    ),
    star=Star(
        "nothing that was only filled up travels: n - 1 times the counts and the rows that there are",
        carried,
        lambda case: (case.n_ranks - 1) * (case.n_ranks * COUNT_BYTES + sum(lengths_of(case)) * row_bytes(case)),
    ),
)
