"""07.4: a check that tells a sharded optimizer from one that only gives the right weights."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.course.exercises.exercise import Case, exercise
from labkit.course.exercises.learner_tests import told_apart

Report = dict[str, Any]


def proves_one_nth(wanted: Tensor, reports: list[dict[str, Any]]) -> bool:
    """True if n ranks have run an AdamW in fp32 whose state is sharded evenly: 8 bytes for each of N elements, once.

    wanted [N] are the weights of one process, flat. reports[r] is what rank r shows after the same steps:
        "weights"      [N] its weights
        "windows"      [(first, count), ...] elements that its optimizer says it keeps state of; none overlap on a rank
        "state_bytes"  what a probe found there: 8 for each element, and up to 64 more for step counters
    Accept if all ranks have the weights (no number is off by more than 1e-6), each element has state on exactly one
    rank, the bytes of each rank are those of its windows, and no rank keeps state of more than N / n elements, rounded
    up."""
    n_elements, n = len(wanted), len(reports)
    owners = torch.zeros(n_elements)
    for report in reports:
        n_own = 0
        for first, count in report["windows"]:
            owners[first : first + count] += 1
            n_own += count
        fair = n_own <= -(-n_elements // n) and 8 * n_own <= report["state_bytes"] <= 8 * n_own + 64
        if not fair or not torch.allclose(report["weights"], wanted, rtol=0.0, atol=1e-6):
            return False
    return bool((owners == 1).all())


def cases() -> list[Case]:
    """Reports of four ranks and of three, which divide the number of elements. Nothing is sent, so the test itself runs
    on one rank."""
    return [Case.of(1, n=4, numel=1003), Case.of(1, n=3, numel=501)]


def cut(numel: int, n: int) -> list[list[tuple[int, int]]]:
    """The windows of n ranks: even runs, of which the last may be shorter or missing."""
    k = -(-numel // n)
    return [[(r * k, min(k, numel - r * k))] if r * k < numel else [] for r in range(n)]


def reported(weights: Sequence[Tensor], windows: list[list[tuple[int, int]]], bytes_each: float = 8) -> list[Report]:
    """The reports of ranks that have these weights and keep state of these windows."""
    return [
        {
            "weights": w.clone(),
            "windows": kept,
            "state_bytes": int(bytes_each * sum(c for _, c in kept)) + 4 * len(kept),
        }
        for w, kept in zip(weights, windows, strict=True)
    ]


def shown(case: Case) -> dict[str, tuple[bool, Tensor, list[Report]]]:
    """Name -> (True if it is right, the right weights, the reports of its ranks)."""
    n, numel, draw = case["n"], case["numel"], random.Random(case.seed)
    right, even = [case.random(numel)] * n, cut(case["numel"], case["n"])
    # two buckets, each cut by itself, in sizes that n divides but for the last
    half = numel // (2 * n) * n
    buckets = [[(r * half // n, half // n), (half + first, count)]
               for r, [(first, count)] in enumerate(cut(numel - half, n))]  # fmt: skip
    doubled = [list(windows) for windows in even]
    doubled[1] = [(even[0][0][0], even[1][0][1])]
    stale = [right[0]] + [w + 0.01 * (torch.arange(numel) >= even[0][0][1]) for w in right[1:]]
    half_kept = [[(0, numel // 2)] if r % 2 == 0 else [(numel // 2, numel - numel // 2)] for r in range(n)]
    wider, widest, meeting = ([list(windows) for windows in even] for _ in range(3))
    (_, whole_share), (last, rest) = even[0][0], even[-1][0]
    for windows, surplus in ((wider, 1), (widest, 7)):
        windows[-2:] = [[(last - whole_share, whole_share + surplus)], [(last + surplus, rest - surplus)]]
    meeting[-1] = [(last - 1, rest + 1)]
    shifted = [[(first + draw.randint(1, 9), count - 9)] for [(first, count)] in even]
    last_off, first_off = [w.clone() for w in right], [w.clone() for w in right]
    last_off[-1][draw.randrange(numel)] += 1e-3
    first_off[0][draw.randrange(numel)] -= 1e-3
    sizes, signs = right[0].abs(), case.random(numel, key=1).sign()
    largest, smallest = sizes == sizes.max(), sizes == sizes.min()
    whole = [[(0, numel)]] * n
    hidden, stated, padded, last_padded, lacking, blown = (reported(right, even) for _ in range(6))
    lacking[draw.randrange(n)]["state_bytes"] -= 8
    blown[draw.randrange(n)]["weights"][draw.randrange(numel)] = torch.nan
    hidden[draw.randrange(1, n)]["state_bytes"] = 8 * numel
    for reports, surplus, place in (
        (stated, 64, draw.randrange(n)),
        (padded, 65, draw.randrange(n - 1)),
        (last_padded, 65, n - 1),  # its part is shorter, so this is what another rank may have
    ):
        reports[place]["state_bytes"] = 8 * even[place][0][1] + surplus
    objects = {
        "ZeRO-1, one even run a rank": (True, reported(right, even)),
        "ZeRO-1, cut bucket by bucket": (True, reported(right, buckets)),
        "even runs, handed out from the last rank": (True, reported(right, even[::-1])),
        "more ranks than elements": (True, reported([right[0][:2]] * 3, cut(2, 3))),
        "a world of one": (True, reported(right[:1], [[(0, numel)]])),
        "step counters of 64 bytes": (True, stated),
        "weights that differ by rounding": (True, reported([right[0], *[w + 7e-7 * signs for w in right[1:]]], even)),
        "unsharded, with the right weights": (False, reported(right, whole)),
        "shards that are views: the whole state is still there": (False, hidden),
        "half-sharded: two ranks for each half": (False, reported(right, half_kept)),
        "state of everything on rank 0 only": (False, reported(right, [[(0, numel)]] + [[] for _ in range(n - 1)])),
        "rank 1 keeps rank 0's shard, and nobody its own": (False, reported(right, doubled)),
        "gaps between the shards": (False, reported(right, shifted)),
        "one of the two moments is missing": (False, reported(right, even, bytes_each=4)),
        "the last rank keeps nothing": (False, reported(right, [*even[:-1], []])),
        "new weights are not handed out": (False, reported(stale, even)),
        "one weight of the last rank is off": (False, reported(last_off, even)),
        "one weight of the first rank is off": (False, reported(first_off, even)),
        "all ranks have the same wrong weights": (False, reported([first_off[0]] * n, even)),
        "the largest weight is off by little": (False, reported([w + 1.6e-6 * largest for w in right], even)),
        "the smallest weight is off by little": (False, reported([w + 1.1e-6 * smallest for w in right], even)),
        "65 bytes too many in one shard": (False, padded),
        "65 bytes too many in the last shard, which may be shorter": (False, last_padded),
        "one rank keeps one element more than its part": (False, reported(right, wider)),
        "one rank keeps seven elements more than its part": (False, reported(right, widest)),
        "one element is kept twice": (False, reported(right, meeting)),
        "a few bytes of one shard are missing": (False, lacking),
        "one weight is nan": (False, blown),
    }
    wanted = {name: right[0][: len(ranks[0]["weights"])] for name, (_, ranks) in objects.items()}
    return {name: (truth, wanted[name], ranks) for name, (truth, ranks) in objects.items()}


PROBLEM = exercise(__name__, proves_one_nth, **told_apart(shown))
