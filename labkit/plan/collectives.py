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

    ring: (n-1)/n N for reduce_scatter and all_gather, twice that for all_reduce. ValueError for unknown names.
    `item_bytes` (4 for float32) matters only where n does not divide the tensor."""
    _check(algorithm, verb, n_ranks)
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
    """Messages one after the other on the longest path."""
    _check(algorithm, verb, n_ranks)
    hops = n_ranks - 1
    depth = math.ceil(math.log2(n_ranks)) if n_ranks > 1 else 0
    if algorithm == "ring":
        return 2 * hops if verb == "all_reduce" else hops
    if algorithm == "star":
        return hops if verb == "broadcast" else 2 * hops
    return {"all_reduce": 2 * depth, "reduce_scatter": depth + hops, "all_gather": 2 * depth, "broadcast": depth}[verb]


def seconds(algorithm: str, verb: str, n_ranks: int, n_bytes: float, link: Line) -> float:
    """Time of one collective when each rank can send one message at a time over `link`."""
    count = steps(algorithm, verb, n_ranks)
    if algorithm == "ring":
        each = n_bytes if verb == "broadcast" else n_bytes / n_ranks
    elif verb == "reduce_scatter":
        hops = n_ranks - 1
        return (count - hops) * link.seconds(n_bytes) + hops * link.seconds(n_bytes / n_ranks)
    elif verb == "all_gather":
        up = count // 2
        return up * link.alpha_s + n_bytes * (n_ranks - 1) / n_ranks * link.beta_s_per_byte + up * link.seconds(n_bytes)
    else:
        each = n_bytes
    return count * link.seconds(each)


def crossover_bytes(n_ranks: int, link: Line, a: str = "ring", b: str = "tree") -> float:
    """The size at which all_reduce takes as long by `a` as by `b`; inf if `b` is never slower, 0 if never faster.

    ring against tree: alpha/beta * (n-1-L) / (L - (n-1)/n) with L = ceil(log2 n)."""
    zero = seconds(a, "all_reduce", n_ranks, 0, link) - seconds(b, "all_reduce", n_ranks, 0, link)
    one = seconds(a, "all_reduce", n_ranks, 1, link) - seconds(b, "all_reduce", n_ranks, 1, link)
    slope = one - zero
    if slope >= 0:
        return math.inf if zero > 0 else 0.0
    return max(0.0, -zero / slope)


def fit(samples: Sequence[tuple[float, float]]) -> Line:
    """The line through (bytes, seconds): least squares of the relative error, so that small messages count as much as
    large ones; neither alpha nor beta below zero. ValueError for fewer than two different sizes."""
    sizes = {size for size, _ in samples}
    if len(sizes) < 2 or any(size < 0 or not time > 0 for size, time in samples):
        raise ValueError(
            f"a line needs two different sizes and times above zero, got {len(sizes)} sizes: {list(samples)[:4]}"
        )
    # minimise sum ((a + b s - t) / t)^2: the normal equations of a weighted line
    w = [1 / (time * time) for _, time in samples]
    sw = sum(w)
    sx = sum(wi * s for wi, (s, _) in zip(w, samples, strict=True))
    sy = sum(wi * t for wi, (_, t) in zip(w, samples, strict=True))
    sxx = sum(wi * s * s for wi, (s, _) in zip(w, samples, strict=True))
    sxy = sum(wi * s * t for wi, (s, t) in zip(w, samples, strict=True))
    beta = (sw * sxy - sx * sy) / (sw * sxx - sx * sx)
    alpha = (sy - beta * sx) / sw
    if alpha < 0:
        return Line(0.0, sxy / sxx)
    if beta < 0:
        return Line(sy / sw, 0.0)
    return Line(alpha, beta)


def _children(rank: int, n_ranks: int) -> int:
    """How many ranks a binomial tree hangs below `rank` directly."""
    lowest = rank & -rank if rank else 1 << n_ranks.bit_length()
    return sum(1 for bit in range(n_ranks.bit_length()) if 1 << bit < lowest and rank + (1 << bit) < n_ranks)


def _check(algorithm: str, verb: str, n_ranks: int) -> None:
    if algorithm not in ALGORITHMS or verb not in VERBS:
        raise ValueError(f"there are {', '.join(ALGORITHMS)} for {', '.join(VERBS)}; got {algorithm!r}, {verb!r}")
    if n_ranks < 1:
        raise ValueError(f"n_ranks must be at least 1, got {n_ranks}")
