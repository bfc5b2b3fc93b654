"""06.3: which gradients travel together."""

import random
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise


def reverse_buckets(params: list[Tensor], most: int) -> list[list[int]]:
    """Lay parameters into buckets, from the last to the first: places in `params`, bucket by bucket.

    A bucket takes the next parameter as long as all its bytes together are at most `most`; otherwise it is closed for
    good and the parameter opens a new one. So a parameter that is larger than `most` is alone in its bucket.
    Every place stands in one bucket, in falling order; no bucket is empty. Dtypes differ: what counts is bytes."""
    buckets: list[list[int]] = []
    held = 0
    for place in reversed(range(len(params))):
        n_bytes = params[place].numel() * params[place].element_size()
        if not buckets or held + n_bytes > most:
            buckets.append([])
            held = 0
        buckets[-1].append(place)
        held += n_bytes
    return buckets


def cases() -> list[Case]:
    """Large and small buckets."""
    return [Case.of(1, most=800, count=24), Case.of(1, most=96, count=12), Case.of(1, most=20_000, count=9)]


def inputs(case: Case) -> Inputs:
    """Models of random sizes, among them buckets that fit exactly and single parameters that are too large, one of them
    the first to be laid, and one the first behind a parameter without numbers."""
    draw = random.Random(case.seed)
    most, dtypes = case["most"], (torch.float32, torch.bfloat16, torch.float64)

    def some(n_bytes: int) -> Tensor:
        dtype = draw.choice(dtypes)
        return torch.zeros(max(1, n_bytes // dtype.itemsize), dtype=dtype)

    mixed = [some(draw.randrange(8, most // 2)) for _ in range(case["count"])]
    mixed[draw.randrange(1, case["count"] - 1)] = some(2 * most)
    half = torch.zeros(most // 8, dtype=torch.float32)
    exact = [half, half.bfloat16(), half.bfloat16(), half, half, half, half]
    huge_at_the_end = [some(most // 3), some(most // 3), some(3 * most)]
    behind_nothing = [some(3 * most), torch.empty(0), some(most // 3), some(3 * most), torch.empty(0)]
    return [([mixed, exact, huge_at_the_end, mixed[:1], [], behind_nothing], most)]


def play(attempt: Any, _: Group, models: list[list[Tensor]], most: int) -> Any:
    """The buckets of each model."""
    return [attempt(params, most) for params in models]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The buckets by search: each is the longest run, from the end, that fits, or one parameter."""
    models, most = inputs[0]

    def laid(sizes: list[int]) -> list[list[int]]:
        n = len(sizes)
        if not n:
            return []
        length = max([1, *(k for k in range(1, n + 1) if sum(sizes[n - k :]) <= most)])
        return [list(range(n - 1, n - 1 - length, -1)), *laid(sizes[: n - length])]

    return [[laid([p.nbytes for p in params]) for params in models]]


PROBLEM = exercise(__name__, reverse_buckets)
