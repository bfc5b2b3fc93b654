"""13.3: efficiency and MFU of runs, whether the batch grew with the ranks or not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from labkit.course.exercises.problem import Mutant, Problem, call_each
from labkit.course.judge.case import Case


def scaling_report(runs: list[tuple[int, int, float]], n_params: float, peak_flops: float) -> list[tuple[float, float]]:
    """(efficiency, MFU) of each run (n_ranks, tokens of a step on all ranks together, seconds of a step), as given.

    Efficiency: tokens a second and rank, over those of the run with the fewest ranks, wherever it stands and however
    many it has. In some runs the batch stayed, in others it grew. MFU: flops that the model needs, 6 for each parameter
    and token, over what all ranks could do in that time at `peak_flops` a second each."""
    rates = [tokens / seconds / n for n, tokens, seconds in runs]
    first = min(zip(runs, rates, strict=True))[1]
    return [(rate / first, 6 * n_params * rate / peak_flops) for rate in rates]


def cases() -> Sequence[Case]:
    """Runs of both kinds; the smallest has one rank, or eight."""
    return [Case.of(1, n_jobs=8, least=8), Case.of(1, n_jobs=8, least=1)]


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """Jobs of 3 to 6 runs: batch and seconds of each are drawn, and their order."""
    dice, jobs = random.Random(case.seed), []
    for _ in range(case["n_jobs"]):
        n_params, peak = dice.uniform(1e8, 7e10), dice.uniform(1e14, 1e15)
        sizes = [case["least"] * 2**k for k in dice.sample(range(1, 8), dice.randint(2, 5))] + [case["least"]]
        dice.shuffle(sizes)
        runs = []
        for n in sizes:
            tokens = dice.choice((1 << 19, n << 15))
            runs.append((n, tokens, 6 * n_params * tokens / (n * peak * dice.uniform(0.1, 0.6))))
        jobs.append((runs, n_params, peak))
    return [(jobs,)]


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """In exact fractions, from the other end: seconds of a rank for each token."""
    found = []
    for runs, n_params, peak in given[0][0]:
        rank_s = {n: Fraction(seconds) * n / tokens for n, tokens, seconds in runs}  # of a token
        ideal_s = 6 * Fraction(n_params) / Fraction(peak)
        base = rank_s[min(rank_s)]
        found.append([[float(base / rank_s[n]), float(ideal_s / rank_s[n])] for n, _, _ in runs])
    return [found]


PROBLEM = Problem(
    key="13.3",
    title="Efficiency, strong and weak, and MFU",
    story="""
A slide says that the job runs at 96% efficiency on 512 devices. Against what? If the batch stayed, that is
remarkable; if it grew along, less so; and if the eight devices it began with ran at a tenth of their peak, it is 96% of
very little. Tokens a second and device settle the first two questions at once. MFU settles the third.
""",
    objectives=("one efficiency for strong and weak scaling", "MFU from tokens a second"),
    difficulty=2,
    importance=5,
    minutes=10,
    reference=scaling_report,
    cases=cases,
    inputs=inputs,
    play=call_each,
    answer=answer,
    hints=(
        "Seconds of a step depend on the batch. Tokens a second and rank do not care why the batch is what it is.",
        "rate = tokens / seconds / n for each run; the base: that of the smallest n; MFU = 6 N rate / peak.",
        "rates = [...]; base = the rate that belongs to min(runs); return [(rate / base, ...) for rate in rates]",
    ),
    mutants=(
        Mutant("seconds of steps are compared, as if the batch had never changed", "values",
               (("rate / first, 6", "min(runs)[2] * min(runs)[0] / (n * seconds), 6"),
                ("for rate in rates]", "for rate, (n, _, seconds) in zip(rates, runs)]"))),
        Mutant("the batch is taken to grow with the ranks, always: seconds of the first over seconds", "values",
               (("rate / first, 6", "min(runs)[2] / seconds, 6"),
                ("for rate in rates]", "for rate, (n, _, seconds) in zip(rates, runs)]"))),
        Mutant("the base is the run that stands first, which need not be the smallest", "values",
               (("min(zip(runs, rates, strict=True))[1]", "rates[0]"),)),
        Mutant("the smallest run is taken for one of a single rank", "values",
               (("min(zip(runs, rates, strict=True))[1]",
                 "min(zip(runs, rates, strict=True))[1] * min(n for n, _, _ in runs)"),)),
        Mutant("the forward pass alone is counted, 2 flops for each parameter and token", "values",
               (("6 * n_params", "2 * n_params"),)),
        Mutant("flops of the whole job are held against the peak of one rank", "values",
               (("6 * n_params * rate / peak_flops", "6 * n_params * rate * n / peak_flops"),
                ("for rate in rates]", "for rate, (n, _, _) in zip(rates, runs)]"))),
        Mutant("this is the speed-up: it is not divided by the ranks", "values",
               (("rate / first, 6", "rate * n / (first * min(runs)[0]), 6"),
                ("for rate in rates]", "for rate, (n, _, _) in zip(rates, runs)]"))),
    ),
)  # fmt: skip
