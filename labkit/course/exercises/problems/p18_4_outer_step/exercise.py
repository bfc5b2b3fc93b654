"""18.4: DiLoCo's outer step, Nesterov SGD on the mean difference of weights."""

from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends

MEETINGS = 4


class OuterStep:
    """Ranks that trained alone agree: SGD with Nesterov momentum on the mean of how far they have come."""

    def __init__(self, weights: Tensor, lr: float, momentum: float, group: Group):
        """weights: [k], on which all ranks agree at the start. They stay as they are in here."""
        self.anchor, self.lr, self.momentum, self.group = weights.clone(), lr, momentum, group
        self.velocity = torch.zeros_like(weights)

    def agree(self, weights: Tensor) -> Tensor:
        """What this rank has come to -> the weights with which every rank goes on.   [k] -> [k]

        From the weights agreed on last, one step of SGD as torch.optim.SGD takes it with `lr`, `momentum` and
        nesterov=True: its momentum begins at the first meeting and is kept for the next. The gradient is the mean over
        ranks of how far the weights agreed on last lie from those now. `weights` stay as they are, and what is returned
        is trained in place until the next meeting. 2(n-1)/n of the bytes of `weights` are sent, by one all_reduce."""
        gradient = self.group.all_reduce(self.anchor - weights) / self.group.size
        self.velocity = self.momentum * self.velocity + gradient
        self.anchor = self.anchor - self.lr * (gradient + self.momentum * self.velocity)
        return self.anchor.clone()


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks."""
    return [
        Case.of(2, torch.float64, numel=24),
        Case.of(4, torch.float32, numel=1200),
        Case.of(3, torch.float64, numel=240),
        Case.of(1, torch.float64, numel=50),
    ]


def inputs(case: Case) -> Inputs:
    """A start, a rate and a momentum that all ranks share, and how far each rank goes alone between the meetings."""
    start, lr, momentum = case.random(case["numel"]), case.dice.uniform(0.4, 0.8), case.dice.uniform(0.5, 0.9)

    def moves(rank: int) -> list[Tensor]:
        return [case.random(case["numel"], key=1 + 10 * rank + meeting) for meeting in range(MEETINGS)]

    return [(start, lr, momentum, moves(rank)) for rank in range(case.n_ranks)]


def play(attempt: Any, group: Group, start: Tensor, lr: float, momentum: float, moves: list[Tensor]) -> Any:
    """The weights after each meeting, and if what was handed over stayed as it was. Ranks train in place."""
    weights, met, kept = start.clone(), list[Tensor](), True
    outer = attempt(weights, lr, momentum, group)
    for move in moves:
        weights += move
        came = weights.clone()
        agreed = outer.agree(weights)
        kept = kept and torch.equal(weights, came)
        weights = agreed
        met.append(weights.clone())
    return {"met": met, "weights stay as they are": kept}


def answer(case: Case, inputs: Inputs) -> Answers:
    """torch's own SGD, in one process."""
    start, lr, momentum, _ = inputs[0]
    anchor = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([anchor], lr=lr, momentum=momentum, nesterov=True)
    met = []
    for meeting in range(MEETINGS):
        anchor.grad = -torch.stack([moves[meeting] for *_, moves in inputs]).mean(0)
        optimizer.step()
        met.append(anchor.detach().clone())
    return [{"met": met, "weights stay as they are": True}] * case.n_ranks


PROBLEM = exercise(
    __name__,
    OuterStep,
    laws=(
        sends(
            lambda case, rank: MEETINGS * 2 * (case.n_ranks - 1) / case.n_ranks * case["numel"] * case.item_bytes,
            "each rank sends 2(n-1)/n of the bytes of the weights at each meeting, by one all_reduce",
            only=("all_reduce",),
        ),
    ),
)
