"""15.2: a test that ranks hold the same weights, from their fingerprints."""

import random

import torch
from torch import Tensor

from labkit.course.exercises.exercise import Case, exercise
from labkit.course.exercises.learner_tests import told_apart

STEPS, SIZES = 12, (4.0, 900.0, 2e-7, 30.0, 1.0)


def in_sync(prints: Tensor) -> bool:
    """True if all ranks held the same weights after every step.   prints [n_steps, n_ranks, n_tensors] -> True or False

    A fingerprint is one number for each tensor, a weighted sum of its elements, which may be negative. Sums in another
    order differ in their last digits, so at a step and for a tensor the ranks agree if no two of them are further
    apart than 1e-5 times the largest absolute value that a rank has there. What is nan or infinite agrees with
    nothing, not even on all ranks."""
    apart = prints.amax(1) - prints.amin(1)
    return bool((apart <= 1e-5 * prints.abs().amax(1)).all() and prints.isfinite().all())


def cases() -> list[Case]:
    """Four ranks, two, and many."""
    return [Case.of(1, torch.float64, ranks=4), Case.of(1, torch.float64, ranks=2), Case.of(1, torch.float64, ranks=8)]


def healthy(case: Case, key: int, noise: float) -> Tensor:
    """Fingerprints that change slowly from step to step and are the same on all ranks, but for relative `noise`."""
    n = case["ranks"]
    path = 1 + 0.02 * case.random(STEPS, 1, len(SIZES), key=key).cumsum(0)
    own = 1 + noise * (2 * torch.rand(STEPS, n, len(SIZES), generator=_seeded(case, key), dtype=path.dtype) - 1)
    return path.abs() * torch.tensor(SIZES, dtype=path.dtype) * own


def _seeded(case: Case, key: int) -> torch.Generator:
    return torch.Generator().manual_seed(case.seed % 2**40 + key)


def spread(dice: random.Random, n: int) -> dict[str, Tensor]:
    """Name -> the deviations of the ranks, of which the two farthest are 1 apart.   [n_ranks] each"""
    two = torch.zeros(n, dtype=torch.float64)
    two[dice.sample(range(n > 2, n), 2)] = torch.tensor([0.5, -0.5], dtype=torch.float64)
    return {
        "two ranks, on either side of the others": two,
        "each is near to its neighbours": 1 - (2 * torch.arange(n, dtype=torch.float64) / n - 1).abs(),
        "two halves": (torch.arange(n, dtype=torch.float64) >= n / 2).double(),
    }


def shown(case: Case) -> dict[str, tuple[bool, Tensor]]:
    """Name -> (True if the job is in sync, its fingerprints)."""
    dice, n = random.Random(case.seed), case["ranks"]
    right = {name: healthy(case, key, noise) for key, (name, noise) in enumerate((
        ("bit by bit the same", 0.0), ("rounding noise", 2e-7), ("more rounding noise", 3e-6)))}  # fmt: skip
    right["a tensor that is zero on all ranks"] = healthy(case, 10, 2e-7)
    right["a tensor that is zero on all ranks"][:, :, 2] = 0
    right["one rank alone"] = healthy(case, 11, 2e-7)[:, :1]
    right["weights that grow a thousandfold, alike"] = (
        healthy(case, 12, 2e-7) * 1.8 ** torch.arange(STEPS)[:, None, None]
    )
    right["negative on all ranks"] = -healthy(case, 13, 3e-6)
    wrong = {name: healthy(case, 20 + key, 2e-7) for key, name in enumerate((
        "every rank has its own seed", "buffers: one tensor of its own on each rank", "the last rank skipped a step",
        "rank 0 skipped a step", "apart for three steps, then broadcast again", "ranks drift apart, slowly",
        "one small tensor of one rank is off by a percent", "nan on one rank", "infinite on all ranks",
        "nan on all ranks", "two tensors off, with the same sum", "apart in the last step only",
        "apart before the first step only", "a sign: one rank has a negative number"))}  # fmt: skip
    one, since = dice.randrange(1, n), dice.randrange(3, STEPS - 3)
    wrong["every rank has its own seed"] *= 1 + 0.1 * case.random(1, n, len(SIZES), key=50)
    wrong["buffers: one tensor of its own on each rank"][:, :, 3] *= 1 + 0.01 * case.random(1, n, key=51)
    wrong["the last rank skipped a step"][since:, -1] *= 1.002
    wrong["rank 0 skipped a step"][since:, 0] *= 0.998
    wrong["apart for three steps, then broadcast again"][since : since + 3, one] *= 1.01
    wrong["ranks drift apart, slowly"] *= 1 + 2e-4 * torch.arange(STEPS)[:, None, None] * torch.arange(n)[None, :, None]
    wrong["one small tensor of one rank is off by a percent"][since:, one, 2] *= 1.01
    wrong["nan on one rank"][since:, one, 1] = torch.nan
    wrong["infinite on all ranks"][since:, :, 1] = torch.inf
    wrong["nan on all ranks"][since:, :, 4] = torch.nan
    wrong["two tensors off, with the same sum"][since:, one, 0] += 0.1
    wrong["two tensors off, with the same sum"][since:, one, 1] -= 0.1
    wrong["apart in the last step only"][-1, one] *= 1.01
    wrong["apart before the first step only"][0, one] *= 1.01
    wrong["a sign: one rank has a negative number"][since:, one, 0] *= -1
    for key, (form, away) in enumerate(spread(dice, n).items()):
        step, tensor = dice.randrange(STEPS), dice.randrange(len(SIZES))
        right[f"near enough: {form}"] = healthy(case, 60 + key, 0.0) * (1 + 8e-6 * away[None, :, None])
        wrong[f"too far: {form}"] = healthy(case, 70 + key, 0.0)
        wrong[f"too far: {form}"][step, :, tensor] *= 1 + 1.5e-5 * away
    wrong["one rank is off by three hundred-thousandths"] = healthy(case, 80, 0.0)
    wrong["one rank is off by three hundred-thousandths"][since, one] *= 1 + 3e-5
    return {name: (name in right, x) for name, x in {**right, **wrong}.items()}


PROBLEM = exercise(__name__, in_sync, **told_apart(shown))
