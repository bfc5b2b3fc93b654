"""12.2: all groups of ranks along an axis."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from labkit.course.exercises.problem import Mutant, Problem, call_alone
from labkit.course.judge.case import Case


def groups_along(axis: str, dp: int, pp: int, tp: int) -> list[list[int]]:
    """All groups of ranks along one axis, "dp", "pp" or "tp", of a grid of dp x pp x tp ranks.

    rank = (dp index * pp + pp index) * tp + tp index. A group has the ranks that differ in the index of `axis` alone,
    in the order of that index. Every rank is in one group. Groups come in the order of their first ranks: so all ranks
    of the world, each of which must help to form every group, go through them in the same order."""
    size, step = {"dp": (dp, pp * tp), "pp": (pp, tp), "tp": (tp, 1)}[axis]
    firsts = [rank for rank in range(dp * pp * tp) if rank // step % size == 0]
    return [[first + k * step for k in range(size)] for first in firsts]


def cases() -> Sequence[Case]:
    """Each axis, of different sizes; axes of one rank."""
    return [
        Case.of(1, axis="pp", ones=()),
        Case.of(1, axis="dp", ones=()),
        Case.of(1, axis="tp", ones=()),
        Case.of(1, axis="dp", ones=(1,)),
        Case.of(1, axis="pp", ones=(1, 2)),
    ]


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """An axis, and sizes that are drawn."""
    sizes = random.Random(case.seed).sample(range(2, 8), 3)
    return [(case["axis"], *(1 if place in case["ones"] else size for place, size in enumerate(sizes)))]


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """The axis of a torch tensor of ranks, moved to the end."""
    axis, *sizes = given[0]
    ranks = torch.arange(torch.tensor(sizes).prod().item()).reshape(sizes)
    groups = ranks.movedim(("dp", "pp", "tp").index(axis), -1).reshape(-1, sizes[("dp", "pp", "tp").index(axis)])
    return [sorted(groups.tolist())]


PROBLEM = Problem(
    key="12.2",
    title="Who is in my group?",
    story="""
On 8 x 4 x 8 ranks there are 32 tensor-parallel groups, 64 pipelines and 32 groups that hold copies of one another's
weights. A group is formed by all ranks of the world together, also by those that are not in it; if two ranks list them
in different orders, the job hangs before its first step. So list them by arithmetic.
""",
    objectives=("the step between neighbours along an axis", "the same list on every rank"),
    difficulty=2,
    importance=4,
    minutes=15,
    reference=groups_along,
    cases=cases,
    inputs=inputs,
    play=call_alone,
    answer=answer,
    hints=(
        "How far apart are two neighbours along the axis? A group is known by its first rank, whose index is 0.",
        "Steps: 1 along tp, tp along pp, pp * tp along dp. Index of a rank along the axis: rank // step % size.",
        "size, step of the axis;  firsts = ranks with rank // step % size == 0;  [first, first + step, ...]",
    ),
    mutants=(
        Mutant("every group is a run of neighbouring ranks, which is so along tp only", "values",
               (("(dp, pp * tp)", "(dp, 1)"), ("(pp, tp)", "(pp, 1)"))),
        Mutant("these are the ranks with the same index along the axis, not those that differ in it alone", "values",
               (("[[first + k * step for k in range(size)] for first in firsts]",
                 "[[rank for rank in range(dp * pp * tp) if rank // step % size == k] for k in range(size)]"),)),
        Mutant("a step along pp is taken for one along dp: pipelines run through all copies", "values",
               (("(pp, tp)", "(pp, dp * tp)"),)),
        Mutant("a step along dp is counted without the stages", "values", (("(dp, pp * tp)", "(dp, tp)"),)),
        Mutant("a group is listed once for each of its ranks", "values",
               (("if rank // step % size == 0]",
                 "if size]\n    firsts = [rank - rank // step % size * step for rank in firsts]"),)),
        Mutant("the groups of the first copy only are there", "values",
               (("[rank for rank in range(dp * pp * tp) if", "[rank for rank in range(pp * tp) if"),)),
        Mutant("the groups are there, but not in the order of their first ranks", "values",
               (("for first in firsts]", "for first in firsts[::-1]]"),)),
    ),
)  # fmt: skip
