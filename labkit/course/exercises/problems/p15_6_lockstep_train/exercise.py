"""15.6: training with uneven batches, repaired so that nobody waits for a rank that has left."""

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, Star, exercise, most_calls, sends
from labkit.plan.machine.collectives import sent_bytes

WIDTH = 96


def lockstep_train(w: Tensor, batches: list[tuple[Tensor, Tensor]], lr: float, group: Group) -> Tensor:
    """Train a linear model by SGD on the batches of all ranks, of which some have more than others; the weights, [d].

    A batch is (x [rows, d], y [rows]), rows differ, and each rank has one at least. In step k all ranks that have a
    k-th batch put them together: the loss is the mean of (x w - y)^2 over all samples of the step, on whatever ranks.
    It goes on until all batches of all ranks have been used once, and all ranks end with the same weights. w stays as
    it is. Send sums: per step what an all-reduce of d numbers costs, and a few numbers besides."""
    n_steps = int(group.all_reduce(torch.tensor([len(batches)], device=group.device), "max"))
    for step in range(n_steps):
        total = torch.zeros(len(w) + 1, dtype=w.dtype, device=w.device)
        if step < len(batches):
            x, y = batches[step]
            total[:-1] = 2 * x.T @ (x @ w - y)
            total[-1] = len(x)
        total = group.all_reduce(total)
        w = w - lr * total[:-1] / total[-1]
    return w


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks. `rows` are the rows of each batch of each rank."""
    return [
        Case.of(3, torch.float64, rows=((5, 3, 4, 2), (4, 6), (3, 2, 7, 1, 5))),
        Case.of(2, rows=((4,), (2, 3, 5))),
        Case.of(4, torch.float64, rows=((3, 3), (3, 3), (3, 3), (3,))),
        Case.of(1, rows=((2, 5, 3),)),
    ]


def inputs(case: Case) -> Inputs:
    """The same weights and the same drawn rate, and samples of its own for each rank."""
    arguments, lr = [], case.dice.uniform(0.02, 0.08)
    for rank, rows in enumerate(case["rows"]):
        batches = [(case.random(n, WIDTH, key=1000 * rank + k) / 8, case.random(n, key=1000 * rank + 500 + k))
                   for k, n in enumerate(rows)]  # fmt: skip
        arguments.append((case.random(WIDTH, key=-1), batches, lr))
    return arguments


def answer(case: Case, inputs: Inputs) -> Answers:
    """torch's loss, gradient and SGD, on the samples of each step in one process."""
    w = torch.nn.Parameter(inputs[0][0].clone())
    optimizer = torch.optim.SGD([w], lr=inputs[0][2])  # type: ignore[list-item]
    for step in range(max(len(batches) for _, batches, _ in inputs)):
        rows = [batches[step] for _, batches, _ in inputs if step < len(batches)]
        x, y = torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows])
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(x @ w, y).backward()
        optimizer.step()
    return [w.detach()] * case.n_ranks


def n_steps(case: Case) -> int:
    """Steps of the whole job."""
    return max(len(rows) for rows in case["rows"])


def law(case: Case, rank: int) -> tuple[float, float]:
    """(least, most) bytes that a rank sends: 2 (n-1)/n of the gradient in each step, and at most four numbers of 8
    bytes to each other rank a step, and twice besides."""
    n = case.n_ranks
    gradient = sent_bytes("ring", "all_reduce", n, WIDTH * case.item_bytes, 0, case.item_bytes)
    return n_steps(case) * gradient, n_steps(case) * gradient + (n_steps(case) + 2) * 32 * (n - 1)


PROBLEM = exercise(
    __name__,
    lockstep_train,
    laws=(
        sends(
            law,
            "each rank sends 2(n-1)/n bytes of a gradient in each step, and a few numbers besides",
            only=("all_reduce", "all_gather", "broadcast"),
            messages=lambda case, rank: 3 * n_steps(case) + 2,
        ),
    ),
    star=Star("one collective a step, and no other", most_calls, lambda case: n_steps(case), unit="collectives"),
)
