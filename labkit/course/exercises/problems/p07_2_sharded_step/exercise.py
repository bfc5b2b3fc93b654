"""07.2: an optimizer whose state is kept once over all ranks, and not once on each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, holds, sends
from labkit.course.judge.run_record import weigh

STEPS, LR = 3, 0.01
ROOM_BYTES = 4 << 10


class ShardedOptimizer:
    """An optimizer that keeps the state of every n-th parameter on each of n ranks (ZeRO-1, by whole parameters).

    Parameter i belongs to rank i % n: that rank steps it, and everybody else gets its new value by a broadcast.
    The gradients are the same on all ranks when `step` is called. Between steps this holds on to the parameters and to
    the state of its own ones, and to no copy of anything."""

    def __init__(self, params: list[Tensor], make_optimizer: Callable[[list[Tensor]], Any], group: Group):
        """params: all parameters; make_optimizer(some) gives an optimizer for some of them."""
        self.params, self.group = params, group
        self.optimizer = make_optimizer(params[group.rank :: group.size])

    def step(self) -> None:
        """Step the parameters of this rank, then bring everybody up to date."""
        self.optimizer.step()
        for i, p in enumerate(self.params):
            p.data.copy_(self.group.broadcast(p.data, source=i % self.group.size))


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks; the sizes are such that the shards differ."""
    return [
        Case.of(3, sizes=(240_000, 16_000, 180_000, 64_000, 70)).among(
            Case.of(3, sizes=(20_000, 260_000, 70, 200_000))
        ),
        Case.of(2, sizes=(250_000, 4_000, 60_000)).among(Case.of(2, sizes=(7_000, 290_000))),
        Case.of(4, torch.float64, sizes=(3000, 2000, 100, 50, 280_000, 10, 4)).among(
            Case.of(5, torch.float64, sizes=(30, 300_000, 200, 9, 40, 7, 50))
        ),
        Case.of(1, sizes=(3000, 20)),
    ]


def inputs(case: Case) -> Inputs:
    """Weights, and the gradients of each step; the same on all ranks."""
    weights = [case.random(size, key=i) for i, size in enumerate(case["sizes"])]
    grads = [[case.random(size, key=100 * s + i + 50) for i, size in enumerate(case["sizes"])] for s in range(STEPS)]
    weighed = case.dice.randint(1, STEPS - 1)  # before the last step, for which an attempt must still hold its state
    return [([w.clone() for w in weights], grads, weighed) for _ in range(case.n_ranks)]


def adamw(params: list[Tensor]) -> Any:
    """The optimizer that is sharded."""
    return torch.optim.AdamW(params, lr=LR, foreach=False)


def play(attempt: Any, group: Group, weights: list[Tensor], grads: list[list[Tensor]], weighed: int) -> Any:
    """Take three steps and return the weights. What is held is weighed between two of them, when no parameter has a
    gradient."""
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = attempt(params, adamw, group)
    for number, step in enumerate(grads, 1):
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
        for p in params:
            p.grad = None
        if number == weighed:
            torch.nn.ParameterList(params)  # the probe counts a tensor as a parameter once a module has it
            weigh(group)
    return [p.data for p in params]


def answer(case: Case, inputs: Inputs) -> Answers:
    """torch's AdamW on all parameters, in one process."""
    weights, grads, _ = inputs[0]
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = adamw(params)  # type: ignore[arg-type]
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g
        optimizer.step()
    return [[p.detach() for p in params]] * case.n_ranks


def own(case: Case, rank: int) -> int:
    """Elements of the parameters that belong to a rank."""
    return int(sum(case["sizes"][rank :: case.n_ranks]))


def held(case: Case, rank: int) -> dict[str, tuple[float, float]]:
    """(least, most) bytes held by kind: all weights, the state of the rank's own, and some room. Every kind has a
    limit, so that copies are too much whichever kind the probe counts them as."""
    whole, state = case.item_bytes * sum(case["sizes"]), 2 * case.item_bytes * own(case, rank)
    return {
        "optimizer": (state, state + 64 * len(case["sizes"])),
        "parameters": (whole, whole),
        "gradients": (0, 0),
        "activations": (0, 0),
        "other": (0, ROOM_BYTES),
    }


PROBLEM = exercise(
    __name__,
    ShardedOptimizer,
    laws=(
        sends(
            lambda case, rank: 0 if case.n_ranks == 1 else STEPS * case.item_bytes * own(case, rank),
            "each rank sends its own parameters once a step, by broadcast",
            only=("broadcast",),
        ),
        holds(
            held, "beside the weights a rank holds two numbers of state for each that is its own, and none for others"
        ),
    ),
)
