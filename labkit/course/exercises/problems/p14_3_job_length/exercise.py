"""14.3: how long a job takes, from its flops."""

import math
import random
from fractions import Fraction

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_each, exercise
from labkit.plan.model.shape import ModelShape


def job_length(
    shape: ModelShape, batch_rows: int, n_tokens: float, n_devices: int, peak_flops: float, mfu: float
) -> tuple[float, float, float]:
    """(seconds of a step, days, device hours) of a job that reads at least n_tokens tokens.

    A step reads batch_rows sequences of shape.seq tokens on all devices together, and steps are whole. A token needs 6
    flops for each of shape.n_params parameters, and 12 x n_layer x d_model x seq of attention. n_devices, each with a
    peak of peak_flops a second, reach the share mfu of that; checkpointing is in mfu already. A day has 86,400
    seconds."""
    token = 6 * shape.n_params + 12 * shape.n_layer * shape.d_model * shape.seq
    step_s = token * batch_rows * shape.seq / (n_devices * peak_flops * mfu)
    seconds = step_s * math.ceil(n_tokens / (batch_rows * shape.seq))
    return step_s, seconds / 86400, seconds / 3600 * n_devices


def cases() -> list[Case]:
    """Models of the size of 70B, and short jobs in which the last step counts."""
    return [Case.of(1, n_jobs=16, steps=(3, 40)), Case.of(1, n_jobs=16, steps=(10_000, 1_000_000))]


def inputs(case: Case) -> Inputs:
    """Jobs of various models and lengths of sequences. Every fourth job has tokens for a whole number of steps."""
    dice, jobs = random.Random(case.seed), []
    for job in range(case["n_jobs"]):
        d = 128 * dice.randint(16, 64)
        shape = ModelShape.gpt(dice.randint(24, 96), d, 16, 32000, 1024 * dice.randint(1, 32), tied=dice.random() < 0.5)
        rows = dice.randint(64, 2048)
        steps = dice.randint(*case["steps"]) if job % 4 == 0 else dice.uniform(*case["steps"])
        n_tokens = float(round(rows * shape.seq * steps))
        jobs.append((shape, rows, n_tokens, 8 * dice.randint(1, 256), dice.uniform(1e14, 1e15), dice.uniform(0.2, 0.6)))
    return [(jobs,)]


def estimated(shape: ModelShape, rows: int, n_tokens: float, n: int, peak: float, mfu: float) -> list[float]:
    """The length of a job in exact fractions, from matrix products: forward, and twice as many flops backward."""
    weights = Fraction(2 * shape.n_params)
    scores = Fraction(2 * 2 * shape.n_layer * shape.n_head * shape.width * shape.seq)  # with keys, then with values
    done = Fraction(peak) * Fraction(mfu)  # of a device in a second
    device_s = 3 * (weights + scores) * rows * shape.seq / done
    steps = -(-Fraction(n_tokens) // (rows * shape.seq))
    return [float(device_s / n), float(steps * device_s / n / 86400), float(steps * device_s / 3600)]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The length of each job, from the matrix products of a layer."""
    return [[estimated(*job) for job in inputs[0][0]]]


PROBLEM = exercise(__name__, job_length, play=call_each, imports=("ModelShape",))
