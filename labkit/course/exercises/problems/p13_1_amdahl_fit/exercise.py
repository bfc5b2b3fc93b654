"""13.1: the serial share of a job, from speed-ups that were measured."""

import random
from typing import Any

import torch

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_alone, exercise


def amdahl_fit(samples: list[tuple[int, float]]) -> float:
    """The serial share s of measured speed-ups, each (n_ranks, speed_up): the share of one device's step that does
    not shrink.

    Amdahl: 1 / speed_up = s + (1 - s) / n. Of all s, the one with the least sum of squared errors of this equation,
    in 1 / speed_up, over all samples; then at least 0 and at most 1. On one rank the speed-up is 1."""
    slopes = [1 - 1 / n for n, _ in samples]
    rests = [1 / x - 1 / n for n, x in samples]
    s = sum(a * b for a, b in zip(slopes, rests, strict=True)) / sum(a * a for a in slopes)
    return min(1.0, max(0.0, s))


def cases() -> list[Case]:
    """Jobs with noise, without noise, and with much noise; in two of them some runs had equally many ranks."""
    return [
        Case.of(1, n_jobs=12, noise=0.1, sizes=(1, 2, 3, 4, 4, 8, 16)),
        Case.of(1, n_jobs=6, noise=0.0, sizes=(1, 2, 4)),
        Case.of(1, n_jobs=12, noise=0.3, sizes=(2, 5, 5, 64)),
    ]


def inputs(case: Case) -> Inputs:
    """Samples of jobs. The serial share of the first is below 0 (faster than it should be), that of the second above 1
    (slower on many ranks than on one); those of the others lie between 0.02 and 0.6."""
    dice, jobs = random.Random(case.seed), []
    for job in range(case["n_jobs"]):
        s = (dice.uniform(-0.3, -0.1), dice.uniform(1.2, 2.0), dice.uniform(0.02, 0.6))[min(job, 2)]
        speeds = [(n, 1 / (s + (1 - s) / n)) if s + (1 - s) / n > 0.02 else (n, 50.0) for n in case["sizes"]]
        noisy = [(n, x * (1 + case["noise"] * dice.uniform(-1, 1)) if n > 1 else 1.0) for n, x in speeds]
        dice.shuffle(noisy)
        jobs.append(noisy)
    return [(jobs,)]


def play(attempt: Any, group: Any, jobs: list[list[tuple[int, float]]]) -> Any:
    """The attempt's share for each job."""
    return [float(call_alone(attempt, group, job)) for job in jobs]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The shares from torch's least squares with one unknown."""
    shares = []
    for job in inputs[0][0]:
        n, x = torch.tensor(job, dtype=torch.float64).unbind(1)
        s = torch.linalg.lstsq((1 - 1 / n)[:, None], (1 / x - 1 / n)[:, None]).solution.item()
        shares.append(min(1.0, max(0.0, s)))
    return [shares]


PROBLEM = exercise(__name__, amdahl_fit, library="plan.pocket.scaling.fit_serial")
