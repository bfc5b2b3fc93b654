"""01.2: alpha and beta from times that somebody has disturbed."""

import random
import statistics
from typing import Any

import torch

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise


def fit_alpha_beta(samples: list[tuple[int, float]]) -> tuple[float, float]:
    """The line t(S) = alpha + S beta through measured messages: (seconds, seconds a byte).

    `samples` are (bytes, seconds), several of each size, in any order; some took far too long since somebody else had
    the machine. There are two or more sizes.

    First put the median in place of the times of a size: one point (S, t) for each size (for an even number of times
    the mean of the two in the middle). Then choose the line that makes the sum over the points of
    ((alpha + S beta - t) / t)^2 smallest: *relative* errors, so that 64 bytes count as much as 4 MiB."""
    sizes = sorted({size for size, _ in samples})
    points = [(b, statistics.median(t for size, t in samples if size == b)) for b in sizes]
    s1 = sum(1 / t**2 for _, t in points)
    sb = sum(b / t**2 for b, t in points)
    st = sum(1 / t for _, t in points)
    sbb = sum(b * b / t**2 for b, t in points)
    sbt = sum(b / t for b, t in points)
    beta = (s1 * sbt - sb * st) / (s1 * sbb - sb * sb)
    return (st - beta * sb) / s1, beta


def cases() -> list[Case]:
    """Sizes that are measured `repeats` times, every second one once more; and each size once."""
    return [Case.of(1, repeats=6, sizes=7), Case.of(1, repeats=9, sizes=5), Case.of(1, repeats=1, sizes=2)]


def inputs(case: Case) -> Inputs:
    """Messages over a link that the judge draws: each time a bit of noise, and now and then an outlier."""
    drawn = random.Random(case.seed)
    alpha, beta = 10 ** drawn.uniform(-5.5, -4), 10 ** drawn.uniform(-10.5, -9)
    samples: list[tuple[int, float]] = []
    for place in range(case["sizes"]):
        n_bytes = int(2 ** drawn.uniform(7, 23)) if samples else 64
        for number in range(case["repeats"] + (place % 2 if case["repeats"] > 1 else 0)):
            disturbed = drawn.uniform(3, 40) if case["repeats"] > 2 and number < case["repeats"] // 3 else 1.0
            samples.append((n_bytes, (alpha + n_bytes * beta) * drawn.uniform(1.0, 1.15) * disturbed))
    drawn.shuffle(samples)
    return [(samples,)]


def play(attempt: Any, group: Group, samples: list[tuple[int, float]]) -> Any:
    """The attempt's alpha and beta, in units in which neither number is huge or tiny."""
    alpha, beta = attempt(list(samples))
    return {"alpha in us": float(alpha) * 1e6, "beta in ps a byte": float(beta) * 1e12}


def answer(case: Case, inputs: Inputs) -> Answers:
    """Alpha and beta from torch's least squares on scaled columns."""
    (samples,) = inputs[0]
    by_size: dict[int, list[float]] = {}
    for n_bytes, seconds in samples:
        by_size.setdefault(n_bytes, []).append(seconds)
    b = torch.tensor([float(n_bytes) for n_bytes in by_size], dtype=torch.float64)
    t = torch.stack([torch.quantile(torch.tensor(times, dtype=torch.float64), 0.5) for times in by_size.values()])
    columns = torch.stack([1e-6 / t, 1e-12 * b / t], 1)
    scale = columns.norm(dim=0)
    alpha, beta = (
        torch.linalg.lstsq(columns / scale, torch.ones_like(t)[:, None], driver="gelsd").solution[:, 0] / scale
    )
    return [{"alpha in us": float(alpha), "beta in ps a byte": float(beta)}]


PROBLEM = exercise(__name__, fit_alpha_beta, tolerance=(1e-5, 1e-9))
