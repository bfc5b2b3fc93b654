"""13.3: efficiency and MFU of runs, whether the batch grew with the ranks or not."""

import random
from fractions import Fraction

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_each, exercise


def scaling_report(runs: list[tuple[int, int, float]], n_params: float, peak_flops: float) -> list[tuple[float, float]]:
    """(efficiency, MFU) of each run (n_ranks, tokens of a step on all ranks together, seconds of a step), as given.

    Efficiency: tokens a second and rank, over those of the run with the fewest ranks, wherever it stands and however
    many it has. In some runs the batch stayed, in others it grew. MFU: flops that the model needs, 6 for each parameter
    and token, over what all ranks could do in that time at `peak_flops` a second each."""
    rates = [tokens / seconds / n for n, tokens, seconds in runs]
    first = min(zip(runs, rates, strict=True))[1]
    return [(rate / first, 6 * n_params * rate / peak_flops) for rate in rates]


def cases() -> list[Case]:
    """Runs of both kinds; the smallest has one rank, or eight."""
    return [Case.of(1, n_jobs=8, least=8), Case.of(1, n_jobs=8, least=1)]


def inputs(case: Case) -> Inputs:
    """Jobs of 4 to 7 runs in random order, with random batches and seconds. Two runs of each have equally many ranks,
    but not the fewest."""
    dice, jobs = random.Random(case.seed), []
    for _ in range(case["n_jobs"]):
        n_params, peak = dice.uniform(1e8, 7e10), dice.uniform(1e14, 1e15)
        larger = [case["least"] * 2**k for k in dice.sample(range(1, 8), dice.randint(2, 5))]
        sizes = [*larger, larger[0], case["least"]]
        dice.shuffle(sizes)
        runs = []
        for n in sizes:
            tokens = dice.choice((1 << 19, n << 15))
            runs.append((n, tokens, 6 * n_params * tokens / (n * peak * dice.uniform(0.1, 0.6))))
        jobs.append((runs, n_params, peak))
    return [(jobs,)]


def answer(case: Case, inputs: Inputs) -> Answers:
    """Efficiency and MFU in exact fractions, from the seconds that a rank takes for a token."""
    reports = []
    for runs, n_params, peak in inputs[0][0]:
        rank_s = [(n, Fraction(seconds) * n / tokens) for n, tokens, seconds in runs]  # of a token
        ideal_s = 6 * Fraction(n_params) / Fraction(peak)
        _, base = min(rank_s)
        reports.append([[float(base / cost), float(ideal_s / cost)] for _, cost in rank_s])
    return [reports]


PROBLEM = exercise(__name__, scaling_report, play=call_each)
