"""19.2: an all-to-all of parts of any length, from messages."""

from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends


def ragged_all_to_all(x: Tensor, send_rows: list[int], receive_rows: list[int], group: Group) -> Tensor:
    """Part j of x goes to rank j; the parts that come are joined in rank order.   [s, D] -> [r, D]

    x is cut along dim 0: part j has send_rows[j] rows, and s is their sum. receive_rows[i] rows come from rank i, and r
    is their sum; send_rows[me] = receive_rows[me] rows stay. Lengths differ, and may be 0: both sides know that, and no
    message is sent for such a part. Each other part goes straight to its rank, in one message. Use `send`,
    `recv_start`, `recv` and `exchange` only, and wait for all that you start before you return."""
    n, me = group.size, group.rank
    parts = x.split(send_rows)
    going = [group.send(parts[j], j) for j in range(n) if j != me and send_rows[j]]
    came = [parts[me] if i == me else group.recv(i) if receive_rows[i] else x[:0] for i in range(n)]
    for work in going:
        work.wait()
    return torch.cat(came)


def cases() -> list[Case]:
    """Worlds of 1 to 5 ranks. `rows` are those from rank i (a line) to rank j. In the second, rank 1 gets none at all,
    and rank 2 sends none."""
    return [
        Case.of(3, width=4, rows=((1, 4, 2), (5, 2, 3), (7, 6, 8))),
        Case.of(4, torch.float64, width=3, rows=((2, 0, 5, 1), (3, 0, 0, 4), (0, 0, 0, 0), (6, 0, 2, 3))),
        Case.of(5, torch.bfloat16, width=2, rows=((0, 3, 0, 1, 2), (4, 0, 0, 0, 5), (0, 0, 1, 6, 0), (2, 7, 3, 0, 0),
                (1, 0, 8, 2, 4))).among(
            Case.of(4, torch.int32, width=5, rows=((3, 1, 0, 2), (0, 4, 6, 0), (5, 0, 0, 7), (1, 2, 8, 0))),
            Case.of(5, torch.float32, width=3, rows=((0, 0, 0, 9, 1), (3, 1, 2, 0, 4), (0, 5, 0, 6, 0), (7, 0, 0, 0, 2),
                    (2, 3, 4, 5, 6)))),
        Case.of(2, torch.int64, width=6, rows=((3, 0), (5, 2))),
        Case.of(1, width=2, rows=((4,),)),
    ]  # fmt: skip


def inputs(case: Case) -> Inputs:
    """Rows of its own for each rank, and its line and column of the table."""
    table = case["rows"]
    xs = [case.random(sum(line), case["width"], key=rank) for rank, line in enumerate(table)]
    return [(x, list(table[rank]), [line[rank] for line in table]) for rank, x in enumerate(xs)]


def play(attempt: Any, group: Group, x: Tensor, send_rows: list[int], receive_rows: list[int]) -> Any:
    """Run the attempt on a group that has no all_to_all of its own."""

    def refused(*_: Any, **__: Any) -> Tensor:
        raise ValueError("this group has no all_to_all: write it from send and recv_start, or exchange")

    return attempt(x, send_rows, receive_rows, group.using(all_to_all=refused))


def answer(case: Case, inputs: Inputs) -> Answers:
    """All parts of all ranks, joined by the rank that they are for."""
    parts = [x.split(send_rows) for x, send_rows, _ in inputs]
    return [torch.cat([pieces[rank] for pieces in parts]) for rank in range(case.n_ranks)]


def receivers(case: Case, rank: int) -> set[int]:
    """The other ranks for which this one has rows."""
    return {j for j, count in enumerate(case["rows"][rank]) if count and j != rank}


PROBLEM = exercise(
    __name__,
    ragged_all_to_all,
    laws=(
        sends(
            lambda case, rank: (
                sum(case["rows"][rank][j] for j in receivers(case, rank)) * case["width"] * case.item_bytes
            ),
            "each rank sends all its rows but those that stay, one message for each part that has rows",
            only=("send",),
            to=receivers,
            messages=lambda case, rank: len(receivers(case, rank)),
        ),
    ),
)
