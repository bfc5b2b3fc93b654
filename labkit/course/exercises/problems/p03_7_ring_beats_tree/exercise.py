"""03.7: from which size on a ring is the faster all-reduce, in closed form."""

import math
import random
from typing import Any

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise
from labkit.plan.machine.collectives import Line, seconds


def ring_beats_tree_from(n_ranks: int, alpha_s: float, beta_s_per_byte: float) -> float:
    """The smallest size in bytes, no matter whether a whole number, at which a ring takes no longer than a tree.

    A message of S bytes takes alpha_s + S * beta_s_per_byte seconds. For S bytes an all-reduce sends one after the
    other: a ring 2 (n - 1) messages of S/n bytes, a tree 2 ceil(log2 n) messages of S bytes. The answer is 0.0 where
    the ring takes no longer at any size, and math.inf where it always takes longer. Neither number is below zero."""
    depth = math.ceil(math.log2(n_ranks))
    latency = (n_ranks - 1 - depth) * alpha_s
    saved = (depth - (n_ranks - 1) / n_ranks) * beta_s_per_byte
    if latency <= 0:
        return 0.0
    return latency / saved if saved > 0 else math.inf


def links(case: Case) -> dict[str, tuple[int, float, float]]:
    """Name -> (ranks, latency in seconds, seconds a byte)."""
    draw = random.Random(case.seed)

    def link() -> tuple[float, float]:
        return 10 ** draw.uniform(-6, -2), 10 ** draw.uniform(-11, -7)

    drawn = {f"{n} ranks": (n, *link()) for n in case["ranks"]}
    return drawn | {
        "a link whose bytes are free": (draw.randint(5, 90), link()[0], 0.0),
        "a link without latency": (draw.randint(5, 90), 0.0, link()[1]),
        "2 ranks, bytes are free": (2, link()[0], 0.0),
        "3 ranks, nothing costs anything": (3, 0.0, 0.0),
    }


def cases() -> list[Case]:
    """Numbers of ranks that are powers of two and that are not."""
    return [Case.of(1, ranks=(4, 6, 100, 1, 2, 3)), Case.of(1, ranks=(5, 7, 8, 9, 64, 1000))]


def inputs(case: Case) -> Inputs:
    """The links."""
    return [(links(case),)]


def play(attempt: Any, group: Group, links: dict[str, tuple[int, float, float]]) -> Any:
    """One call for each link."""
    return {name: told(attempt(*link)) for name, link in links.items()}


def told(value: Any) -> Any:
    """A value as it is, but a number that is not finite as a word: no difference to infinity can be judged."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def searched(n_ranks: int, line: Line) -> float:
    """The size, found by bisection of the times themselves, without the formula."""

    def ring_is_ahead(size: float) -> bool:
        ring, tree = (seconds(name, "all_reduce", n_ranks, size, line) for name in ("ring", "tree"))
        return ring <= tree * (1 + 1e-14)

    if ring_is_ahead(0.0):
        return 0.0
    low, high = 0.0, 1e18
    if not ring_is_ahead(high):
        return math.inf
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if ring_is_ahead(middle) else (middle, high)
    return high


def answer(case: Case, inputs: Inputs) -> Answers:
    """The size for each link, by search."""
    return [{name: told(searched(n, Line(alpha, beta))) for name, (n, alpha, beta) in links(case).items()}]


PROBLEM = exercise(__name__, ring_beats_tree_from, tolerance=(1e-5, 1e-9))
