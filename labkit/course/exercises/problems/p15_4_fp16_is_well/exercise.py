"""15.4: a watchdog for fp16, from loss scales and histograms of gradients."""

import random
from collections.abc import Callable
from typing import Any

from labkit.course.exercises.exercise import Case, exercise
from labkit.course.exercises.learner_tests import told_apart

WARM, TOTAL = 10, 100_000


def fp16_is_well(steps: list[tuple[float, int, dict[int, int]]]) -> bool:
    """True if training in fp16 with a loss scale is healthy. A step is (scale, n_bad, counts): the loss scale; how many
    of the scaled gradients are inf or nan, which makes the step be skipped; counts[e] of the finite ones have
    2^e <= |g| < 2^(e+1), and counts[-99] are zero. The first 10 steps look for a scale, and say nothing.

    Healthy, from step 10 on: at most one step in ten of all these is skipped, and no three in a row; no scale is
    below 1; and in each step that is *not* skipped less than 5% of the finite gradients are lost. Lost are zeros, and
    those below 2^-14, the least normal number of fp16, which have lost digits."""
    late = steps[10:]
    skipped = [n_bad > 0 for _, n_bad, _ in late]
    lost = [
        sum(n for e, n in counts.items() if e < -14) / sum(counts.values()) for _, n_bad, counts in late if not n_bad
    ]
    in_a_row = any(all(skipped[k : k + 3]) for k in range(len(skipped) - 2))
    scales = [scale for scale, _, _ in late]
    return 10 * sum(skipped) <= len(late) and not in_a_row and min(scales) >= 1 and max(lost, default=1) < 0.05


def cases() -> list[Case]:
    """A short job and a longer one."""
    return [Case.of(1, centre=-6, steps=60), Case.of(1, centre=-4, steps=70)]


def histogram(
    dice: random.Random, centre: float, lost: float, edge: float = 0.0, zeros: float = 0.25
) -> dict[int, int]:
    """Counts of exponents around `centre`, with a share `lost` below -14, of which a share `zeros` are zeros and the
    rest subnormal, and a share `edge` at -14."""
    n_lost, n_edge = round(TOTAL * lost), round(TOTAL * edge)
    n_zeros = round(n_lost * zeros)
    n_small = (n_lost - n_zeros) // 3
    counts = {-14: n_edge}
    for place, n in ((-99, n_zeros), (-16, n_small), (-15, n_lost - n_zeros - n_small)):
        counts[place] = n
    for _ in range(12):
        place = min(15, max(-14, round(dice.gauss(centre, 2))))
        counts[place] = counts.get(place, 0) + (TOTAL - n_lost - n_edge) // 12
    return {place: n for place, n in counts.items() if n}


def shown(case: Case) -> dict[str, tuple[bool, list[Any]]]:
    """Name -> (True if the job is healthy, its steps)."""
    dice, centre, n_steps = random.Random(case.seed), case["centre"], case["steps"]
    late, many = dice.randint(20, 40), dice.sample(range(WARM, n_steps, 2), (n_steps - WARM) // 10 + 1)

    def job(
        bad: Callable[[int], bool] = lambda k: False,
        lost: Callable[[int], float] = lambda k: 0.01,
        scale: Callable[[int], float] = lambda k: 2.0**15,
        after: float = 0.0,
        edge: float = 0.0,
        zeros: float = 0.25,
        bare: bool = False,
    ) -> list[Any]:
        steps = []
        for k in range(n_steps):
            n_bad = dice.choice((1, 1, 2, 50)) if bad(k) else 0
            counts = histogram(dice, centre, lost(k) * dice.uniform(0.98, 1.02), edge, zeros)
            if n_bad and after:
                counts = histogram(dice, centre, after)
            steps.append((scale(k), n_bad, {} if n_bad and bare else counts))
        return steps

    exact = job()
    exact[late] = (2.0**15, 0, {-99: TOTAL // 100, -15: TOTAL // 25, -6: TOTAL - TOTAL // 20})
    right = {
        "nothing happens": job(),
        "overflow now and then: the scale is tried": job(lambda k: k % 20 == 15),
        "at first each step overflows, until the scale is found": job(
            lambda k: k < 8, scale=lambda k: 2.0 ** max(15, 24 - k)
        ),
        "a row that begins in the first steps: two of it count": job(lambda k: k < 12),
        "two skipped steps in a row, once": job(lambda k: k in (late, late + 1)),
        "one step in ten is skipped": job(lambda k: k in many[1:]),
        "a little less than five percent lost": job(lost=lambda k: 0.047),
        "a little less than five percent are zeros": job(lost=lambda k: 0.049, zeros=1.0),
        "a tenth just above the least normal number": job(edge=0.1),
        "a skipped step whose histogram is poor": job(lambda k: k in (late, late + 9), after=0.4),
        "a skipped step in which no gradient is finite": job(lambda k: k == late, bare=True),
        "half is lost in the first steps": job(lost=lambda k: 0.5 if k < WARM else 0.01),
        "a scale of 1 is enough": job(scale=lambda k: 1.0),
        "a scale below 1 at first": job(scale=lambda k: 0.25 if k < WARM else 64.0),
    }
    wrong = {
        "no scaling: most gradients are zero": job(lost=lambda k: 0.7, scale=lambda k: 1.0),
        "a tenth is below the least normal number, few are zero": job(lost=lambda k: 0.1),
        "lost in a few late steps only": job(lost=lambda k: 0.3 if late <= k < late + 3 else 0.01),
        "a little more than five percent lost, in a single step": job(lost=lambda k: 0.053 if k == late else 0.01),
        "exactly five percent lost, in a single step": exact,
        "lost in the first step that counts": job(lost=lambda k: 0.2 if k == WARM else 0.002),
        "lost in a single step": job(lost=lambda k: 0.2 if k == late else 0.002),
        "a fixed scale, too large: each second step is skipped": job(lambda k: k % 2 == 1),
        "one step in six is skipped": job(lambda k: k % 6 == 4),
        "one more than one step in ten is skipped": job(lambda k: k in many),
        "three skipped in a row, and no others": job(lambda k: late <= k < late + 3),
        "the first three steps that count are skipped": job(lambda k: WARM <= k < WARM + 3),
        "the last three steps are skipped": job(lambda k: k >= n_steps - 3),
        "every step is skipped from some step on": job(lambda k: k >= late),
        "one bad number in every step": job(lambda k: True),
        "the scale falls below 1, and nothing is skipped any more": job(scale=lambda k: 2.0 ** (9 - k // 5)),
        "a scale below 1, in a step that is skipped": job(
            lambda k: k == late, scale=lambda k: 0.5 if k == late else 4.0
        ),
        "a scale below 1, for three steps": job(scale=lambda k: 0.5 if late <= k < late + 3 else 4.0),
        "overflow, and lost in the steps between": job(lambda k: k % 15 == 12, lost=lambda k: 0.08),
    }
    return {name: (name in right, steps) for name, steps in {**right, **wrong}.items()}


PROBLEM = exercise(__name__, fp16_is_well, **told_apart(shown))
