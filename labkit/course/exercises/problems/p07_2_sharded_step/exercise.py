"""07.2: an optimizer whose state is kept once over all ranks, and not once on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise_files import beside
from labkit.course.exercises.problem import Problem
from labkit.course.judge.case import Case
from labkit.course.judge.laws import holds, sends
from labkit.course.judge.run_record import weigh

STEPS, LR = 3, 0.01
ITEM = 4
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


def cases() -> Sequence[Case]:
    """Worlds of 1 to 4 ranks; the sizes are such that the shards differ."""
    return [Case.of(3, sizes=(6000, 300, 4500, 1200, 70)), Case.of(2, sizes=(5000, 40, 900)),
            Case.of(4, sizes=(3000, 2000, 100, 50, 8000, 10, 4)), Case.of(1, sizes=(3000, 20))]  # fmt: skip


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """Weights, and the gradients of each step; the same on all ranks."""
    weights = [case.random(size, key=i) for i, size in enumerate(case["sizes"])]
    grads = [[case.random(size, key=100 * s + i + 50) for i, size in enumerate(case["sizes"])] for s in range(STEPS)]
    return [([w.clone() for w in weights], grads) for _ in range(case.n_ranks)]


def adamw(params: list[Tensor]) -> Any:
    """The optimizer that is sharded."""
    return torch.optim.AdamW(params, lr=LR, foreach=False)


def play(attempt: Any, group: Group, weights: list[Tensor], grads: list[list[Tensor]]) -> Any:
    """Take three steps and return the weights. What is held is weighed before the last step, when no parameter has a
    gradient."""
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = attempt(params, adamw, group)
    for number, step in enumerate(grads, 1):
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
        for p in params:
            p.grad = None
        if number == STEPS - 1:
            torch.nn.ParameterList(params)  # the probe counts a tensor as a parameter once a module has it
            weigh(group)  # before the last step, for which an attempt must still hold its state
    return [p.data for p in params]


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """torch's AdamW on all parameters, in one process."""
    weights, grads = given[0]
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
    whole, state = ITEM * sum(case["sizes"]), 8 * own(case, rank)
    return {
        "optimizer": (state, state + 64 * len(case["sizes"])),
        "parameters": (whole, whole),
        "gradients": (0, 0),
        "activations": (0, 0),
        "other": (0, ROOM_BYTES),
    }


PROBLEM = Problem(
    **beside(__file__),
    reference=ShardedOptimizer,
    cases=cases,
    inputs=inputs,
    play=play,
    answer=answer,
    laws=(
        sends(
            lambda case, rank: 0 if case.n_ranks == 1 else STEPS * ITEM * own(case, rank),
            "each rank sends its own parameters once a step, by broadcast",
            only=("broadcast",),
        ),
        holds(held, "beside the weights a rank holds 8 bytes of state for each that is its own, and none for others"),
    ),
)
