"""20.5: attention in a sliding window over ranks: only the keys and values of the halo travel."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, peak, send_first, sends
from labkit.course.judge.run_record import marking_receives
from labkit.plan.laws.halo import halo_of, readers_of

MOST_BLOCKS, MOST_SCORES, ROOM_BYTES = 3, 8, 64 << 10


def attend_in_window(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int, group: Group) -> Tensor:
    """Causal attention in a sliding window over the tokens of all ranks.   three times [H, T, W] -> [H, T, W]

    y = softmax(q k^T / sqrt(W)) v, where the query at position i of the sequence looks at the keys i - window + 1 ... i
    that exist: its own key is one of the `window`, which is at least 1. Ranks have the sequence in order: rank r has
    lengths[r] tokens, those after the tokens of rank r - 1. Some ranks may have fewer tokens than the window reaches
    back, or none. The result has the dtype of q.

    A rank receives the keys and values before its own first token that its queries look at, straight from the ranks
    that have them, and no others; a rank without tokens receives and sends nothing. There are at most two messages
    from one rank to another, one of keys and one of values. A rank has handed over all its messages before it waits
    for any, and before it returns, it has waited for its own sends, too."""
    me, kv, ends = group.rank, torch.stack([k, v]), [0, *accumulate(lengths)]
    # the first key that each rank looks at
    oldest = [max(0, end - window + 1) if own else end for end, own in zip(ends, lengths, strict=False)]
    readers = [r for r in range(me + 1, group.size) if lengths[me] and oldest[r] < ends[me + 1]]
    owners = [r for r in range(me) if lengths[r] and oldest[me] < ends[r + 1]]
    sent = [group.send(kv[:, :, max(0, oldest[r] - ends[me]) :], r) for r in readers]
    expected = [group.recv_start(r) for r in owners]
    kv = torch.cat([*(message.wait() for message in expected), kv], dim=2)  # type: ignore[list-item]
    for message in sent:
        message.wait()
    places = torch.arange(ends[me + 1] - kv.shape[2], ends[me + 1], device=q.device)
    behind = places[len(places) - lengths[me] :, None] - places
    scores = (q @ kv[0].mT * q.shape[-1] ** -0.5).masked_fill((behind < 0) | (behind >= window), -torch.inf)
    return scores.softmax(-1) @ kv[1]


def cases() -> list[Case]:
    """Worlds of 1 to 7 ranks with pieces of different lengths; windows that reach past a piece, over pieces without
    tokens, beyond the beginning of the sequence, and over a query's own key alone. In the largest world, the keys and
    values of the sequence do not fit beside one's work."""
    return [
        Case.of(2, torch.float64, lengths=(5, 4), window=3, heads=2, width=4),
        Case.of(4, lengths=(5, 2, 3, 4), window=7, heads=1, width=5).among(
            Case.of(4, lengths=(3, 1, 1, 6), window=6, heads=2, width=4),
            Case.of(5, lengths=(4, 2, 2, 3, 1), window=5, heads=1, width=6),
        ),
        Case.of(3, torch.bfloat16, lengths=(4, 6, 5), window=4, heads=2, width=8),
        Case.of(7, torch.float64, lengths=(40, 43, 38, 41, 40, 42, 39), window=24, heads=4, width=512),
        Case.of(4, torch.float64, lengths=(4, 0, 1, 6), window=5, heads=2, width=3).among(
            Case.of(3, torch.float64, lengths=(5, 0, 3), window=3, heads=1, width=4)
        ),
        Case.of(3, torch.float64, lengths=(3, 2, 4), window=1, heads=1, width=4),
        Case.of(3, lengths=(2, 3, 2), window=20, heads=2, width=4),
        Case.of(1, torch.float64, lengths=(6,), window=3, heads=2, width=4),
    ]


def inputs(case: Case) -> Inputs:
    """The queries, keys and values of each rank's tokens, the lengths of all pieces, and the window."""
    shape, lengths = (case["heads"], sum(case["lengths"]), case["width"]), list(case["lengths"])
    parts = [case.random(*shape, key=key).split(lengths, dim=1) for key in range(3)]
    return [(*(x.clone() for x in row), lengths, case["window"]) for row in zip(*parts, strict=True)]


def play(attempt: Any, group: Group, *args: Any) -> Any:
    """Run the attempt, with a mark in the record for each message that a rank has received."""
    return attempt(*args, marking_receives(group))


def answer(case: Case, inputs: Inputs) -> Answers:
    """Attention of the sequence in one process, in float64: all scores, a mask, a softmax."""
    q, k, v = (torch.cat(parts, dim=1).double() for parts in list(zip(*inputs, strict=True))[:3])
    causal = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    seen = causal & ~causal.tril(-case["window"])
    weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    return list((weights @ v).to(case.dtype).split(list(case["lengths"]), dim=1))


def token_bytes(case: Case) -> int:
    """Bytes of the keys and values of one token."""
    return int(2 * case["heads"] * case["width"] * case.item_bytes)


def law(case: Case, rank: int) -> int:
    """Bytes that a rank sends: each later rank gets the keys and values that its window reaches here."""
    return sum(len(run) for _, run in readers_of(case["lengths"], rank, case["window"])) * token_bytes(case)


def readers(case: Case, rank: int) -> set[int]:
    """The later ranks whose windows reach this rank's tokens."""
    return {reader for reader, _ in readers_of(case["lengths"], rank, case["window"])}


def most(case: Case, rank: int) -> int:
    """Bytes that a rank may hold beyond its inputs: some times the keys and values that its queries look at and those
    that it sends, and some scores, whatever the length of the sequence."""
    own = case["lengths"][rank]
    keys = own + sum(len(run) for _, run in halo_of(case["lengths"], rank, case["window"]))
    scores = case["heads"] * own * keys * case.item_bytes
    return MOST_BLOCKS * (keys * token_bytes(case) + law(case, rank)) + MOST_SCORES * scores + ROOM_BYTES


PROBLEM = exercise(
    __name__,
    attend_in_window,
    laws=(
        sends(
            law,
            "a rank sends later ranks the keys and values that their windows reach, straight to them, and no others",
            only=("send",),
            to=readers,
            messages=lambda case, rank: 2 * len(readers(case, rank)),
        ),
        peak(most, "a rank holds the keys and values of its own tokens and of its halo, not those of the sequence"),
        send_first(),
    ),
)
