"""07.1: which elements of which parameters a rank owns, by arithmetic alone."""

import random

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, silent


def owned_windows(sizes: list[int], group: Group) -> list[tuple[int, int, int]]:
    """The windows of the parameters that this rank owns: (parameter, first element of it, number of elements).

    Parameter i has sizes[i] elements. Lay all parameters end to end. Of the sum(sizes) elements each of n ranks gets a
    run of k, in rank order, where k is sum(sizes) / n rounded up: the last ranks may get fewer, or none. A border may
    go through the middle of a parameter. The windows come in the order of the parameters, and none is empty. All ranks
    see the same `sizes`; nothing is sent.
    """
    k = -(-sum(sizes) // group.size)
    low, high, start = group.rank * k, (group.rank + 1) * k, 0
    pieces = []
    for i, size in enumerate(sizes):
        first, last = max(low - start, 0), min(high - start, size)
        if first < last:
            pieces.append((i, first, last - first))
        start += size
    return pieces


def cases() -> list[Case]:
    """Worlds of 1 to 7 ranks; with three tiny parameters the last rank may own nothing. `even`: n divides the sum."""
    return [
        Case.of(3, params=7, most=900),
        Case.of(4, params=3, most=2),
        Case.of(4, params=6, most=40, even=True),
        Case.of(2, params=12, most=50).among(Case.of(5, params=11, most=200), Case.of(7, params=16, most=90)),
        Case.of(1, params=4, most=30),
    ]


def inputs(case: Case) -> Inputs:
    """Sizes, the same for all; their sum is one more than a multiple of n, so that padding is needed, or just one."""
    draw = random.Random(case.seed)
    sizes = [draw.randint(1, case["most"]) for _ in range(case["params"])]
    sizes[draw.randrange(len(sizes))] += (("even" not in case.what) - sum(sizes)) % case.n_ranks
    return [(list(sizes),) for _ in range(case.n_ranks)]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The windows from a list of every element, (parameter, place), cut into runs of k."""
    elements = [(i, place) for i, size in enumerate(inputs[0][0]) for place in range(size)]
    k = (len(elements) + case.n_ranks - 1) // case.n_ranks
    owned = []
    for rank in range(case.n_ranks):
        by_parameter: dict[int, list[int]] = {}
        for i, place in elements[rank * k : (rank + 1) * k]:
            by_parameter.setdefault(i, []).append(place)
        owned.append([[i, places[0], len(places)] for i, places in by_parameter.items()])
    return owned


PROBLEM = exercise(__name__, owned_windows, laws=(silent(),))
