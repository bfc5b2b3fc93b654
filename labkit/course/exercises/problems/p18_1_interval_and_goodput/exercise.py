"""18.1: Young's interval between checkpoints, and the share of the time that it leaves."""

import math
from collections.abc import Sequence

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_each, exercise


def interval_and_goodput(device_mtbf_s: float, n_devices: int, block_s: float, restart_s: float) -> tuple[float, float]:
    """(seconds between two checkpoints, share of the time that is useful training then).

    A device fails once in `device_mtbf_s` seconds on average, at random; the job stops whenever one of its devices
    fails. A checkpoint stops training for `block_s` seconds, a restart takes `restart_s`, and both can be hit by a
    failure, too. The interval T is Young's: the one at which block_s / T + T / (2 x mean time between failures of the
    job) is least. The share is exact for that interval: what was trained between two checkpoints counts once the second
    of them is complete."""
    mean = device_mtbf_s / n_devices
    interval = math.sqrt(2 * block_s * mean)
    stretch = mean * math.exp(restart_s / mean)
    saves = 1 / math.expm1((interval + block_s) / mean)
    return interval, interval * saves / stretch


def cases() -> Sequence[Case]:
    """Jobs on few and on many devices."""
    return [Case.of(1, n_jobs=30, most=20_000), Case.of(1, n_jobs=10, most=64)]


def inputs(case: Case) -> Inputs:
    """Jobs whose mean time between failures is 5 to 40 checkpoints long, so that no first order will do. In every fifth
    it is shorter than half a checkpoint, so that the interval lies between the two; the first job has one device."""
    dice, jobs = case.dice, []
    for number in range(case["n_jobs"]):
        n, block = dice.randint(2, case["most"]) if number else 1, dice.uniform(5, 100)
        mean = block * (dice.uniform(0.2, 0.45) if number % 5 == 4 else dice.uniform(5, 40))
        jobs.append((mean * n, n, block, mean * dice.uniform(0.1, 0.8)))
    return [(jobs,)]


def searched(device_mtbf_s: float, n: int, block_s: float, restart_s: float) -> list[float]:
    """The same by a search for the least cost, and a sum over saves one by one."""
    mean = device_mtbf_s / n
    low, high = 1e-9, 100 * mean
    for _ in range(300):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if block_s / left + left / (2 * mean) < block_s / right + right / (2 * mean):
            high = right
        else:
            low = left
    saves, k = 0.0, 1
    while (chance := math.exp(-k * (low + block_s) / mean)) > 1e-18:
        saves, k = saves + chance, k + 1
    # a restart is tried until no failure hits it: e^(R/M) - 1 failed tries of M seconds, all in all
    return [low, low * saves / (mean + mean * (math.exp(restart_s / mean) - 1))]


def answer(case: Case, inputs: Inputs) -> Answers:
    """Both numbers of each job."""
    return [[searched(*job) for job in inputs[0][0]]]


PROBLEM = exercise(__name__, interval_and_goodput, play=call_each, tolerance=(1e-5, 1e-7))
