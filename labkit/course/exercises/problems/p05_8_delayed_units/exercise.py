"""05.8: scales of 8-bit copies that come from earlier steps, the same on all ranks."""

from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends

STEPS, QUIET, SPIKE = 12, (0, 2, 6, 7), 4


class DelayedUnits:
    """Quantizes tensors with a scale that follows from the largest numbers of the last `length` steps of all ranks."""

    def __init__(self, length: int, group: Group):
        """length: steps that are looked back over, at least 1. No step has ended yet."""
        self.length, self.group = length, group
        self.seen, self.history = 0.0, list[float]()

    def quantize(self, x: Tensor) -> tuple[Tensor, float]:
        """x, float32 and finite, as (codes, scale). May be called several times in a step, and sends nothing.

        scale: the largest size in the steps that are looked back over, / 448; 1.0 if it is 0, or if no step has ended.
        codes: float32, x / scale rounded to `torch.float8_e4m3fn`; what exceeds 448 either way becomes 448 or -448."""
        self.seen = max(self.seen, x.abs().max().item())
        scale = max(self.history, default=0.0) / 448 or 1.0
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float(), scale

    def end_step(self) -> None:
        """The step is over: the largest size that any rank has quantized in it becomes history, the same on all ranks.

        The ranks exchange one number, in one collective."""
        seen = self.group.all_reduce(torch.tensor([self.seen], device=self.group.device), op="max").item()
        self.history = [seen, *self.history][: self.length]
        self.seen = 0.0


def cases() -> list[Case]:
    """Histories of several steps and of one."""
    return [Case.of(3, length=3), Case.of(1, length=4), Case.of(2, length=1)]


def inputs(case: Case) -> Inputs:
    """Two tensors a step on each rank. Sizes drift, one rank has a spike in the fifth step, all have zeros in the
    first, third, seventh and eighth; the larger tensor of a step is now the first and now the second."""
    sizes = [10 ** case.random(1, key=900 + step).item() for step in range(STEPS)]

    def tensors(rank: int, step: int) -> list[Tensor]:
        size = sizes[step] * (200.0 if step == SPIKE and rank == case.n_ranks - 1 else 1.0) * (step not in QUIET)
        two = [size * case.random(4, 5, key=100 * rank + 10 * step + i) for i in range(2)]
        two[step % 2] = two[step % 2] * 3.0
        two[step % 2][1, 2] = -9.0 * size * (1 + rank)
        return two

    return [(case["length"], [tensors(rank, step) for step in range(STEPS)]) for rank in range(case.n_ranks)]


def play(attempt: Any, group: Group, length: int, steps: list[list[Tensor]]) -> Any:
    """Twelve steps of two tensors each: the codes and the scales."""
    scales, codes, made = [], [], attempt(length, group)
    for tensors in steps:
        for x in tensors:
            code, scale = made.quantize(x)
            codes.append(code)
            scales.append(float(scale))
        made.end_step()
    return {"scales": scales, "codes": codes}


def answer(case: Case, inputs: Inputs) -> Answers:
    """One process that sees the tensors of all ranks."""
    largest = [max(float(x.abs().max()) for _, steps in inputs for x in steps[s]) for s in range(STEPS)]
    results = []
    for length, steps in inputs:
        scales: list[float] = []
        codes = []
        for s, tensors in enumerate(steps):
            known = max(largest[max(0, s - length) : s], default=0.0)
            for x in tensors:
                scales.append(known / 448 if known > 0 else 1.0)
                codes.append((x / scales[-1]).clamp(-448, 448).to(torch.float8_e4m3fn).float())
        results.append({"scales": scales, "codes": codes})
    return results


def law(case: Case, rank: int) -> tuple[float, float]:
    """(least, most) bytes that a rank sends: a step's all_reduce of a number of 1 to 8 bytes, 2(n-1)/n of it."""
    n = case.n_ranks
    return STEPS * (2 * (n - 1) // n), STEPS * (2 * (n - 1) * 8 // n)


PROBLEM = exercise(
    __name__,
    DelayedUnits,
    laws=(
        sends(
            law,
            "each rank sends one number a step: 2(n-1)/n of at most 8 bytes, in one collective",
            messages=lambda case, rank: STEPS,
        ),
    ),
)
