"""03.7: from which size on a ring is the faster all-reduce, in closed form."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from labkit.comm.group import Group
from labkit.course.exercises.problem import Mutant, Problem
from labkit.course.judge.case import Case
from labkit.plan.collectives import Line, seconds


def ring_beats_tree_from(n_ranks: int, alpha_s: float, beta_s_per_byte: float) -> float:
    """The smallest size in bytes, no matter whether a whole number, at which a ring takes no longer than a tree.

    A message of b bytes takes alpha_s + b * beta_s_per_byte seconds. For N bytes an all-reduce sends one after the
    other: a ring 2 (n - 1) messages of N/n bytes, a tree 2 ceil(log2 n) messages of N bytes. The answer is 0.0 where
    the ring takes no longer at any size, and math.inf where it always takes longer. Neither number is below zero."""
    depth = math.ceil(math.log2(n_ranks))
    latency = (n_ranks - 1 - depth) * alpha_s
    saved = (depth - (n_ranks - 1) / n_ranks) * beta_s_per_byte
    if latency <= 0:
        return 0.0
    return latency / saved if saved > 0 else math.inf


def links(case: Case) -> dict[str, tuple[int, float, float]]:
    """By name: ranks, latency, time of a byte."""
    draw = random.Random(case.seed)

    def link() -> tuple[float, float]:
        return 10 ** draw.uniform(-6, -2), 10 ** draw.uniform(-11, -7)

    some = {f"{n} ranks": (n, *link()) for n in case["ranks"]}
    return some | {
        "a link whose bytes are free": (draw.randint(5, 90), link()[0], 0.0),
        "a link without latency": (draw.randint(5, 90), 0.0, link()[1]),
        "2 ranks, bytes are free": (2, link()[0], 0.0),
        "3 ranks, nothing costs anything": (3, 0.0, 0.0),
    }


def cases() -> Sequence[Case]:
    """Numbers of ranks that are powers of two and that are not."""
    return [Case.of(1, ranks=(4, 6, 100, 1, 2, 3)), Case.of(1, ranks=(5, 7, 8, 9, 64, 1000))]


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """The links."""
    return [(links(case),)]


def play(attempt: Any, group: Group, given: dict[str, tuple[int, float, float]]) -> Any:
    """One call for each link."""
    return {name: told(attempt(*link)) for name, link in given.items()}


def told(value: Any) -> Any:
    """A number that is not finite, as a word: a difference to infinity says nothing."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def searched(n_ranks: int, line: Line) -> float:
    """The size, found by halving: no formula but the times themselves."""

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


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """By search."""
    return [{name: told(searched(n, Line(alpha, beta))) for name, (n, alpha, beta) in links(case).items()}]


PROBLEM = Problem(
    key="03.7",
    title="Where ring and tree cross",
    story="""
A tree of 1,024 ranks waits for 20 latencies, a ring for 2,046; but the ring's messages are a thousandth as long. So
there is a size at which they take the same time, and a library that knows it can choose for each call. NCCL does so.
Find that size for any link, and mind the links on which the two never meet.
""",
    objectives=("latency against bytes, in the alpha-beta model", "the edges of a formula: one rank, free bytes"),
    difficulty=3,
    importance=4,
    minutes=15,
    reference=ring_beats_tree_from,
    cases=cases,
    inputs=inputs,
    play=play,
    answer=answer,
    tolerance=(1e-5, 1e-9),
    hints=(
        "Both times are straight lines over N. Which one begins lower, and which one rises faster?",
        "Ring minus tree at N = 0 is 2 (n - 1 - L) alpha with L = ceil(log2 n); a byte of N costs the tree "
        "2 (L - (n-1)/n) beta more than the ring.",
        "latency = (n - 1 - L) * alpha; saved = (L - (n - 1) / n) * beta; no latency to make up: 0; nothing saved: "
        "inf; else divide",
    ),
    mutants=(
        Mutant("the depth of the tree is not rounded up, as if there were half a round", "values",
               (("math.ceil(math.log2(n_ranks))", "math.log2(n_ranks)"),)),
        Mutant("it divides by zero where a byte costs nothing", "values",
               ((" if saved > 0 else math.inf", ""),)),
        Mutant("the ring is taken to wait n times, not n - 1 times", "values",
               (("n_ranks - 1 - depth", "n_ranks - depth"),)),
        Mutant("the ring is taken to send whole tensors", "values",
               (("depth - (n_ranks - 1) / n_ranks", "depth - (n_ranks - 1)"),)),
        Mutant("the ring's n-th parts are counted once, not n - 1 times", "values",
               (("(n_ranks - 1) / n_ranks", "1 / n_ranks"),)),
        Mutant("latency and bytes have changed places", "values",
               (("return latency / saved if", "return saved / latency if"),)),
        Mutant("where the ring is never slower, a line is divided by another all the same", "values",
               (("latency <= 0", "latency < 0"),)),
    ),
)  # fmt: skip
