"""Asynchronous reinforcement learning: how old the weights must be that generate, and how old they may be.

A trainer learns from what generators write. If each batch is written with the newest weights, one side always waits.
With a staleness of s the batch of step k is written with the weights of step k - s, so s batches are under way:

    s = 0    generator   write 0 |         | write 1 |         |         each waits for the other
             trainer             | step 0  |         | step 1  |
    s = 1    generator   write 0 | write 1 | write 2 | write 3 |         write 2 has the weights after step 0, and
             trainer             | step 0  | step 1  | step 2  |         step 1 changes them meanwhile

How old they must be: with g seconds of writing a batch, t of a step and c of a message, over m generators that take
turns, a batch and its weights are g + c + t + c seconds on their way round, and s + 1 of them share the round:

    seconds a step       max(t, g / m, (g + t + 2 c) / (s + 1))        `period_s`

How old they may be. A policy N(w, sigma^2) with the reward -h (a - a*)^2 / 2 has the gradient -h (w - a*). A batch that
old weights wrote, taken as if it were new, gives the gradient of the old weights: SGD with stale gradients, which
diverges from lr h = 2 sin(pi / (2 (2s + 1))) on (labkit.plan.pocket.stale_gradients). Weighing each sample by
p_new(a) / p_old(a) gives the gradient of the new weights in the mean. The price is noise: of N samples as many count as

    N exp(-d^2 / sigma^2)        d = how far w has moved since, for each number that is sampled     `counted_share`

because E[(p_new / p_old)^2] = exp(d^2 / sigma^2). At d = sigma 37% count, at 2 sigma 2%: the weights may be as old as
it takes them to move by a good part of the policy's own spread (`steps_until`).

The laws are derived here, for this toy; nothing is claimed of language models, whose tokens multiply such ratios.
"""

from __future__ import annotations

import math

from labkit.plan.checks import is_number, is_whole


def period_s(generate_s: float, train_s: float, message_s: float, n_generators: int, staleness: int) -> float:
    """Seconds a step in the long run. ValueError for seconds below 0, no generators, and a staleness below 0."""
    _check(generate_s, train_s, message_s)
    if not is_whole(n_generators) or not is_whole(staleness, 0):
        raise ValueError(f"there is at least 1 generator and a staleness of 0 or more, got {n_generators}, {staleness}")
    return max(train_s, generate_s / n_generators, (generate_s + train_s + 2 * message_s) / (staleness + 1))


def staleness_wanted(generate_s: float, train_s: float, message_s: float, n_generators: int) -> int:
    """The least staleness from which on a larger one makes no step shorter."""
    floor = max(train_s, generate_s / n_generators)
    _check(generate_s, train_s, message_s)
    if not floor:
        return 0
    return max(0, math.ceil((generate_s + train_s + 2 * message_s) / floor - 1e-12) - 1)


def counted_share(shift: float, sigma: float) -> float:
    """Of samples that are weighed by p_new / p_old, the share that counts: exp(-d^2/sigma^2) for a `shift` of d."""
    if not is_number(sigma, above=True):
        raise ValueError(f"the spread of a policy is above 0, got {sigma!r}")
    return math.exp(-((shift / sigma) ** 2))


def shift_until(share: float, sigma: float) -> float:
    """How far the mean may move until only this share of samples counts. ValueError for a share outside 0 to 1."""
    if not 0 < share <= 1:
        raise ValueError(f"a share of samples lies above 0 and is at most 1, got {share!r}")
    return sigma * math.sqrt(math.log(1 / share))


def steps_until(share: float, sigma: float, step: float) -> int:
    """Steps of this length that the weights may be old until fewer than this share of samples count."""
    if not is_number(step, above=True):
        raise ValueError(f"the length of a step is above 0, got {step!r}")
    return math.floor(shift_until(share, sigma) / step + 1e-12)


def _check(*seconds: float) -> None:
    if min(seconds) < 0:
        raise ValueError(f"seconds are 0 or more, got {list(seconds)}")
