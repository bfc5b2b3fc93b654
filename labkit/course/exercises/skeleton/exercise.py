"""KEY: one sentence that says what the learner writes."""

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends


def my_exercise(x: Tensor, group: Group) -> Tensor:
    """The mean of all ranks' x.   same shape

    This docstring and the signature are all that the learner is given: shapes, units, and what each rank sends."""
    return group.all_reduce(x, "mean")


def cases() -> list[Case]:
    """The cases to judge, smallest first: worlds of 1 to 4 ranks, ragged shapes, two dtypes."""
    return [Case.of(1, rows=3), Case.of(2, rows=5), Case.of(3, torch.float64, rows=7), Case.of(4, rows=6)]


def inputs(case: Case) -> Inputs:
    """The arguments of each rank, drawn from the seed of the case."""
    return [(case.random(case["rows"], 4, key=rank),) for rank in range(case.n_ranks)]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The right answer of each rank, worked out in one process."""
    mean = torch.stack([x for (x,) in inputs]).double().mean(0).to(case.dtype)
    return [mean] * case.n_ranks


def law(case: Case, rank: int) -> tuple[float, float]:
    """(least, most) bytes that a rank sends: 2(n-1)/n of x's bytes, or up to a byte less where n does not divide."""
    most = 2 * (case.n_ranks - 1) / case.n_ranks * case["rows"] * 4 * case.item_bytes
    return most - 1, most


PROBLEM = exercise(
    __name__,
    my_exercise,
    laws=(sends(law, "each rank sends 2(n-1)/n of its tensor's bytes", only=("all_reduce",)),),
)
