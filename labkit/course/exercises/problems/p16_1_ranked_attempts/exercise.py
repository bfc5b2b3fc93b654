"""16.1: scores of attempts, by the rules of the referee."""

import random
from typing import Any

import torch
from torch import Tensor

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_each, exercise


def ranked_attempts(
    attempts: dict[str, tuple[Tensor, Tensor]], cap_bytes: int, n_warm: int
) -> tuple[list[tuple[str, float]], list[str]]:
    """(name, score) of the attempts that count, the best first; and the names of the others, in order of the alphabet.

    An attempt is (seconds [n_steps, n_ranks], bytes [n_steps, n_ranks]): how long each step took on each rank, and the
    highest bytes of each rank in each step. Score: time x memory, less is better. The time of a step is that of its
    slowest rank; the first n_warm steps do not count for time; of the others the median, the mean of the middle two if
    there are two. Memory: the highest bytes of any rank in any step, warm-up too. An attempt counts if no rank was ever
    above the cap, and if it has finished: the steps of a rank after it broke down are nan."""
    scores, refused = [], []
    for name, (seconds, peaks) in attempts.items():
        memory = peaks.max().item()
        if memory > cap_bytes or seconds.isnan().any():
            refused.append(name)
        else:
            times = seconds[n_warm:].amax(1)
            scores.append((name, times.quantile(0.5).item() * memory))
    return sorted(scores, key=lambda entry: entry[1]), sorted(refused)


def cases() -> list[Case]:
    """Boards of attempts."""
    return [Case.of(1, torch.float64, n_boards=3, ranks=4), Case.of(1, torch.float64, n_boards=4, ranks=2)]


def inputs(case: Case) -> Inputs:
    """Boards of attempts with noise, outliers, slow first steps and ranks that differ. Some attempts are over the cap,
    and some break down. One board has no warm-up, and on the last no attempt counts."""
    dice, boards = random.Random(case.seed), []
    for board in range(case["n_boards"]):
        cap, names = dice.randint(8, 20) * 10**6, [f"way {k}" for k in range(10)]
        n_warm = 0 if board == 1 else dice.randint(1, 3)
        dice.shuffle(names)
        attempts = {}
        for k, name in enumerate(names):
            shape = (n_warm + dice.randint(4, 9), case["ranks"])
            seconds = dice.uniform(0.2, 1) * (1 + 0.3 * case.random(*shape, key=20 * board + k).abs())
            seconds[:n_warm] *= 4
            seconds[dice.randrange(n_warm, shape[0])] *= dice.uniform(3, 9)  # the machine did something else
            peaks = (
                cap * dice.uniform(0.3, 0.7) * (1 + 0.1 * case.random(*shape, key=20 * board + k + 10).tanh().abs())
            ).round()
            if k in (2, 5):
                peaks[dice.randrange(n_warm, shape[0]), dice.randrange(case["ranks"])] = cap + dice.randint(1, 9)
            elif k == 3:
                peaks[0, -1] = cap + 1.0
            elif k == 4:
                peaks[-1, 0] = cap
            elif k == 6:
                peaks[0, 0] = 0.95 * cap
            elif k == 7:
                seconds[dice.randrange(1, shape[0]) :, dice.randrange(case["ranks"])] = torch.nan
            attempts[name] = (seconds, peaks)
        boards.append((attempts, 1 if board == 3 else cap, n_warm))
    return [(boards,)]


def ranked(attempts: dict[str, tuple[Tensor, Tensor]], cap: int, n_warm: int) -> list[Any]:
    """The ranking in plain Python, number by number."""
    good, bad = [], []
    for name, (seconds, peaks) in attempts.items():
        times, held = seconds.tolist(), [n for step in peaks.tolist() for n in step]
        if any(t != t for step in times for t in step) or any(n > cap for n in held):
            bad.append(name)
            continue
        slowest = sorted(max(step) for step in times[n_warm:])
        k = len(slowest) // 2
        middle = slowest[k] if len(slowest) % 2 else (slowest[k - 1] + slowest[k]) / 2
        good.append([middle * max(held), name])
    return [[[name, score] for score, name in sorted(good)], sorted(bad)]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The ranking of each board, in plain Python."""
    return [[ranked(*board) for board in inputs[0][0]]]


PROBLEM = exercise(__name__, ranked_attempts, play=call_each, may=("tolist",))
