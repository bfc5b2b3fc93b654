"""Stale gradients on a quadratic: how long a step may be when the gradient is s steps old.

    w(t+1) = w(t) - lr h w(t-s)                    h = curvature, w = distance from the optimum, s = staleness

    fresh, s = 0     below lr h = 1: straight down; at 1: done in one step; from 2 on: diverges
    stale            best    lr h = s^s / (s+1)^(s+1)     each step keeps s/(s+1) of the distance
                     limit   lr h = 2 sin(pi / (2 (2s+1)))   from here on it diverges
                     between the two it swings: the step still pushes after the optimum is passed, as momentum does

If the staleness is not constant but geometric, P(s = l) = (1 - mu) mu^l, the mean over all runs *is* SGD with momentum
mu and dampening mu, with the same lr: old gradients act as the velocity of momentum does. Mean staleness s means
mu = s / (s+1).

Sources: the characteristic polynomial z^(s+1) = z^s - lr h; Mitliagkas et al., arXiv:1605.09774, theorem 1.
"""

from __future__ import annotations

import math

from labkit.plan.checks import is_whole


def limit(staleness: int) -> float:
    """The lr times curvature from which SGD with a constant staleness diverges: 2 for 0, about pi / (2s + 1)."""
    return 2 * math.sin(math.pi / (2 * (2 * _checked(staleness) + 1)))


def best(staleness: int) -> float:
    """The lr times curvature that goes down fastest, just before it swings: 1 for 0, about 1 / (e (s + 1))."""
    s = _checked(staleness)
    return s**s / (s + 1) ** (s + 1)


def momentum(staleness: float) -> float:
    """The momentum that gradients of this mean staleness act like: s / (s + 1)."""
    if not 0 <= staleness < math.inf:
        raise ValueError(f"a mean staleness is 0 or more, got {staleness!r}")
    return staleness / (staleness + 1)


def distances(staleness: int, rate: float, steps: int) -> list[float]:
    """|w| after 0, 1, ... `steps` steps from w = 1 with lr times curvature `rate`; before step 0 w was 1, too.

    Beyond 1e12 it counts as diverged, and stays inf. ValueError for a rate or a staleness below 0."""
    s = _checked(staleness)
    if not 0 <= rate < math.inf:
        raise ValueError(f"lr times curvature is 0 or more, got {rate!r}")
    w = [1.0]
    for t in range(steps):
        after = w[t] - rate * w[max(0, t - s)]
        w.append(after if abs(after) < 1e12 else math.inf)
    return [abs(distance) for distance in w]


def verdict(staleness: int, rate: float) -> str:
    """ "creeps" up to the best rate, "swings" up to the limit, "diverges" from there on."""
    if rate >= limit(staleness):
        return "diverges"
    return "swings" if rate > best(staleness) else "creeps"


def _checked(staleness: int) -> int:
    if not is_whole(staleness, 0):
        raise ValueError(f"staleness is a whole number of steps, 0 or more; got {staleness!r}")
    return staleness
