"""20.1: the online softmax: answers from blocks of keys become the answer from all keys."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, peak, sends

PADDING = 3
"""The sequence is padded in front by so many positions, which neither see nor are seen."""
NOISE_BYTES = 4 << 20  # products of matrices take room of their own, once
MOST_MEANS, ROOM_BYTES = 8, 64 << 10


def merge_blocks(blocks: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The answer to some queries from all keys, merged from those of blocks of keys.   -> [H, T, W], [H, T]

    An answer has two parts: the mean of the values, weighted by the softmax over the scores, [H, T, W], and the
    logarithm of the sum of weights, log(sum of exp(score)), [H, T]. Each block is such an answer, from its own keys
    only. There is at least one, and they come in any order.

    A query that sees none of a block's keys has mean 0 and logarithm -inf there; the same must come out for one that
    sees no key at all. Scores may be in the hundreds, above and below zero, so that exp of them is inf or 0. Take every
    block, and keep none: there is room for a few means, not for one of each block."""
    mean, log_sum = next(blocks)
    for block_mean, block_log_sum in blocks:
        total = torch.logaddexp(log_sum, block_log_sum)
        base = total.masked_fill(total == -torch.inf, 0.0)
        kept, added = (log_sum - base).exp(), (block_log_sum - base).exp()
        mean = kept[..., None] * mean + added[..., None] * block_mean
        log_sum = total
    return mean, log_sum


def cases() -> list[Case]:
    """Worlds of 1 to 5 ranks; `tokens` a rank, whose keys come in `pieces`; all scores of a head are near +-`far`, or
    apart by up to twice `tilt` of that: with it, the keys that a rank sees first are all that even heads look at, and
    what odd heads look away from.
    In the first, all blocks together have 24 MB, of which 8 may be held, noise included."""
    return [
        Case.of(3, torch.float64, heads=16, tokens=48, width=80, pieces=16, far=800),
        Case.of(2, heads=6, tokens=20, width=48, pieces=5, far=120, tilt=0.6),
        Case.of(4, torch.float64, heads=4, tokens=18, width=32, pieces=3, far=1500).among(
            Case.of(5, torch.float64, heads=2, tokens=15, width=32, pieces=3, far=1500)
        ),
        Case.of(1, torch.float64, heads=2, tokens=30, width=20, pieces=10, far=800),
    ]


def inputs(case: Case) -> Inputs:
    """A rank's queries [H, T, W], and its keys and values [2, T, W], which all heads share.

    The first number of every key is 1, or about 1, and that of a query is far from 0: in even heads above, in odd ones
    below."""
    arguments = []
    for rank in range(case.n_ranks):
        q = case.random(case["heads"], case["tokens"], case["width"], key=2 * rank) / case["width"] ** 0.5
        kv = case.random(2, case["tokens"], case["width"], key=2 * rank + 1)
        q[0::2, :, 0], q[1::2, :, 0] = case["far"], -case["far"]
        kv[0, :, 0] = 1
        if "tilt" in case.what:
            kv[0, :, 0] -= case["tilt"] * case.random(case["tokens"], key=100 + rank).sigmoid()
            kv[0, -(case["tokens"] // case["pieces"]) :, 0] = 1 + case["tilt"]
        arguments.append((q, kv, case["pieces"]))
    return arguments


def seen(q: Tensor, kv: Tensor, places: Tensor, key_places: Tensor) -> tuple[Tensor, Tensor]:
    """What these queries see of these keys, each of both at its place in the sequence: (mean, log_sum)."""
    may = (places[:, None] >= key_places) & (key_places >= PADDING)
    scores = (q @ kv[0].T).masked_fill(~may, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ kv[1], scores.logsumexp(-1)


def play(attempt: Any, group: Group, q: Tensor, kv: Tensor, pieces: int) -> Any:
    """Ring attention, forward: keys and values go round, and the attempt merges what the queries see of each piece,
    the last piece of a part first."""
    n, me, tokens = group.size, group.rank, kv.shape[1]

    def blocks() -> Iterator[tuple[Tensor, Tensor]]:
        held, places = kv, torch.arange(tokens)
        for hop in range(n):
            for piece in reversed(places.chunk(pieces)):
                yield seen(q, held[:, piece], me * tokens + places, (me - hop) % n * tokens + piece)
            if hop < n - 1:
                held = group.exchange(held, to=(me + 1) % n, source=(me - 1) % n)

    mean, log_sum = attempt(blocks())
    return {"mean": mean, "log_sum": log_sum}


def answer(case: Case, inputs: Inputs) -> Answers:
    """One softmax over all keys, in float64."""
    kv = torch.cat([kv for _, kv, _ in inputs], dim=1).double()
    places = torch.arange(kv.shape[1])
    answers = []
    for (q, _, _), rank_places in zip(inputs, places.chunk(case.n_ranks), strict=True):
        mean, log_sum = seen(q.double(), kv, rank_places, places)
        answers.append({"mean": mean.to(case.dtype), "log_sum": log_sum.to(case.dtype)})
    return answers


def block_bytes(case: Case, rank: int) -> int:
    """Bytes of a rank's keys and values."""
    return int(2 * case["tokens"] * case["width"] * case.item_bytes)


def mean_bytes(case: Case) -> int:
    """Bytes of one mean, [H, T, W]."""
    return int(case["heads"] * case["tokens"] * case["width"] * case.item_bytes)


PROBLEM = exercise(
    __name__,
    merge_blocks,
    tolerance=(1e-4, 1e-4),
    laws=(
        sends(
            lambda case, rank: (case.n_ranks - 1) * block_bytes(case, rank),
            "keys and values go round once: each rank passes on n - 1 blocks",
            only=("send",),
        ),
        peak(
            lambda case, rank: MOST_MEANS * mean_bytes(case) + 2 * block_bytes(case, rank) + ROOM_BYTES,
            f"a rank never holds more than {MOST_MEANS} means at once, however many blocks come",
            NOISE_BYTES,
        ),
    ),
)
