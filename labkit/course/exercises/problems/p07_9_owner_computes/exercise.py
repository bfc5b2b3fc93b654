"""07.9: whole matrices on one owner each: assign, gather, work, and give back."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends


def owner_computes(pieces: list[Tensor], work: Callable[[Tensor], Tensor], group: Group) -> list[Tensor]:
    """This rank's rows of work(matrix) for each matrix, of which `pieces` are its rows.   [k, cols] -> [k, cols]

    Every matrix is cut by rows: in rank order, the pieces of all n ranks are the matrix [n*k, cols]. Its owner alone
    puts it together and calls `work`, once, which gives a matrix of the same shape.
    Owners: matrices are given out from the one with the most elements to the one with the least (the first of equals
    first), each to the rank that has the fewest elements so far (the lowest of equals). Nothing is sent but pieces to
    owners and pieces of answers back."""
    n, rank, load, owners, answers = group.size, group.rank, [0] * group.size, {}, {}
    for i in sorted(range(len(pieces)), key=lambda i: -pieces[i].numel()):
        owners[i] = load.index(min(load))
        load[owners[i]] += pieces[i].numel()
    under_way = [group.send(piece, owners[i]) for i, piece in enumerate(pieces) if owners[i] != rank]
    for i in [i for i in range(len(pieces)) if owners[i] == rank]:
        whole = torch.cat([pieces[i] if r == rank else group.recv(r) for r in range(n)])
        parts = work(whole).chunk(n)
        under_way += [group.send(parts[r], r) for r in range(n) if r != rank]
        answers[i] = parts[rank]
    rows = [answers[i] if owners[i] == rank else group.recv(owners[i]) for i in range(len(pieces))]
    for message in under_way:
        message.wait()
    return rows


def cases() -> Sequence[Case]:
    """Worlds of 1 to 4 ranks; matrices of many sizes, of equal ones, and fewer of them than ranks. On 3 ranks the
    owners are others if rows, columns or the work on a matrix are counted, and not its elements."""
    return [
        Case.of(2, torch.float64, shapes=[(2, 40), (9, 40), (3, 40), (7, 40), (5, 40)]),
        Case.of(3, torch.float64, shapes=[(1, 70), (5, 30), (7, 50), (7, 30), (8, 10), (6, 6)]),
        Case.of(4, torch.float64, shapes=[(5, 60), (2, 90)]),
        Case.of(4, torch.float32, shapes=[(4, 50), (6, 50), (5, 50), (1, 50), (3, 50), (2, 50), (6, 50)]),
        Case.of(1, torch.float64, shapes=[(6, 8)]),
    ]


def inputs(case: Case) -> Inputs:
    """Rows of random matrices for each rank."""
    wholes = [case.random(case.n_ranks * k, cols, key=number) for number, (k, cols) in enumerate(case["shapes"])]
    return [([whole.chunk(case.n_ranks)[r].clone() for whole in wholes],) for r in range(case.n_ranks)]


def play(attempt: Any, group: Group, pieces: list[Tensor]) -> Any:
    """The rows of the answers, and the shapes and first numbers of the matrices that this rank has worked on."""
    worked: list[list[float]] = []

    def work(whole: Tensor) -> Tensor:
        worked.append([*whole.shape, whole[0, 0].item()])
        return whole * whole.flip(0).cumsum(0)  # every row of the answer needs rows of other ranks

    rows = attempt(pieces, work, group)
    return {"rows": rows, "worked": sorted(worked)}


def owners_of(case: Case) -> list[int]:
    """The owner of each matrix."""
    load = [0] * case.n_ranks
    owners = {}
    for size, i in sorted((-k * cols, i) for i, (k, cols) in enumerate(case["shapes"])):
        fewest = min(range(case.n_ranks), key=lambda r: (load[r], r))
        owners[i] = fewest
        load[fewest] -= size
    return [owners[i] for i in range(len(owners))]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The answers in one process, cut into rows; and who should have worked on what."""
    wholes = [torch.cat([pieces[i] for (pieces,) in inputs]) for i in range(len(case["shapes"]))]
    done = [whole * whole.flip(0).cumsum(0) for whole in wholes]
    owners = owners_of(case)
    return [
        {
            "rows": [whole.chunk(case.n_ranks)[rank] for whole in done],
            "worked": sorted(
                [*whole.shape, whole[0, 0].item()] for whole, owner in zip(wholes, owners, strict=True) if owner == rank
            ),
        }
        for rank in range(case.n_ranks)
    ]


def law(case: Case, rank: int) -> float:
    """Bytes that a rank sends: its pieces of others' matrices, and the others' pieces of its own answers."""
    elements = 0
    for (k, cols), owner in zip(case["shapes"], owners_of(case), strict=True):
        elements += k * cols * (case.n_ranks - 1 if owner == rank else 1)
    return elements * case.item_bytes if case.n_ranks > 1 else 0


PROBLEM = exercise(
    __name__,
    owner_computes,
    laws=(sends(law, "pieces go to owners, and pieces of answers come back", only=("send",)),),
)
