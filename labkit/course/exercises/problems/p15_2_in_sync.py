"""15.2: a test that ranks hold the same weights, from their fingerprints."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.course.exercises.learner_tests import told_apart
from labkit.course.exercises.problem import Mutant, Problem
from labkit.course.judge.case import Case

STEPS, SIZES = 12, (4.0, 900.0, 0.02, 30.0, 1.0)


def in_sync(prints: Tensor) -> bool:
    """Whether all ranks held the same weights after every step.   prints [n_steps, n_ranks, n_tensors] -> True or False

    A fingerprint is one number for each tensor, a weighted sum of its elements, which may be negative. Sums in another
    order differ in their last digits, so at a step and for a tensor the ranks agree if no two of them are further
    apart than 1e-5 times the largest absolute value that a rank has there. What is nan or infinite agrees with
    nothing, not even on all ranks."""
    apart = prints.amax(1) - prints.amin(1)
    return bool((apart <= 1e-5 * prints.abs().amax(1)).all() and prints.isfinite().all())


def cases() -> Sequence[Case]:
    """Four ranks, two, and many."""
    return [Case.of(1, torch.float64, ranks=4), Case.of(1, torch.float64, ranks=2), Case.of(1, torch.float64, ranks=8)]


def healthy(case: Case, key: int, noise: float) -> Tensor:
    """Sums over tensors of different sizes that change slowly, the same on all ranks but for `noise`."""
    n = case["ranks"]
    path = 1 + 0.02 * case.random(STEPS, 1, len(SIZES), key=key).cumsum(0)
    own = 1 + noise * (2 * torch.rand(STEPS, n, len(SIZES), generator=_seeded(case, key), dtype=path.dtype) - 1)
    return path.abs() * torch.tensor(SIZES, dtype=path.dtype) * own


def _seeded(case: Case, key: int) -> torch.Generator:
    return torch.Generator().manual_seed(case.seed % 2**40 + key)


def spread(dice: random.Random, n: int) -> dict[str, Tensor]:
    """Places of ranks on a line by what they look like; the two farthest are 1 apart.   [n_ranks] each"""
    two = torch.zeros(n, dtype=torch.float64)
    two[dice.sample(range(n > 2, n), 2)] = torch.tensor([0.5, -0.5], dtype=torch.float64)
    return {
        "two ranks, on either side of the others": two,
        "each is near to its neighbours": 1 - (2 * torch.arange(n, dtype=torch.float64) / n - 1).abs(),
        "two halves": (torch.arange(n, dtype=torch.float64) >= n / 2).double(),
    }


def shown(case: Case) -> dict[str, tuple[bool, Tensor]]:
    """Jobs by name: whether they are in sync, and their fingerprints."""
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
    one, some = dice.randrange(1, n), dice.randrange(3, STEPS - 3)
    wrong["every rank has its own seed"] *= 1 + 0.1 * case.random(1, n, len(SIZES), key=50)
    wrong["buffers: one tensor of its own on each rank"][:, :, 3] *= 1 + 0.01 * case.random(1, n, key=51)
    wrong["the last rank skipped a step"][some:, -1] *= 1.002
    wrong["rank 0 skipped a step"][some:, 0] *= 0.998
    wrong["apart for three steps, then broadcast again"][some : some + 3, one] *= 1.01
    wrong["ranks drift apart, slowly"] *= 1 + 2e-4 * torch.arange(STEPS)[:, None, None] * torch.arange(n)[None, :, None]
    wrong["one small tensor of one rank is off by a percent"][some:, one, 2] *= 1.01
    wrong["nan on one rank"][some:, one, 1] = torch.nan
    wrong["infinite on all ranks"][some:, :, 1] = torch.inf
    wrong["nan on all ranks"][some:, :, 4] = torch.nan
    wrong["two tensors off, with the same sum"][some:, one, 0] += 0.1
    wrong["two tensors off, with the same sum"][some:, one, 1] -= 0.1
    wrong["apart in the last step only"][-1, one] *= 1.01
    wrong["apart before the first step only"][0, one] *= 1.01
    wrong["a sign: one rank has a negative number"][some:, one, 0] *= -1
    for key, (form, away) in enumerate(spread(dice, n).items()):
        step, tensor = dice.randrange(STEPS), dice.randrange(len(SIZES))
        right[f"near enough: {form}"] = healthy(case, 60 + key, 0.0) * (1 + 8e-6 * away[None, :, None])
        wrong[f"too far: {form}"] = healthy(case, 70 + key, 0.0)
        wrong[f"too far: {form}"][step, :, tensor] *= 1 + 1.5e-5 * away
    wrong["one rank is off by three hundred-thousandths"] = healthy(case, 80, 0.0)
    wrong["one rank is off by three hundred-thousandths"][some, one] *= 1 + 3e-5
    return {name: (name in right, x) for name, x in {**right, **wrong}.items()}


PROBLEM = Problem(
    key="15.2",
    title="Write the test that catches ranks that disagree",
    story="""
All losses fall, all curves look healthy, and the checkpoint of rank 3 is another model. One rank has skipped one step;
nothing raised. Jobs that cannot afford this gather a checksum of all weights every hundred steps. Write the test that
reads it. A test that cries at the last digit is switched off after a day; one that looks at rank 1 only finds half.
""",
    objectives=("compare all ranks, all tensors, all steps", "a tolerance that is derived, not exact equality"),
    difficulty=2,
    importance=5,
    minutes=15,
    reference=in_sync,
    cases=cases,
    **told_apart(shown),
    hints=(
        "The two ranks farthest apart have the largest and the smallest number: their distance says it all.",
        "`prints.amax(1)` and `.amin(1)` are [n_steps, n_tensors]; hold their difference against `abs().amax(1)`.",
        "apart = amax(1) - amin(1); ok = apart <= 1e-5 * prints.abs().amax(1); all ok, and all finite",
    ),
    mutants=(
        Mutant("the test says yes to everything", "values",
               instead="def in_sync(prints):\n    return prints is not None\n"),
        Mutant("only the last step is looked at: ranks that met again are not found", "values",
               (("apart = prints", "prints = prints[-1:]; apart = prints"),)),
        Mutant("only the first step is looked at", "values",
               (("apart = prints", "prints = prints[:1]; apart = prints"),)),
        Mutant("rank 0 and rank 1 are compared, and no others", "values",
               (("apart = prints", "prints = prints[:, :2]; apart = prints"),)),
        Mutant("tensors are added up first: a small one is lost beside a large one", "values",
               (("apart = prints", "prints = prints.sum(2, keepdim=True); apart = prints"),)),
        Mutant("ranks must be equal to the last bit: rounding noise is taken for a fault", "values",
               (("apart <= 1e-5 * prints.abs().amax(1)", "apart == 0"),)),
        Mutant("the tolerance does not grow with the numbers: large tensors fail, small ones always pass", "values",
               (("1e-5 * prints.abs().amax(1)", "1e-3"),)),
        Mutant("what is nan or infinite slips through: no comparison with it is ever true", "values",
               (("bool((apart <= 1e-5 * prints.abs().amax(1)).all() and prints.isfinite().all())",
                 "not bool((apart > 1e-5 * prints.abs().amax(1)).any())"),)),
        Mutant("ranks are held against rank 0 only: two others, one on either side of it, may be too far apart",
               "values", (("prints.amax(1) - prints.amin(1)", "(prints - prints[:, :1]).abs().amax(1)"),)),
        Mutant("each rank is held against its neighbour only: over many small differences the ends are far apart",
               "values", (("prints.amax(1) - prints.amin(1)", "(prints - prints.roll(1, 1)).abs().amax(1)"),)),
        Mutant("ranks are held against their mean: two on either side of it may be too far apart", "values",
               (("prints.amax(1) - prints.amin(1)", "(prints - prints.mean(1, keepdim=True)).abs().amax(1)"),)),
        Mutant("the tolerance takes signs as they are: where all numbers are negative, nothing is within it", "values",
               (("prints.abs().amax(1)).all()", "prints.amax(1)).all()"),)),
        Mutant("the tolerance is wider than 1e-5: ranks that have just begun to part are not found", "values",
               (("1e-5 * prints", "1e-4 * prints"),)),
        Mutant("the tolerance is too wide: a skipped step changes weights by a thousandth", "values",
               (("1e-5 * prints", "1e-2 * prints"),)),
    ),
)  # fmt: skip
