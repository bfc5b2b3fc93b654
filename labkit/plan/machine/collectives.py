"""What a collective costs: bytes, steps and seconds, for a ring, a tree and a star.

Time follows the alpha-beta model: a message of b bytes takes alpha + b * beta seconds, alpha the latency of a link and
beta the time of a byte (Thakur, Rabenseifner and Gropp, 2005, section 3). N is the whole tensor in bytes: the one that
goes into an all_reduce, reduce_scatter or broadcast, the one that comes out of an all_gather.

    all_reduce     steps            seconds on the slowest path
    ring           2(n-1)           2(n-1) (alpha + N/n beta)
    tree           2 ceil(log2 n)   2 ceil(log2 n) (alpha + N beta)
    star           2(n-1)           2(n-1) (alpha + N beta)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALGORITHMS = ("ring", "tree", "star")
VERBS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


@dataclass(frozen=True)
class Line:
    """A link: `alpha_s` seconds of latency a message, `beta_s_per_byte` seconds a byte."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, n_bytes: float) -> float:
        """Time of one message."""
        return self.alpha_s + n_bytes * self.beta_s_per_byte

    @property
    def bandwidth(self) -> float:
        """Bytes a second of an endless message."""
        return math.inf if self.beta_s_per_byte == 0 else 1 / self.beta_s_per_byte

    @property
    def half_bytes(self) -> float:
        """The message that spends half of its time on latency: alpha / beta."""
        return math.inf if self.beta_s_per_byte == 0 else self.alpha_s / self.beta_s_per_byte


def part_bytes(n_bytes: int, n_ranks: int, part: int, item_bytes: int = 1) -> int:
    """Bytes of chunk `part` when a tensor is cut in n as evenly as its items allow: the first chunks get one more."""
    items, rest = divmod(n_bytes // item_bytes, n_ranks)
    return (items + (part < rest)) * item_bytes


def sent_bytes(algorithm: str, verb: str, n_ranks: int, n_bytes: int, rank: int = 0, item_bytes: int = 1) -> int:
    """Bytes that `rank` sends in one collective on a tensor of `n_bytes` in all (headers not counted).

    ring: (n-1)/n N for reduce_scatter and all_gather, twice that for all_reduce (Patarasuk and Yuan, 2009, section 3).
    A tree's and a star's ranks differ: rank 0 is the root; in a broadcast `rank` counts from the source.
    `item_bytes` (4 for float32) matters only where n does not divide the tensor. ValueError for unknown names, a rank
    outside 0..n-1, and bytes that are no whole number of items."""
    _check(algorithm, verb, n_ranks)
    if not 0 <= rank < n_ranks:
        raise ValueError(f"{n_ranks} ranks are numbered 0 to {n_ranks - 1}, got rank {rank}")
    if n_bytes < 0 or item_bytes < 1 or n_bytes % item_bytes:
        raise ValueError(f"{n_bytes} bytes are not a whole number of items of {item_bytes} bytes")
    if n_ranks == 1:
        return 0
    part = [part_bytes(n_bytes, n_ranks, i, item_bytes) for i in range(n_ranks)]
    whole = sum(part)
    if algorithm == "ring":
        scatter = whole - part[rank]  # everything but my own chunk, which I keep
        gather = whole - part[(rank + 1) % n_ranks]  # everything but my right neighbour's, who has it
        chain = whole if rank < n_ranks - 1 else 0
        return {"all_reduce": scatter + gather, "reduce_scatter": scatter, "all_gather": gather, "broadcast": chain}[
            verb
        ]
    if algorithm == "star":
        server = {
            "all_reduce": (n_ranks - 1) * whole,
            "reduce_scatter": whole - part[0],
            "all_gather": (n_ranks - 1) * whole,
            "broadcast": (n_ranks - 1) * whole,
        }
        client = {"all_reduce": whole, "reduce_scatter": whole, "all_gather": part[rank], "broadcast": 0}
        return server[verb] if rank == 0 else client[verb]
    up = 0 if rank == 0 else whole
    down = whole * _children(rank, n_ranks)
    subtree = sum(part[rank : min(n_ranks, rank + (rank & -rank))]) if rank else 0
    scattered = whole - part[0] if rank == 0 else 0
    return {"all_reduce": up + down, "reduce_scatter": up + scattered, "all_gather": subtree + down, "broadcast": down}[
        verb
    ]


def steps(algorithm: str, verb: str, n_ranks: int) -> int:
    """Messages one after the other on the longest path, when a rank sends one and takes one at a time.

    all_reduce: ring 2(n-1), tree 2 ceil(log2 n), star 2(n-1) (Thakur, Rabenseifner and Gropp, 2005, section 4)."""
    _check(algorithm, verb, n_ranks)
    hops = n_ranks - 1
    depth = math.ceil(math.log2(n_ranks)) if n_ranks > 1 else 0
    if algorithm == "ring":
        return 2 * hops if verb == "all_reduce" else hops
    if algorithm == "star":
        return hops if verb == "broadcast" else 2 * hops
    return {"all_reduce": 2 * depth, "reduce_scatter": depth + hops, "all_gather": 2 * depth, "broadcast": depth}[verb]


def seconds(algorithm: str, verb: str, n_ranks: int, n_bytes: float, link: Line) -> float:
    """Time of one collective when each rank sends one message and takes one at a time over `link`.

    The table at the head of this file, exact where n divides the tensor; sums themselves take no time in this law."""
    count = steps(algorithm, verb, n_ranks)
    if algorithm == "ring":
        message_bytes = n_bytes if verb == "broadcast" else n_bytes / n_ranks
    elif verb == "reduce_scatter":
        hops = n_ranks - 1
        return (count - hops) * link.seconds(n_bytes) + hops * link.seconds(n_bytes / n_ranks)
    elif verb == "all_gather":
        up = count // 2
        return up * link.alpha_s + n_bytes * (n_ranks - 1) / n_ranks * link.beta_s_per_byte + up * link.seconds(n_bytes)
    else:
        message_bytes = n_bytes
    return count * link.seconds(message_bytes)


def crossover_bytes(n_ranks: int, link: Line, a: str = "ring", b: str = "tree") -> float:
    """The size at which all_reduce takes as long by `a` as by `b`; where they never meet, 0 if `a` is as fast or faster
    at every size, else inf.

    ring against tree: alpha/beta * (n-1-L) / (L - (n-1)/n) with L = ceil(log2 n), from 2(n-1)(alpha + N/n beta) =
    2L(alpha + N beta)."""
    latency = seconds(a, "all_reduce", n_ranks, 0, Line(1, 0)) - seconds(b, "all_reduce", n_ranks, 0, Line(1, 0))
    volume = seconds(a, "all_reduce", n_ranks, 1, Line(0, 1)) - seconds(b, "all_reduce", n_ranks, 1, Line(0, 1))
    fixed, slope = latency * link.alpha_s, volume * link.beta_s_per_byte
    if fixed * slope < 0:  # one has less latency, the other moves fewer bytes
        return -fixed / slope
    return 0.0 if fixed <= 0 and slope <= 0 else math.inf


def fit(samples: Sequence[tuple[float, float]]) -> Line:
    """The line through (bytes, seconds) that is least wrong in relative terms, so that small messages count as much as
    large ones; neither alpha nor beta below zero.

    Least absolute relative error, by reweighted least squares (Holland and Welsch, 1977): one disturbed measurement
    does not bend the line. ValueError for fewer than two different sizes, or a time that is not above zero."""
    sizes = {size for size, _ in samples}
    if len(sizes) < 2 or any(not 0 <= size < math.inf or not 0 < time < math.inf for size, time in samples):
        raise ValueError(
            f"a line needs two different sizes and times above zero, got {len(sizes)} sizes: {list(samples)[:4]}"
        )
    link = _weighted(samples, [1.0] * len(samples))
    for _ in range(30):
        errors = [abs(link.seconds(size) / time - 1) for size, time in samples]
        link = _weighted(samples, [1 / max(error, 1e-6) for error in errors])
    return link


def _weighted(samples: Sequence[tuple[float, float]], weights: Sequence[float]) -> Line:
    """Minimise sum w ((a + b s - t) / t)^2 over a, b >= 0: the normal equations of a weighted line."""
    w = [weight / (t * t) for weight, (_, t) in zip(weights, samples, strict=True)]
    sw = sum(w)
    sx = sum(wi * s for wi, (s, _) in zip(w, samples, strict=True))
    sy = sum(wi * t for wi, (_, t) in zip(w, samples, strict=True))
    sxx = sum(wi * s * s for wi, (s, _) in zip(w, samples, strict=True))
    sxy = sum(wi * s * t for wi, (s, t) in zip(w, samples, strict=True))
    spread = sw * sxx - sx * sx
    beta = (sw * sxy - sx * sy) / spread if spread > 1e-12 * sw * sxx else 0.0
    alpha = (sy - beta * sx) / sw
    if alpha < 0:
        return Line(0.0, sxy / sxx)
    if beta < 0:
        return Line(sy / sw, 0.0)
    return Line(alpha, beta)


def _children(rank: int, n_ranks: int) -> int:
    """The number of children of `rank` in a binomial tree."""
    lowest = rank & -rank if rank else 1 << n_ranks.bit_length()
    return sum(1 for bit in range(n_ranks.bit_length()) if 1 << bit < lowest and rank + (1 << bit) < n_ranks)


def _check(algorithm: str, verb: str, n_ranks: int) -> None:
    if algorithm not in ALGORITHMS or verb not in VERBS:
        raise ValueError(f"there are {', '.join(ALGORITHMS)} for {', '.join(VERBS)}; got {algorithm!r}, {verb!r}")
    if n_ranks < 1:
        raise ValueError(f"n_ranks must be at least 1, got {n_ranks}")
