"""01.2: alpha and beta from times that somebody has disturbed."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from labkit.comm.group import Group
from labkit.course.exercises.problem import Mutant, Problem
from labkit.course.judge.case import Case


def fit_alpha_beta(samples: list[tuple[int, float]]) -> tuple[float, float]:
    """The line t(b) = alpha + b beta through measured messages: (seconds, seconds a byte).

    `samples` are (bytes, seconds), several of each size, in any order; some took far too long since somebody else had
    the machine. Two or more sizes are there.

    First put the median in place of the times of a size: one point (b, t) for each size (for an even number of times
    the mean of the two in the middle). Then choose the line that makes the sum over the points of
    ((alpha + b beta - t) / t)^2 smallest: *relative* errors, so that 64 bytes count as much as 4 MiB."""
    sizes = sorted({size for size, _ in samples})
    points = [(b, statistics.median(t for size, t in samples if size == b)) for b in sizes]
    s1 = sum(1 / t**2 for _, t in points)
    sb = sum(b / t**2 for b, t in points)
    st = sum(1 / t for _, t in points)
    sbb = sum(b * b / t**2 for b, t in points)
    sbt = sum(b / t for b, t in points)
    beta = (s1 * sbt - sb * st) / (s1 * sbb - sb * sb)
    return (st - beta * sb) / s1, beta


def cases() -> Sequence[Case]:
    """Links from slow to fast."""
    return [Case.of(1, repeats=6, sizes=7), Case.of(1, repeats=9, sizes=5), Case.of(1, repeats=1, sizes=2)]


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """Messages over a link that the judge draws: each time a bit of noise, and now and then an outlier."""
    drawn = random.Random(case.seed)
    alpha, beta = 10 ** drawn.uniform(-5.5, -4), 10 ** drawn.uniform(-10.5, -9)
    samples: list[tuple[int, float]] = []
    for _ in range(case["sizes"]):
        n_bytes = int(2 ** drawn.uniform(7, 23)) if samples else 64
        for number in range(case["repeats"]):
            disturbed = drawn.uniform(3, 40) if case["repeats"] > 2 and number < case["repeats"] // 3 else 1.0
            samples.append((n_bytes, (alpha + n_bytes * beta) * drawn.uniform(1.0, 1.15) * disturbed))
    drawn.shuffle(samples)
    return [(samples,)]


def play(attempt: Any, group: Group, samples: list[tuple[int, float]]) -> Any:
    """In units in which both numbers are neither huge nor tiny."""
    alpha, beta = attempt(list(samples))
    return {"alpha in us": float(alpha) * 1e6, "beta in ps a byte": float(beta) * 1e12}


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """By torch's least squares on scaled columns."""
    (samples,) = given[0]
    by_size: dict[int, list[float]] = {}
    for n_bytes, seconds in samples:
        by_size.setdefault(n_bytes, []).append(seconds)
    b = torch.tensor([float(each) for each in by_size], dtype=torch.float64)
    t = torch.stack([torch.quantile(torch.tensor(each, dtype=torch.float64), 0.5) for each in by_size.values()])
    columns = torch.stack([1e-6 / t, 1e-12 * b / t], 1)
    scale = columns.norm(dim=0)
    alpha, beta = (
        torch.linalg.lstsq(columns / scale, torch.ones_like(t)[:, None], driver="gelsd").solution[:, 0] / scale
    )
    return [{"alpha in us": float(alpha), "beta in ps a byte": float(beta)}]


MEDIAN = "statistics.median(t for size, t in samples if size == b)"

PROBLEM = Problem(
    key="01.2",
    title="Fit alpha and beta",
    story="""
A message of b bytes takes alpha + b beta seconds: alpha is the start, 1/beta the bandwidth. You have measured a few
hundred. A third of them were disturbed, and the largest take a thousand times as long as the smallest: least squares as
in the school book hears the largest only, and gives an alpha that may even be negative.
""",
    objectives=("a median against outliers", "relative errors, for numbers of many sizes"),
    difficulty=2,
    importance=3,
    minutes=20,
    reference=fit_alpha_beta,
    cases=cases,
    inputs=inputs,
    play=play,
    answer=answer,
    tolerance=(1e-5, 1e-9),
    hints=(
        "Divided by t, each point asks for alpha (1/t) + beta (b/t) = 1: an ordinary least-squares problem.",
        "One row (1/t, b/t) for each size, t its median, in float64. Solve by the normal equations, or scale the "
        "columns and use `torch.linalg.lstsq`.",
        "s1 = sum 1/t^2, sb = sum b/t^2, st = sum 1/t, sbb = sum b^2/t^2, sbt = sum b/t; then s1 alpha + sb beta = st "
        "and sb alpha + sbb beta = sbt",
    ),
    mutants=(
        Mutant("the mean of the times of a size is taken, which the outliers move", "values",
               ((MEDIAN, "statistics.mean(t for size, t in samples if size == b)"),)),
        Mutant("the fastest time of a size is taken", "values",
               ((MEDIAN, "min(t for size, t in samples if size == b)"),)),
        Mutant("every sample is a point: outliers bend the line", "values", (
            (f"[(b, {MEDIAN}) for b in sizes]", "list(samples)"),)),
        Mutant("errors are absolute: only the largest messages count", "values", instead="""
            import statistics

            def fit_alpha_beta(samples):
                sizes = sorted({size for size, _ in samples})
                times = [statistics.median(t for size, t in samples if size == b) for b in sizes]
                line = statistics.linear_regression(sizes, times)
                return line.intercept, line.slope
        """),
        Mutant("errors are divided by t once too seldom: weights are 1/t and not 1/t^2", "values", (
            ("sum(1 / t**2 for", "sum(1 / t for"), ("sum(b / t**2 for", "sum(b / t for"),
            ("sum(1 / t for _, t in points)\n    sbb", "sum(1 for _, t in points)\n    sbb"),
            ("sum(b * b / t**2", "sum(b * b / t"), ("sbt = sum(b / t for", "sbt = sum(b for"))),
        Mutant("the bandwidth is given, and beta is one over it", "values",
               (("/ s1, beta", "/ s1, 1 / beta"),)),
        Mutant("alpha is the time of the smallest message, bytes and all", "values",
               (("return (st - beta * sb) / s1, beta", "return points[0][1], beta"),)),
        Mutant("the line goes through zero: there is no alpha", "values",
               (("return (st - beta * sb) / s1, beta", "return 0.0, sbt / sbb"),)),
    ),
)  # fmt: skip
