"""21.2: who sends which part of a matrix to whom, so that its layout over ranks becomes another one."""

from random import Random
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends

Box = tuple[int, ...]
ITEM = 4


def reshard_plan(
    have: list[tuple[int, ...] | None], want: list[tuple[int, ...] | None], me: int
) -> list[tuple[str, int, tuple[int, ...]]]:
    """What rank `me` does, move by move, so that each rank gets of a matrix what it wants.

    have[r] and want[r] are the part of it that rank r has, or is to have: (top, bottom, left, right), rows top to
    bottom - 1 and columns left to right - 1; None for nothing. The different parts in `have` do not overlap and make up
    the whole matrix; several ranks may have the same one.
    -> ("send", to whom, box), ("recv", from whom, box), ("keep", me, box): box is the overlap of a part that is there
    and the one that is wanted. What a rank has already it keeps. What it lacks it is sent once, by the one at place
    `taker % h` among the h ranks that have that part, in their order.
    A rank does its moves in the order of its list, and waits in each until the other one does it, too."""
    ranks, moves = range(len(have)), list[tuple[str, int, tuple[int, ...]]]()
    for box in sorted({box for box in have if box}):
        holders = [rank for rank in ranks if have[rank] == box]
        for taker in ranks:
            a, b = box, want[taker] or (0, 0, 0, 0)
            part = (max(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), min(a[3], b[3]))
            if part[0] < part[1] and part[2] < part[3]:
                giver = taker if taker in holders else holders[taker % len(holders)]
                if me == giver:
                    moves.append(("keep" if me == taker else "send", taker, part))
                elif me == taker:
                    moves.append(("recv", giver, part))
    return moves


def cases() -> list[Case]:
    """Rows to columns on the same ranks; copies on either side; trainers and generators on ranks of their own.

    `have` and `want` are (parts of rows, parts of columns, first rank, ranks); more ranks than parts hold copies.
    `alike`: both are cut at the same rows, so that parts touch that do not overlap."""
    return [
        Case.of(2, have=(2, 1, 0, 2), want=(1, 2, 0, 2)),
        Case.of(4, have=(4, 1, 0, 4), want=(1, 4, 0, 4)).among(Case.of(4, have=(2, 2, 0, 4), want=(1, 4, 0, 4))),
        Case.of(4, have=(2, 1, 0, 4), want=(1, 2, 0, 4)).among(Case.of(4, have=(1, 2, 0, 4), want=(2, 1, 0, 4))),
        Case.of(5, have=(3, 1, 0, 3), want=(1, 2, 3, 2)),
        Case.of(5, have=(1, 2, 0, 4), want=(1, 1, 2, 3)),
        Case.of(4, have=(2, 2, 0, 4), want=(2, 1, 0, 4), alike=True),
        Case.of(1, have=(1, 1, 0, 1), want=(1, 1, 0, 1)),
    ]


def layout(case: Case, draw: Random, size: tuple[int, int], name: str) -> list[Box | None]:
    """The part of each rank: cuts are drawn; parts are dealt out in turn to as many ranks as take part."""
    down, across, first, count = case[name]
    cuts = Random(case.seed + 1) if "alike" in case.what else draw
    edges = [
        [0, *sorted(cuts.sample(range(3, n - 2), parts - 1)), n] for n, parts in zip(size, case[name][:2], strict=True)
    ]
    boxes = [(edges[0][i], edges[0][i + 1], edges[1][j], edges[1][j + 1]) for i in range(down) for j in range(across)]
    inside = range(first, first + count)
    return [boxes[(rank - first) % len(boxes)] if rank in inside else None for rank in range(case.n_ranks)]


def layouts(case: Case) -> tuple[tuple[int, int], list[Box | None], list[Box | None]]:
    """Rows and columns of the matrix, and both layouts."""
    draw = case.dice
    size = draw.randint(24, 40), draw.randint(41, 60)
    return size, layout(case, draw, size, "have"), layout(case, draw, size, "want")


def inputs(case: Case) -> Inputs:
    """The part that each rank has, and both layouts."""
    size, have, want = layouts(case)
    whole = case.random(*size)
    return [(None if box is None else cut(whole, box).clone(), have, want) for box in have]


def cut(whole: Tensor, box: Box, origin: tuple[int, int] = (0, 0)) -> Tensor:
    """A window of a matrix whose first row and column have the numbers `origin`."""
    top, left = origin
    return whole[box[0] - top : box[1] - top, box[2] - left : box[3] - left]


def play(attempt: Any, group: Group, piece: Tensor | None, have: list[Box | None], want: list[Box | None]) -> Any:
    """Carry out the plan: each move waits for the other side. What a rank was never sent stays NaN."""
    need, held = want[group.rank], have[group.rank]
    result = torch.full((need[1] - need[0], need[3] - need[2]) if need else (0, 0), torch.nan)
    for kind, peer, box in attempt(list(have), list(want), group.rank):
        if kind == "recv":
            cut(result, box, (need[0], need[2]) if need else (0, 0)).copy_(group.recv(peer))
            continue
        if piece is None or held is None:
            raise ValueError(f"rank {group.rank} has no part of the matrix, and its plan says {kind} {box}")
        part = cut(piece, box, (held[0], held[2])).contiguous()
        if kind == "keep":
            cut(result, box, (need[0], need[2]) if need else (0, 0)).copy_(part)
        else:
            group.send(part, peer).wait()
    return result


def answer(case: Case, inputs: Inputs) -> Answers:
    """The windows of the whole matrix, put together from the parts."""
    size, have, want = layouts(case)
    whole = torch.empty(size)
    for (part, _, _), box in zip(inputs, have, strict=True):
        if box is not None:
            cut(whole, box).copy_(part)
    return [cut(whole, box).clone() if box else torch.empty(0, 0) for box in want]


def owed(case: Case) -> dict[tuple[int, int], int]:
    """Elements from rank to rank, counted one by one from a table of who has each of them."""
    (rows, columns), have, want = layouts(case)
    table = dict[tuple[int, int], int]()
    for taker, need in enumerate(want):
        for row in range(rows) if need else ():
            for column in range(columns):
                if inside(need, row, column) and not inside(have[taker], row, column):
                    holders = [rank for rank, box in enumerate(have) if inside(box, row, column)]
                    edge = holders[taker % len(holders)], taker
                    table[edge] = table.get(edge, 0) + 1
    return table


def inside(box: Box | None, row: int, column: int) -> bool:
    """True if an element lies in a box."""
    return box is not None and box[0] <= row < box[1] and box[2] <= column < box[3]


PROBLEM = exercise(
    __name__,
    reshard_plan,
    laws=(
        sends(
            lambda case, rank: ITEM * sum(count for (giver, _), count in owed(case).items() if giver == rank),
            "each rank is sent what it lacks, once, by the holder whose turn it is",
            to=lambda case, rank: {taker for giver, taker in owed(case) if giver == rank},
        ),
    ),
)
