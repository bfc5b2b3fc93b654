"""06.7: each rank sends the few largest numbers of its gradient, and remembers the rest."""

import random
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, Star, exercise, most_sent_bytes, sends

STEPS = 4


class TopKFeedback:
    """A mean of gradients over the ranks in which each rank sends k numbers only, and remembers the rest."""

    def __init__(self, numel: int, k: int, dtype: torch.dtype, group: Group):
        """numel: numbers in a gradient (below 2^15); k: how many of them travel."""
        self.k, self.group = k, group
        self.rest = torch.zeros(numel, dtype=dtype)

    def average(self, grad: Tensor) -> Tensor:
        """The mean over ranks of what each rank sends, zero where nobody sends anything.   [numel] -> [numel]

        A rank adds `grad` to what it has not sent in earlier steps (nothing at first), sends the k numbers of largest
        size of that sum, with their places, and keeps the others for the next step. `grad` stays as it is.
        Each rank sends (n-1) k values and (n-1) k places, of 8 bytes at most, a step."""
        self.rest = self.rest + grad
        places = self.rest.abs().topk(self.k).indices
        values = self.rest[places]
        self.rest[places] = 0
        all_values = self.group.all_gather(values)
        all_places = self.group.all_gather(places)
        return torch.zeros_like(grad).index_add(0, all_places, all_values) / self.group.size


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks; gradients in 16 bits, too."""
    return [
        Case.of(3, torch.float64, numel=300, k=11),
        Case.of(4, torch.float32, numel=1000, k=40),
        Case.of(2, torch.bfloat16, numel=60, k=7),
        Case.of(1, torch.float64, numel=200, k=30),
    ]


def inputs(case: Case) -> Inputs:
    """Gradients of several steps: a part that all ranks and steps have in common, so that they choose the same places
    now and then, and noise. No two numbers between which a rank has to choose are alike."""
    numel, k = case["numel"], case["k"]

    def make(dice: random.Random) -> list[list[Tensor]]:
        key = dice.randrange(1 << 30)
        same = case.random(numel, key=key).sign() * case.random(numel, key=key + 1).exp()
        return [[same + case.random(numel, key=key + 100 + 10 * rank + step) / 2 for step in range(STEPS)]
                for rank in range(case.n_ranks)]  # fmt: skip

    def tells(ranks: list[list[Tensor]]) -> bool:
        for grads in ranks:
            owed = torch.zeros(numel, dtype=case.dtype)
            for grad in grads:
                owed = owed + grad
                sizes = owed.abs().sort(descending=True)
                if sizes.values[k - 1] == sizes.values[k]:
                    return False
                owed[sizes.indices[:k]] = 0
        return True

    return [(k, grads) for grads in case.draw(make, tells)]


def play(attempt: Any, group: Group, k: int, grads: list[Tensor]) -> Any:
    """The means of all steps."""
    average = attempt(grads[0].numel(), k, grads[0].dtype, group).average
    return [average(grad).clone() for grad in grads]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The means number by number, from a sorted list, in one process."""
    means = [torch.zeros(case["numel"], dtype=case.dtype) for _ in range(STEPS)]
    for k, grads in inputs:
        owed = torch.zeros(case["numel"], dtype=case.dtype)
        for step, grad in enumerate(grads):
            owed = owed + grad
            chosen = sorted(range(case["numel"]), key=lambda i: -abs(owed[i].item()))[:k]
            for i in chosen:
                means[step][i] += owed[i] / case.n_ranks
                owed[i] = 0
    return [means] * case.n_ranks


def law(case: Case, _: int) -> tuple[float, float]:
    """(least, most) bytes that a rank sends: (n-1) k values, and (n-1) k places of 1 to 8 bytes, a step."""
    numbers = STEPS * (case.n_ranks - 1) * case["k"]
    return numbers * (case.item_bytes + 1), numbers * (case.item_bytes + 8)


PROBLEM = exercise(
    __name__,
    TopKFeedback,
    laws=(
        sends(
            law,
            "each rank sends (n-1) k values and as many places of at most 8 bytes a step, by all_gather",
            only=("all_gather",),
            messages=lambda case, rank: 2 * STEPS,
        ),
    ),
    star=Star(
        "places in as few bytes as torch's whole numbers allow",
        most_sent_bytes,
        lambda case: STEPS * (case.n_ranks - 1) * case["k"] * (case.item_bytes + 2),
    ),
)
