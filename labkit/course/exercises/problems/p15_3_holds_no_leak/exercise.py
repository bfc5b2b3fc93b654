"""15.3: a test that memory does not leak, from the bytes that are live after each step."""

import random
from collections.abc import Callable, Sequence

from labkit.course.exercises.exercise import Case, exercise
from labkit.course.exercises.learner_tests import told_apart

STEPS = 70


def holds_no_leak(live: list[int]) -> bool:
    """True if a job keeps its memory, False if it leaks. live[k] is the bytes that are live after step k, of 70 steps.

    The first 10 steps, 0 to 9, are warm-up and say nothing. After them look at the floor: the least of any
    12 steps in a row, since what comes and goes does so within 12 steps. In a healthy job no floor is more than 2%
    above the first one, that of steps 10 to 21, whatever stands on top of it."""
    rest = live[10:]
    floors = [min(rest[k : k + 12]) for k in range(len(rest) - 11)]
    return max(floors) <= 1.02 * floors[0]


def cases() -> Sequence[Case]:
    """Small jobs and large ones."""
    return [Case.of(1, base=10**6), Case.of(1, base=7 * 10**10)]


def shown(case: Case) -> dict[str, tuple[bool, list[int]]]:
    """Name -> (True if the job is healthy, its live bytes). No floor is between 1.7% and 2.3% above the first, so that
    jitter cannot decide. What one window of twelve steps alone can see is shown in each of
    twelve that follow each other: whoever looks at every second, third or twelfth window misses some."""
    dice, base = random.Random(case.seed), case["base"]
    level, top, period = base * dice.uniform(1, 9), base * dice.uniform(2, 6), dice.randint(5, 12)
    late, warm = dice.randint(30, 40), dice.uniform(0.1, 0.6)

    def curve(law: Callable[[int], float], jitter: float = 0.002) -> list[int]:
        return [round(level * law(k) * (1 + jitter * dice.random())) for k in range(STEPS)]

    def held_from(first: int) -> Callable[[int], float]:
        return lambda k: 1 + 0.7 * (first <= k < first + 12)

    def tooth(k: int) -> float:
        return k % period * top / level / period

    right: dict[str, Callable[[int], float]] = {
        "level": lambda k: 1,
        "a warm-up: caches and moments fill": lambda k: 1 - warm * max(0, 9 - k) / 9,
        "a warm-up that is over all at once, at step 10": lambda k: 1 - warm * (k < 10),
        "a high first step, then level": lambda k: 3 if k < 2 else 1,
        "a sawtooth": lambda k: 1 + tooth(k),
        "a warm-up, and a sawtooth": lambda k: 1 - warm * max(0, 8 - k) / 8 + tooth(k),
        "one long text": lambda k: 1 + 4 * (k == late),
        "a long evaluation": lambda k: 1 + 0.7 * (late <= k < late + 8),
        "an evaluation of eleven steps": lambda k: 1 + 0.7 * (late <= k < late + 11),
        "ends during an evaluation": lambda k: 1 + 0.7 * (k >= STEPS - 5),
        "ends during an evaluation of eleven steps": lambda k: 1 + 0.7 * (k >= STEPS - 11),
        "memory is given back halfway": lambda k: 1 if k < late else 0.6,
        "a floor that is one and a half percent higher halfway": lambda k: 1 + 0.015 * (k > late),
        "teeth of twelve steps that come down at step 21 first": lambda k: 1 + 0.7 * (k % 12 != 9),
        "teeth that grow, over a level floor": lambda k: 1 + tooth(k) * k / 30,
    }
    wrong: dict[str, Callable[[int], float]] = {
        "a graph that grows at every step": lambda k: 1 + 0.02 * k,
        "a cache with an entry for each length": lambda k: 1 + 0.05 * (k // 6),
        "a slow leak": lambda k: 1 + 0.001 * k,
        "a slow leak below a sawtooth": lambda k: 1 + tooth(k) + 0.0012 * k,
        "a leak that begins late": lambda k: 1 + 0.004 * max(0, k - late),
        "a leak below a high first step": lambda k: 5 if k < 3 else 1 + 0.003 * k,
        "a leak that grows ever slower": lambda k: 1 + 0.02 * k**0.5,
        "one evaluation whose graph stays": lambda k: 1 + 0.1 * (k > late),
        "one graph that stays, from step 11 on": lambda k: 1 + 0.1 * (k > 10),
        "a floor that is two and a half percent higher halfway": lambda k: 1 + 0.025 * (k > late),
        "what comes down at step 21, and never again": lambda k: 1 + 0.7 * (k != 21),
        "the last twelve steps stand higher": lambda k: 1 + 0.1 * (k >= STEPS - 12),
        "a leak that is emptied every 30 steps": lambda k: 1 + 0.02 * ((k - 10) % 30),
        "emptied at last: the first and the last step are alike": lambda k: 1 + 0.01 * (k if k < 68 else 0),
        "a leak below one evaluation, early": lambda k: 1 + 2 * (10 <= k < 16) + 0.001 * k,
    }
    for first in range(late, late + 12):
        wrong[f"what is held for twelve steps from step {first} on, and then given back"] = held_from(first)
    return {name: (name in right, curve(law)) for name, law in {**right, **wrong}.items()}


PROBLEM = exercise(__name__, holds_no_leak, **told_apart(shown))
