"""How far two correct computations of the same number may be apart: the laws of rounding.

    one number      stored in a format with unit roundoff u                 u |x|
    a sum of n      the worst that any order can do                         n u / (1 - n u)  times the sum of sizes
    a sum of n      roundings that know nothing of each other               lambda sqrt(n) u times the sum of sizes
    two runs        each has its own                                        both bounds added
    layers, steps   equal errors that are independent, on top of each other sqrt(layers) times one of them

The unit roundoff of a format with p bits of precision is 2^-p: half the gap behind 1. The second line is lemma 3.1
and section 4.2 of Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, SIAM 2002; the third theorem 2.4
of Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019: a bound that fails with a chance of 2 exp(-lambda^2 / 2) at most.
"Sum of sizes" is the sum of |terms|, which is much larger than the |sum| where terms cancel: relative to what is left,
the error is then larger by `cancellation`.

All functions are plain arithmetic on numbers; what a layer of a real model may add is measured (first_difference.py).
"""

from __future__ import annotations

import math
from types import MappingProxyType

PRECISION_BITS = MappingProxyType(
    {"fp64": 53, "fp32": 24, "tf32": 11, "fp16": 11, "bf16": 8, "e4m3": 4, "e5m2": 3}
)  # fmt: skip
"""Bits of precision of each format, the one before the point included."""


def roundoff(name: str) -> float:
    """Unit roundoff of a format, "bf16": the largest relative error of rounding a number to it.

    ValueError, with the names there are, for an unknown format."""
    if name not in PRECISION_BITS:
        raise ValueError(f"there is no format {name!r} here; there are {', '.join(PRECISION_BITS)}")
    return 2.0 ** -PRECISION_BITS[name]


def worst(terms: int, u: float) -> float:
    """The error of a sum at most, in any order, over the sum of the sizes of its terms: n u / (1 - n u).

    ValueError unless `terms` is at least 1 and terms times u is below 1."""
    _check(terms, u)
    if terms * u >= 1:
        raise ValueError(f"a sum of {terms:,} terms in a format of unit roundoff {u:g}: the worst case has no bound")
    return terms * u / (1 - terms * u)


def likely(terms: int, u: float, lam: float = 6.0) -> float:
    """The same if roundings are independent: lambda sqrt(n) u, beyond which it is with a chance of `beyond(lam)`.

    ValueError unless `terms` is at least 1 and lambda above 0."""
    _check(terms, u)
    if not lam > 0:
        raise ValueError(f"lambda is how many standard deviations are allowed, above 0; got {lam}")
    return lam * math.sqrt(terms) * u


def beyond(lam: float) -> float:
    """The chance that independent roundings go beyond lambda standard deviations: 2 exp(-lambda^2 / 2), 1 at most."""
    return min(1.0, 2 * math.exp(-(lam**2) / 2))


def piled_up(error: float, layers: int) -> float:
    """Errors of equal size and independent, one from each layer or step, that nothing makes larger: sqrt(layers)."""
    if layers < 0:
        raise ValueError(f"a number of layers is not below 0; got {layers}")
    return error * math.sqrt(layers)


def cancellation(sum_of_sizes: float, size_of_sum: float) -> float:
    """How many times larger an error is, relative to a sum than to the sizes of its terms; inf for a sum of 0.

    ValueError for sizes below 0."""
    if sum_of_sizes < 0 or size_of_sum < 0:
        raise ValueError(f"sizes are not below 0; got {sum_of_sizes:g} and {size_of_sum:g}")
    return math.inf if size_of_sum == 0 else sum_of_sizes / size_of_sum


def _check(terms: int, u: float) -> None:
    if terms < 1 or not 0 < u < 1:
        raise ValueError(f"a sum has at least one term and a unit roundoff between 0 and 1; got {terms} and {u}")
