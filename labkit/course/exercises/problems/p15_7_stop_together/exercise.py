"""15.7: early stopping that all ranks obey, decided by one."""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends
from labkit.plan.machine.collectives import sent_bytes

WIDTH = 60


def stop_together(
    train: Callable[[], None], validate: Callable[[], float], most: int, patience: int, group: Group
) -> int:
    """Train until validation is no longer getting better; the number of steps that were trained, on every rank.

    train() does one step, and has an all-reduce inside: all ranks must call it equally often. validate() gives the
    loss on rows that only rank 0 has; it raises on others. Rank 0 validates after each step. Training ends after the
    first step that makes `patience` in a row without a new lowest loss (nan is none), or after `most` steps.
    Besides what train() sends there is one broadcast of one number a step, and nothing else."""
    best, waited = math.inf, 0
    for step in range(1, most + 1):
        train()
        stop = torch.zeros(1, device=group.device)
        if group.rank == 0:
            loss = validate()
            best, waited = (loss, 0) if loss < best else (best, waited + 1)
            stop[0] = waited >= patience
        if group.broadcast(stop, source=0)[0]:
            return step
    return most


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks: the most steps, and for each of two jobs the steps between which its last improvement
    lies. With `blind` job 1 begins with nan."""
    return [
        Case.of(3, torch.float64, most=14, last=((3, 5), (6, 8)), patience=3, blind=True),
        Case.of(2, most=9, last=((7, 8), (3, 4)), patience=4, blind=False),
        Case.of(4, most=12, last=((2, 4), (6, 9)), patience=1, blind=False),
        Case.of(1, most=10, last=((3, 4), (5, 6)), patience=2, blind=False),
    ]


def losses(case: Case, job: int) -> list[float]:
    """The losses of a job. They fall until a step that is drawn from the case's `last`, except during one wait; in job
    1 that is all nan, and the last fall is less than float32 shows. Then, in job 0, two equal the lowest, one is nan,
    and the rest is above; in job 1 all are above, and fall."""
    dice = random.Random(2 * case.seed + job)
    last = dice.randint(*case["last"][job])
    n_waits = dice.randint(1, min(case["patience"] - 1, last - 2)) if case["patience"] > 1 else 0
    waits = 1 if job and case["blind"] else dice.randint(2, last - n_waits)
    best, values = 100.0, list[float]()
    for step in range(1, case["most"] + 1):
        value = best + dice.uniform(0.1, 2)
        if step > last:
            value = [best, best, math.nan, value][min(step - last - 1, 3)] if job == 0 else best + 1 / step
        elif not waits <= step < waits + n_waits:
            best = value = best - (1e-8 if job and step == last else dice.uniform(0.1, 2))
        elif job:
            value = math.nan
        values.append(value)
    return values


def inputs(case: Case) -> Inputs:
    """Weights, a gradient of its own for each rank, and the losses of both jobs for rank 0 alone."""
    scripts = [losses(case, job) for job in (0, 1)]
    return [(case.random(WIDTH), case.random(WIDTH, key=1 + rank), scripts if rank == 0 else [[], []],
             case["most"], case["patience"]) for rank in range(case.n_ranks)]  # fmt: skip


def play(attempt: Any, group: Group, weights: Tensor, gradient: Tensor, scripts: list[list[float]], *ends: int) -> Any:
    """Run both jobs, one after the other."""
    return [trained(attempt, group, weights, gradient, script, *ends) for script in scripts]


def trained(
    attempt: Any, group: Group, weights: Tensor, gradient: Tensor, script: list[float], most: int, patience: int
) -> Any:
    """Train with the attempt. Return the number of steps that it returns, the number that were trained, how often it
    validated, and the weights."""
    w, done = weights.clone(), [0, 0]

    def train() -> None:
        done[0] += 1
        w.sub_(group.all_reduce(gradient), alpha=0.01 * done[0])

    def validate() -> float:
        if group.rank != 0:
            raise RuntimeError(f"rank {group.rank} has no rows to validate on")
        done[1] += 1
        return script[done[0] - 1]

    reply = attempt(train, validate, most, patience, group)
    return {"told": reply, "trained": done[0], "validated": done[1], "weights": w}


def n_steps(case: Case, job: int) -> int:
    """The step after which training ends: the first at which the lowest loss so far is `patience` steps ago."""
    known = [math.inf if loss != loss else loss for loss in losses(case, job)]
    for step in range(1, case["most"] + 1):
        low = min(known[:step])
        lowest = known.index(low) + 1 if low < math.inf else 0  # so far all were nan
        if step - lowest >= case["patience"]:
            return step
    return int(case["most"])


def answer(case: Case, inputs: Inputs) -> Answers:
    """The steps from the list of losses, the weights from one sum."""
    total = torch.stack([gradient for _, gradient, *_ in inputs]).sum(0)
    return [[{"told": steps, "trained": steps, "validated": steps * (rank == 0),
              "weights": inputs[0][0] - 0.01 * sum(range(1, steps + 1)) * total}
             for steps in (n_steps(case, job) for job in (0, 1))] for rank in range(case.n_ranks)]  # fmt: skip


def law(case: Case, rank: int) -> tuple[float, float]:
    """(least, most) bytes that a rank sends: a step's all-reduce of a gradient, and from rank 0 up to 8 bytes."""
    gradient = sent_bytes("ring", "all_reduce", case.n_ranks, WIDTH * case.item_bytes, 0, case.item_bytes)
    steps = n_steps(case, 0) + n_steps(case, 1)
    return steps * gradient, steps * (gradient + 8 * (rank == 0))


PROBLEM = exercise(
    __name__,
    stop_together,
    laws=(
        sends(
            law,
            "one all-reduce of gradients and one broadcast of one number in each step",
            only=("all_reduce", "broadcast"),
            messages=lambda case, rank: 2 * (n_steps(case, 0) + n_steps(case, 1)),
        ),
    ),
)
