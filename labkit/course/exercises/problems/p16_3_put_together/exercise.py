"""16.3: a parameter, put together from what the ranks hold."""

import math
import random
from typing import Any

import torch
from torch import Tensor

from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise

Param = tuple[tuple[int, ...], list[tuple[int, int, Tensor]]]


def put_together(shape: tuple[int, ...], pieces: list[tuple[int, int, Tensor]]) -> tuple[Tensor, int, int]:
    """(the parameter, how many elements are missing, how many differ) from the pieces that the ranks hold of it.

    A piece is (dim, start, x). With dim 0 or 1, x is a cut along that dim, from index `start` on, whole in the other
    dim. With dim -1 it is flat: x [k] are the elements of the flattened parameter from `start` on; what stands in x
    beyond the parameter's end is padding and is ignored, and all of x may be. Pieces may overlap, and be cut in
    different ways. Missing is an element that no piece has: it is 0. An element differs if two copies of it are not
    equal: it is that of the first piece in the list that has it. The dtype is that of the pieces, which stay as they
    are, also when somebody writes to the parameter later."""
    whole = torch.zeros(shape, dtype=pieces[0][2].dtype)
    known, differs = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for dim, start, x in pieces:
        parts = []
        if dim < 0:
            x = x[: max(0, whole.numel() - start)]
        for array in (whole, known, differs):
            parts.append(array.view(-1)[start : start + len(x)] if dim < 0 else array.narrow(dim, start, x.shape[dim]))
        at, have, differ = parts
        differ.logical_or_(have & (at != x))
        at.copy_(torch.where(have, at, x))
        have.fill_(True)
    return whole, int((~known).sum()), int(differs.sum())


def cases() -> list[Case]:
    """Parameters in two dtypes, and whole numbers, such as counts of tokens."""
    return [Case.of(1, n_params=24), Case.of(1, torch.float64, n_params=12), Case.of(1, torch.int64, n_params=8)]


def cut(dice: random.Random, x: Tensor, dim: int, n: int) -> list[tuple[int, int, Tensor]]:
    """The pieces of x that n ranks hold: rows (dim 0), columns (dim 1), or flat shards (dim -1) of a multiple of 4
    elements."""
    if dim >= 0:
        marks = sorted({0, x.shape[dim], *(dice.randrange(x.shape[dim]) for _ in range(n - 1))})
        return [(dim, a, x.narrow(dim, a, b - a).clone()) for a, b in zip(marks, marks[1:], strict=False)]
    share = -(-x.numel() // (4 * n)) * 4  # shards are aligned
    padded = torch.cat([x.flatten(), torch.full((n * share - x.numel(),), 7.0, dtype=x.dtype)])
    return [(-1, share * rank, padded[share * rank : share * (rank + 1)].clone()) for rank in range(n)]


def inputs(case: Case) -> Inputs:
    """Parameters. Unless they are whole numbers, in at least one a shard begins beyond the end, in one the copies of an
    element differ by 1e-4 to 0.01, and in one by less than 1e-5."""

    def tells(params: list[Param]) -> bool:
        if not case.dtype.is_floating_point:
            return True
        beyond = [(start - math.prod(shape), len(x)) for shape, pieces in params for dim, start, x in pieces if dim < 0]
        apart = [max(copies) - min(copies) for param in params for copies in copies_of(*param) if copies]
        return any(0 < far < size - 1 for far, size in beyond) and all(
            any(low < distance < high for distance in apart) for low, high in ((1e-4, 0.01), (0.0, 1e-5))
        )

    return [(case.draw(lambda dice: drawn(dice, case), tells),)]


def drawn(dice: random.Random, case: Case) -> list[Param]:
    """Parameters with some zeros, cut in one way or two; one rank has the first of them whole. Some pieces are lost,
    and some copies have older numbers."""
    params: list[Param] = []
    for k in range(case["n_params"]):
        shape = (dice.randint(3, 9),) if k % 4 == 3 else (dice.randint(3, 9), dice.randint(2, 7))
        x = case.random(*shape, key=k)
        x[dice.randrange(shape[0])] = 0
        dims = [-1, *range(len(shape))]
        pieces = cut(dice, x, dims[k % len(dims)], dice.randint(2, 5)) if k else cut(dice, x, 0, 1)
        if k % 3:
            pieces += cut(dice, x, dice.choice(dims), dice.randint(1, 4))
        if k % 3 == 2:
            off = dice.choice((1.0, 1e-3, 1e-6 * x)) if case.dtype.is_floating_point else 1
            older = cut(dice, x + off * (case.random(*shape, key=1000 + k) > 0.5), dice.choice(dims), 3)
            pieces += dice.sample(older, dice.randint(1, len(older)))
        dice.shuffle(pieces)
        params.append((shape, pieces[dice.choice((0, 1, 1)) if len(pieces) > 1 else 0 :]))
    return params


def copies_of(shape: tuple[int, ...], pieces: list[tuple[int, int, Tensor]]) -> list[list[float]]:
    """All copies of each element, by its number in the flattened parameter."""
    size, width = torch.Size(shape).numel(), shape[-1] if len(shape) > 1 else 1
    copies: list[list[float]] = [[] for _ in range(size)]
    for dim, start, x in pieces:
        rows = x.reshape(len(x), -1)
        for i in range(rows.shape[0]):
            for j in range(rows.shape[1]):
                place = start + i if dim < 0 else (start + i) * width + j if dim == 0 else i * width + start + j
                if place < size:
                    copies[place].append(rows[i, j].item())
    return copies


def by_element(shape: tuple[int, ...], pieces: list[tuple[int, int, Tensor]]) -> list[Any]:
    """The parameter, the elements missing and the elements that differ, from all copies of each element."""
    copies = copies_of(shape, pieces)
    whole = torch.tensor([values[0] if values else 0.0 for values in copies], dtype=pieces[0][2].dtype)
    return [whole.reshape(shape), sum(not values for values in copies), sum(len(set(values)) > 1 for values in copies)]


def play(attempt: Any, group: Any, params: list[Param]) -> Any:
    """The attempt's reply for each parameter. Then each is written to, as training does, which must not reach what a
    rank holds."""
    replies = []
    for shape, pieces in params:
        whole, missing, differ = attempt(shape, pieces)
        replies.append([whole.clone(), missing, differ])
        whole.fill_(-1)
    return replies


def answer(case: Case, inputs: Inputs) -> Answers:
    """The right reply for each parameter, element by element."""
    return [[by_element(*param) for param in inputs[0][0]]]


PROBLEM = exercise(__name__, put_together, tolerance=(0.0, 0.0))
