"""06.6: parameters that some ranks do not use, or that the model uses twice."""

# mypy: disable-error-code="arg-type"
# (the learner's text carries no comments for the type checker)
import random
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, Star, exercise, most_calls, sends

Uses = list[tuple[int, Tensor]]


def average_used(params: list[Tensor], group: Group) -> None:
    """After backward: p.grad becomes the mean over all ranks, for each parameter that any rank has used.

    A rank that has not used p has p.grad None, and counts as zero in the mean over all n ranks. A parameter that no
    rank has used keeps p.grad None everywhere, and is not sent.
    `params` is in the same order on all ranks; one that the model uses in two places stands in it twice, as the same
    object, and is sent once. Besides gradients each rank may send 8 bytes for every entry of `params`."""
    own = list(dict.fromkeys(params))
    used = torch.tensor([p.grad is not None for p in own], device=group.device).float()
    for p, anywhere in zip(own, group.all_reduce(used, "max"), strict=True):
        if anywhere:
            p.grad = group.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad, "mean")


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks. `tied`: which of the parameters stands at the end of the list once more."""
    return [
        Case.of(3, torch.float64, sizes=(70, 40, 95, 33, 58, 44), tied=0, some=False),
        Case.of(4, torch.float32, sizes=(130, 61, 87, 200, 40), tied=1, some=True),
        Case.of(1, torch.float32, sizes=(50, 90, 30, 20), tied=0, some=False),
    ]


def inputs(case: Case) -> Inputs:
    """Weights, the place of the tied parameter, and (place, factor) of each use by a rank. All ranks use the tied
    parameter twice, none the last but one, and a single rank the last and the one before these two, whose gradient is
    zero. The others are used by all ranks or, where the case has `some`, by a random part of them."""
    draw, n, ranks = random.Random(case.seed), len(case["sizes"]), range(case.n_ranks)
    weights = [case.random(size, key=i) for i, size in enumerate(case["sizes"])]
    users = {i: draw.sample(ranks, draw.choice(ranks) + 1 if case["some"] else len(ranks)) for i in range(n)}
    alone = [draw.choice(ranks)]
    users |= {n - 3: alone, n - 2: [], n - 1: alone, case["tied"]: [*ranks, *ranks]}
    by_rank = []
    for rank in ranks:
        uses = [i for i in range(n) for user in users[i] if user == rank]
        drawn = [
            (i, (i != n - 3) * case.random(case["sizes"][i], key=1000 * rank + 10 * k + 77)) for k, i in enumerate(uses)
        ]
        by_rank.append(([w.clone() for w in weights], case["tied"], drawn))
    return by_rank


def play(attempt: Any, group: Group, weights: list[Tensor], tied: int, uses: Uses) -> Any:
    """Run a backward that reaches the parameters that this rank uses, then the attempt; return the gradients."""
    params = [torch.nn.Parameter(w) for w in weights]
    if uses:
        torch.stack([(params[i] * x).sum() for i, x in uses]).sum().backward()
    attempt([*params, params[tied]], group)
    return [p.grad for p in params]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The gradient of p * x is x: the sum of x over all uses, divided by the number of ranks."""
    means: list[Tensor | None] = []
    for i in range(len(case["sizes"])):
        xs = [x for _, _, uses in inputs for place, x in uses if place == i]
        means.append(torch.stack(xs).sum(0) / case.n_ranks if xs else None)
    return [means] * case.n_ranks


def law(case: Case, _: int) -> tuple[float, float]:
    """(least, most) bytes that a rank sends: 2(n-1)/n of those of all parameters but the one that nobody uses, and of
    up to 8 for each entry."""
    sizes, n = case["sizes"], case.n_ranks
    share = 2 * (n - 1) / n
    needed = share * case.item_bytes * (sum(sizes) - sizes[-2])
    return (needed - len(sizes) if n > 1 else 0), needed + share * 8 * (len(sizes) + 1)


PROBLEM = exercise(
    __name__,
    average_used,
    changes=(0,),
    laws=(
        sends(law, "each rank sends 2(n-1)/n of the bytes of what any rank uses, once, and 8 bytes an entry at most"),
    ),
    star=Star(
        "two collectives in all, however many parameters there are",
        most_calls,
        lambda case: 2 * (case.n_ranks > 1),
        unit="collectives",
    ),
)
