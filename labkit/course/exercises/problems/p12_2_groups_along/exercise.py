"""12.2: all groups of ranks along an axis."""

import random

import torch

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_alone, exercise


def groups_along(axis: str, dp: int, pp: int, tp: int) -> list[list[int]]:
    """All groups of ranks along one axis, "dp", "pp" or "tp", of a grid of dp x pp x tp ranks.

    rank = (dp index * pp + pp index) * tp + tp index. A group has the ranks that differ in the index of `axis` alone,
    in the order of that index. Every rank is in one group. Groups come in the order of their first ranks: so all ranks
    of the world, each of which must help to form every group, go through them in the same order."""
    size, step = {"dp": (dp, pp * tp), "pp": (pp, tp), "tp": (tp, 1)}[axis]
    firsts = [rank for rank in range(dp * pp * tp) if rank // step % size == 0]
    return [[first + k * step for k in range(size)] for first in firsts]


def cases() -> list[Case]:
    """Each axis, of different sizes; axes of one rank."""
    return [
        Case.of(1, axis="pp", ones=()),
        Case.of(1, axis="dp", ones=()),
        Case.of(1, axis="tp", ones=()),
        Case.of(1, axis="dp", ones=(1,)),
        Case.of(1, axis="pp", ones=(1, 2)),
    ]


def inputs(case: Case) -> Inputs:
    """An axis, and random sizes of all axes."""
    sizes = random.Random(case.seed).sample(range(2, 8), 3)
    return [(case["axis"], *(1 if place in case["ones"] else size for place, size in enumerate(sizes)))]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The groups from a torch tensor of ranks whose dimension of this axis is moved to the end."""
    axis, *sizes = inputs[0]
    ranks = torch.arange(torch.tensor(sizes).prod().item()).reshape(sizes)
    groups = ranks.movedim(("dp", "pp", "tp").index(axis), -1).reshape(-1, sizes[("dp", "pp", "tp").index(axis)])
    return [sorted(groups.tolist())]


PROBLEM = exercise(__name__, groups_along, play=call_alone)
