"""07.1: which elements of which parameters a rank owns, said by arithmetic alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from labkit.comm.group import Group
from labkit.course.exercises.problem import Mutant, Problem
from labkit.course.judge.case import Case
from labkit.course.judge.laws import silent


def owned_windows(sizes: list[int], group: Group) -> list[tuple[int, int, int]]:
    """What this rank owns of parameters with `sizes` elements each: (parameter, first element of it, how many).

    Lay all parameters end to end. Of the sum(sizes) elements each of n ranks gets a run of k, in rank order, where k is
    sum(sizes) / n rounded up: the last ranks may get fewer, or none. A border may go through the middle of a parameter.
    The windows come in the order of the parameters, and none is empty. All ranks see the same `sizes`; nothing is sent.
    """
    k = -(-sum(sizes) // group.size)
    low, high, start = group.rank * k, (group.rank + 1) * k, 0
    mine = []
    for i, size in enumerate(sizes):
        first, last = max(low - start, 0), min(high - start, size)
        if first < last:
            mine.append((i, first, last - first))
        start += size
    return mine


def cases() -> Sequence[Case]:
    """Worlds of 1 to 4 ranks; with three tiny parameters the last rank may own nothing."""
    return [
        Case.of(3, params=7, most=900),
        Case.of(4, params=3, most=2),
        Case.of(2, params=12, most=50),
        Case.of(1, params=4, most=30),
    ]


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """Sizes, the same for all; their sum is one more than a multiple of n, so that padding is needed."""
    draw = random.Random(case.seed)
    sizes = [draw.randint(1, case["most"]) for _ in range(case["params"])]
    sizes[draw.randrange(len(sizes))] += (1 - sum(sizes)) % case.n_ranks
    return [(list(sizes),) for _ in range(case.n_ranks)]


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """Every element by itself: (parameter, place), dealt out in runs of k, then counted."""
    elements = [(i, place) for i, size in enumerate(given[0][0]) for place in range(size)]
    k = (len(elements) + case.n_ranks - 1) // case.n_ranks
    owned = []
    for rank in range(case.n_ranks):
        by_parameter: dict[int, list[int]] = {}
        for i, place in elements[rank * k : (rank + 1) * k]:
            by_parameter.setdefault(i, []).append(place)
        owned.append([[i, places[0], len(places)] for i, places in by_parameter.items()])
    return owned


PROBLEM = Problem(
    key="07.1",
    title="Who owns what",
    story="""
ZeRO begins with a map: each rank owns 1/n of all elements, and keeps momentum and variance of those only. Deal out
whole parameters, and the rank with the embedding of a GPT-2 owns a third of the model while others own crumbs. Cut one
long row of elements into equal runs, and the worst rank owns one part in n, whatever the sizes. Everybody works out the
same map, so nobody has to be told.
""",
    objectives=("a border may lie inside a parameter", "a map that all ranks know without a message"),
    difficulty=2,
    importance=4,
    minutes=12,
    reference=owned_windows,
    cases=cases,
    inputs=inputs,
    answer=answer,
    laws=(silent(),),
    hints=(
        "Two runs of numbers overlap from the larger of their beginnings to the smaller of their ends.",
        "This rank owns places `rank * k` up to, but not, `(rank + 1) * k` of the row; parameter i lies at places "
        "`start` to `start + size`. Take `start` off to get places inside the parameter. k is rounded up: `-(-a // "
        "b)`.",
        "k = ...; low, high, start = rank * k, (rank + 1) * k, 0; for each size: first = max(low - start, 0); "
        "last = min(high - start, size); keep it if first < last; start += size",
    ),
    mutants=(
        Mutant(
            "k is rounded down, so the last elements belong to nobody",
            "values",
            (("-(-sum(sizes) // group.size)", "sum(sizes) // group.size"),),
        ),
        Mutant(
            "whole parameters are dealt out in turn: the rank with the largest one carries too much",
            "values",
            instead="""
            def owned_windows(sizes, group):
                return [(i, 0, size) for i, size in enumerate(sizes) if i % group.size == group.rank]
        """,
        ),
        Mutant(
            "first elements are counted from the beginning of the whole row, not of their parameter",
            "values",
            (("mine.append((i, first, last - first))", "mine.append((i, start + first, last - first))"),),
        ),
        Mutant(
            "the third number is where a window ends, not how many elements it has",
            "values",
            (("last - first))", "last))"),),
        ),
        Mutant(
            "parameters of which nothing is owned get a window, too",
            "values",
            (("        if first < last:\n            mine.append((i, first, last - first))",
              "        mine.append((i, min(first, size), max(last - first, 0)))"),),
        ),
        Mutant(
            "every parameter is cut by itself, so each rank owns a piece of each",
            "values",
            instead="""
            def owned_windows(sizes, group):
                mine = []
                for i, size in enumerate(sizes):
                    k = -(-size // group.size)
                    first, last = group.rank * k, min((group.rank + 1) * k, size)
                    if first < last:
                        mine.append((i, first, last - first))
                return mine
        """,
        ),
        Mutant(
            "rank 0 tells everybody something that all can work out",
            "wire",
            (
                ("    k = -(-sum(sizes) // group.size)",
                 "    sizes = [int(s) for s in group.broadcast(torch.tensor(sizes))]\n    k = -(-sum(sizes) // "
                 "group.size)"),
                ("from labkit import Group", "import torch\nfrom labkit import Group"),
            ),
        ),
    ),
)  # fmt: skip
