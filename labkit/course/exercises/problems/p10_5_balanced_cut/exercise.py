"""10.5: layers of different costs, cut into stages."""

import random
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise


def balanced_cut(costs: list[float], n_stages: int) -> list[int]:
    """Cut layers into stages so that the costliest stage is as cheap as can be.   n costs -> n_stages + 1 bounds

    Stage s has the layers from bounds[s] up to, not including, bounds[s + 1]; bounds begin with 0 and end with n.
    Layers stay in their order, and each stage has at least one. A stage costs the sum of its layers. Where several cuts
    are equally good, any of them will do. There may be 30 layers and 10 stages, which have ten million cuts."""
    n = len(costs)

    @cache
    def cheapest(start: int, stages: int) -> tuple[float, tuple[int, ...]]:
        if stages == 1:
            return sum(costs[start:]), (start, n)
        cuts = []
        for end in range(start + 1, n - stages + 2):
            worst, rest = cheapest(end, stages - 1)
            cuts.append((max(sum(costs[start:end]), worst), (start, *rest)))
        return min(cuts)

    return list(cheapest(0, n_stages)[1])


def cases() -> list[Case]:
    """Models whose last layer is costly, as a head over a large vocabulary is, models of many layers and of few."""
    return [
        Case.of(1, layers=9, stages=3, last=3.5),
        Case.of(1, layers=12, stages=4, last=1.0),
        Case.of(1, layers=30, stages=10, last=2.0),
        Case.of(1, layers=6, stages=6, last=20.0),
        Case.of(1, layers=5, stages=1, last=2.0),
    ]


def inputs(case: Case) -> Inputs:
    """Costs of layers from 1 to 5, in 1,024ths, of which the last is multiplied by the case's `last`.

    Unless there is only one cut, they are drawn until no usual short cut, such as `even` or `nearly`, gives a
    best one."""
    draw, n, p = random.Random(case.seed), case["layers"], case["stages"]
    while True:
        costs = [draw.randrange(1024, 5 * 1024) / 1024 for _ in range(n)]
        costs[-1] *= case["last"]
        cuts = [even(costs, p), to_the_mean(costs, p), [*range(p), n], alike(costs, p)]
        cuts += [nearly(costs, p)] if n >= 12 else []  # with fewer layers, costs of cuts are seldom so near
        told_apart = len(set(map(tuple, cuts))) == len(cuts)
        if p in (1, n) or (told_apart and min(worst_of(costs, cut) for cut in cuts) > least(costs, p)):
            return [(costs, p)]


def worst_of(costs: list[float], bounds: Sequence[int]) -> float:
    """Cost of the costliest stage."""
    return max(sum(costs[a:b]) for a, b in zip(bounds, bounds[1:], strict=False))


def even(costs: list[float], n_stages: int) -> list[int]:
    """The bounds of stages with equal numbers of layers."""
    return [len(costs) * stage // n_stages for stage in range(n_stages + 1)]


def to_the_mean(costs: list[float], n_stages: int) -> list[int]:
    """The bounds of stages that are filled from the front until the next layer would take them over the mean."""
    bounds, filled = [0], 0.0
    for k, cost in enumerate(costs):
        must = len(costs) - k == n_stages - len(bounds)
        if k and len(bounds) < n_stages and (must or filled + cost > sum(costs) / n_stages):
            bounds, filled = [*bounds, k], 0.0
        filled += cost
    return [*bounds, len(costs)]


def alike(costs: list[float], n_stages: int) -> list[int]:
    """The bounds with the least sum of squared costs; of several, those whose costliest stage is cheapest."""
    n, best = len(costs), {len(costs): (0.0, 0.0, [len(costs)])}
    for stages in range(1, n_stages + 1):
        behind, best = best, {}
        for start in range(n - stages + 1):
            cuts = []
            for end in range(start + 1, n + 1):
                if end in behind:
                    cost, (squares, worst, rest) = sum(costs[start:end]), behind[end]
                    cuts.append((cost**2 + squares, max(cost, worst), [start, *rest]))
            best[start] = min(cuts)
    return best[0][2]


def nearly(costs: list[float], n_stages: int) -> list[int]:
    """The bounds of stages that are filled from the front up to a limit, found by halving until it is known to 0.1."""
    n, low, high = len(costs), max(costs), sum(costs)

    def up_to(limit: float) -> list[int]:
        bounds, cost = [0], 0.0
        for k, layer in enumerate(costs):
            if k > bounds[-1] and (cost + layer > limit or n - k <= n_stages - len(bounds)):
                bounds, cost = [*bounds, k], 0.0
            cost += layer
        return [*bounds, n]

    while high - low > 0.1:
        middle = (low + high) / 2
        low, high = (low, middle) if len(up_to(middle)) - 1 <= n_stages else (middle, high)
    return up_to(low) if len(up_to(low)) - 1 <= n_stages else up_to(high)


def play(attempt: Any, group: Group, costs: list[float], n_stages: int) -> Any:
    """The cost of the attempt's costliest stage, and True if its bounds are a cut into stages at all."""
    bounds = list(attempt(list(costs), n_stages))
    edges = len(bounds) == n_stages + 1 and (bounds[0], bounds[-1]) == (0, len(costs))
    if not edges or any(a >= b for a, b in zip(bounds, bounds[1:], strict=False)):
        return {"a cut into stages": False, "bounds": bounds, "costliest stage": 0.0}
    return {"a cut into stages": True, "bounds": bounds, "costliest stage": float(worst_of(costs, bounds))}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The cost of the best cut."""
    return [{"a cut into stages": True, "bounds": ..., "costliest stage": float(least(*inputs[0]))}]


def least(costs: list[float], n_stages: int) -> float:
    """The cost of the costliest stage in the best cut. All cuts are tried; where they are too many, the cost is the
    lowest limit to which stages can be filled from the front."""
    n = len(costs)
    if n < 20:
        return min(worst_of(costs, (0, *inner, n)) for inner in combinations(range(1, n), n_stages - 1))
    limits = sorted({sum(costs[a:b]) for a in range(n) for b in range(a + 1, n + 1)})
    return next(limit for limit in limits if filled(costs, limit) <= n_stages)


def filled(costs: Sequence[float], limit: float) -> float:
    """The number of stages if each is filled up to the limit; infinite if a layer costs more than the limit."""
    stages, room = 0.0, 0.0
    for cost in costs:
        if cost > limit:
            return float("inf")
        if cost > room:
            stages, room = stages + 1, limit
        room -= cost
    return stages


PROBLEM = exercise(__name__, balanced_cut)
