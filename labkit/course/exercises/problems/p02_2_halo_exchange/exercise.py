"""02.2: rows from both neighbours at once, where a careless order hangs or crawls."""

from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, send_first, sends
from labkit.course.judge.run_record import marking_receives


def halo_exchange(x: Tensor, width: int, group: Group) -> Tensor:
    """This rank's rows with those around them: the last `width` rows of the rank to the left, all of x, the first
    `width` rows of the rank to the right.   [k, d] -> [width + k + width, d], less at the two ends

    The ranks stand in a line: rank 0 has nobody to its left, rank n-1 nobody to its right. Every k is at least
    `width`, which may be 0, and may differ by rank. Only the rows that are wanted travel, and a rank has handed over
    all its messages before it waits for any of its neighbours'. Before it returns, it has waited for its own sends,
    too."""
    left, right = group.rank - 1, group.rank + 1
    going, coming = [], {}
    for peer, rows in ((left, x[:width]), (right, x[len(x) - width :])):
        if 0 <= peer < group.size:
            coming[peer] = group.recv_start(peer)
            going.append(group.send(rows, peer))
    came = {peer: work.wait() for peer, work in coming.items()}
    for work in going:
        work.wait()
    return torch.cat([part for part in (came.get(left), x, came.get(right)) if part is not None])


def cases() -> list[Case]:
    """Worlds of 1 to 7 ranks, all with different numbers of rows; in one of them nobody wants any."""
    return [
        Case.of(4, rows=(5, 3, 7, 4), halo=2, width=6),
        Case.of(3, torch.float64, rows=(1, 4, 2), halo=1, width=3).among(
            Case.of(5, torch.bfloat16, rows=(3, 2, 6, 2, 4), halo=2, width=4),
            Case.of(7, torch.int32, rows=(1, 2, 1, 3, 1, 4, 2), halo=1, width=5),
        ),
        Case.of(2, torch.int64, rows=(3, 5), halo=3, width=2),
        Case.of(3, rows=(2, 1, 3), halo=0, width=4),
        Case.of(1, rows=(4,), halo=2, width=3),
    ]


def inputs(case: Case) -> Inputs:
    """The rows of each rank."""
    return [(case.random(k, case["width"], key=rank), case["halo"]) for rank, k in enumerate(case["rows"])]


def play(attempt: Any, group: Group, x: Tensor, width: int) -> Any:
    """Run the attempt, with a mark in the record for each message that a rank has received."""
    return attempt(x, width, marking_receives(group))


def answer(case: Case, inputs: Inputs) -> Answers:
    """The rows of each rank with their halos, cut out of all rows in one tensor."""
    whole, ends = torch.cat([x for x, _ in inputs]), [0]
    for k in case["rows"]:
        ends.append(ends[-1] + k)
    return [
        whole[max(0, first - case["halo"]) : end + case["halo"]] for first, end in zip(ends, ends[1:], strict=False)
    ]


def neighbours(case: Case, rank: int) -> set[int]:
    """The ranks beside this one in a line."""
    return {rank - 1, rank + 1} & set(range(case.n_ranks))


PROBLEM = exercise(
    __name__,
    halo_exchange,
    laws=(
        sends(
            lambda case, rank: len(neighbours(case, rank)) * case["halo"] * case["width"] * case.item_bytes,
            "each rank sends `width` rows to each neighbour, in one message each",
            only=("send",),
            to=neighbours,
            messages=lambda case, rank: len(neighbours(case, rank)),
        ),
        send_first(),
    ),
)
