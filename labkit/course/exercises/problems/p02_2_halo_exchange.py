"""02.2: rows from both neighbours at once, where a careless order hangs or crawls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.problem import Complaint, Mutant, Problem
from labkit.course.judge.case import Case
from labkit.course.judge.laws import order, sends
from labkit.course.judge.run_record import RunRecord, mark

TAKEN = "waits for a message from rank "


def halo_exchange(x: Tensor, width: int, group: Group) -> Tensor:
    """This rank's rows with those around them: the last `width` rows of the rank to the left, all of x, the first
    `width` rows of the rank to the right.   [k, d] -> [width + k + width, d], less at the two ends

    The ranks stand in a line: rank 0 has nobody to its left, rank n-1 nobody to its right. Every k is at least
    `width`, and may differ by rank. Only the rows that are wanted travel, and a rank has handed over all its messages
    before it waits for any of its neighbours'."""
    left, right = group.rank - 1, group.rank + 1
    going, coming = [], {}
    for peer, rows in ((left, x[:width]), (right, x[len(x) - width :])):
        if 0 <= peer < group.size:
            coming[peer] = group.recv_start(peer)
            going.append(group.send(rows, peer))
    came = {peer: work.wait() for peer, work in coming.items()}
    for work in going:
        work.wait()
    return torch.cat([each for each in (came.get(left), x, came.get(right)) if each is not None])


def cases() -> Sequence[Case]:
    """Worlds of 1 to 4 ranks, all with different numbers of rows."""
    return [Case.of(4, rows=(5, 3, 7, 4), halo=2, width=6), Case.of(3, torch.float64, rows=(1, 4, 2), halo=1, width=3),
            Case.of(2, torch.int64, rows=(3, 5), halo=3, width=2), Case.of(1, rows=(4,), halo=2, width=3)]  # fmt: skip


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """The rows of each rank."""
    return [(case.random(k, case["width"], key=rank), case["halo"]) for rank, k in enumerate(case["rows"])]


def play(attempt: Any, group: Group, x: Tensor, width: int) -> Any:
    """A mark says when a rank has waited for a message and has it."""

    def tap(event: str, peer: int, tag: int, tensor: Tensor) -> None:
        if event == "recv":
            mark(group, f"{TAKEN}{peer}")

    return attempt(x, width, group.tapped(tap))


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """Cut out of all rows in one piece."""
    whole, ends = torch.cat([x for x, _ in given]), [0]
    for k in case["rows"]:
        ends.append(ends[-1] + k)
    return [
        whole[max(0, first - case["halo"]) : end + case["halo"]] for first, end in zip(ends, ends[1:], strict=False)
    ]


def neighbours(case: Case, rank: int) -> set[int]:
    """In a line."""
    return {rank - 1, rank + 1} & set(range(case.n_ranks))


def waited(record: RunRecord) -> Complaint | None:
    """The first rank that waited while it still had something to hand over."""
    for rank in range(record.case.n_ranks):
        waits = [each for each in record.marks(rank) if each.what.startswith(TAKEN)]
        late = [each for each in record.sent(rank) if waits and each.number > waits[0].number]
        if late:
            seen = f"it {waits[0].what}, and only then sends to rank {late[0].to}"
            return Complaint("all messages are handed over before any is waited for", seen, rank, (late[0].number,))
    return None


EDGES = "(left, x[:width]), (right, x[len(x) - width :])"
STARTS = """            coming[peer] = group.recv_start(peer)
            going.append(group.send(rows, peer))
"""

PROBLEM = Problem(
    key="02.2",
    title="From deadlock to isend",
    story="""
A convolution over an image that is cut into strips, one a rank, needs a few rows of the strips above and below: the
halo. With blocking sends first, all ranks wait for each other and none moves. `exchange` with the left and then with
the right does end, but as a convoy: rank 7 begins when seven others are through.
""",
    objectives=("start all, then wait", "no circle of waits, and no chain of them either"),
    difficulty=2,
    importance=5,
    minutes=15,
    reference=halo_exchange,
    cases=cases,
    inputs=inputs,
    play=play,
    answer=answer,
    laws=(
        sends(
            lambda case, rank: len(neighbours(case, rank)) * case["halo"] * case["width"] * case.item_bytes,
            "each rank sends `width` rows to each neighbour, in one message each",
            only=("send",),
            to=neighbours,
            messages=lambda case, rank: len(neighbours(case, rank)),
        ),
        order("a rank has handed over all its messages before it waits for one", waited),
    ),
    hints=(
        "A send or a receive that is started does not wait. Start up to four, then wait for all.",
        "`group.send(rows, peer)` and `group.recv_start(peer)` return at once, with a Work to wait() for. First rows "
        "go to the left, last rows to the right.",
        "for each neighbour that is there: coming[peer] = group.recv_start(peer); going.append(group.send(...)). Then "
        "wait for coming, for going; torch.cat of left, x, right",
    ),
    mutants=(
        Mutant("each send is waited for at once, and nobody is there to take a message", "liveness",
               ((STARTS, "            group.send(rows, peer).wait()\n"
                         "            coming[peer] = group.recv_start(peer)\n"),)),
        Mutant("each waits for its neighbours' rows before it sends its own", "liveness",
               ((STARTS, "            coming[peer] = group.recv_start(peer)\n            coming[peer].wait()\n"
                         "            going.append(group.send(rows, peer))\n"),)),
        Mutant("a convoy: the right neighbour gets nothing until the left one's rows are here", "order",
               ((STARTS, "            coming[peer] = group.recv_start(peer)\n"
                         "            going.append(group.send(rows, peer))\n            coming[peer].wait()\n"),)),
        Mutant("the wrong edges travel: first rows to the right, last rows to the left", "values",
               ((EDGES, "(left, x[len(x) - width :]), (right, x[:width])"),)),
        Mutant("the rows of both neighbours are put on the wrong sides", "values",
               (("(came.get(left), x, came.get(right))", "(came.get(right), x, came.get(left))"),)),
        Mutant("the line is closed to a ring: its ends get rows from each other", "values",
               (("group.rank - 1, group.rank + 1", "(group.rank - 1) % group.size, (group.rank + 1) % group.size"),)),
        Mutant("whole tensors travel, for the sake of a few rows", "wire", (
            (EDGES, "(left, x), (right, x)"),
            ("    return torch", "    came = {p: c[-width:] if p == left else c[:width] for p, c in came.items()}\n"
                                 "    return torch"))),
        Mutant("everybody's edges are gathered everywhere", "wire", instead="""
            import torch

            def halo_exchange(x, width, group):
                me, n = group.rank, group.size
                edges = group.all_gather(torch.cat([x[:width], x[len(x) - width:]])).chunk(n)
                left = [edges[me - 1][width:]] if me else []
                right = [edges[me + 1][:width]] if me < n - 1 else []
                return torch.cat([*left, x, *right])
        """),
    ),
)  # fmt: skip
