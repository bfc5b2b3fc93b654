"""03.3: an all-gather from send and recv alone, on a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.problem import Mutant, Problem, Star
from labkit.course.judge.case import Case
from labkit.course.judge.laws import highest_peak, peak, sends
from labkit.plan.collectives import sent_bytes

SLACK_BYTES = 32 << 10


def ring_all_gather(x: Tensor, group: Group) -> Tensor:
    """The parts of all ranks, joined along dim 0 in rank order, on every rank.   [k, d] -> [n*k, d]

    Talk to your neighbours on the ring only: send to the right one, rank + 1, and in each of n - 1 steps one part."""
    n, me = group.size, group.rank
    parts = [x] * n
    for step in range(n - 1):
        give, take = (me - step) % n, (me - step - 1) % n
        parts[take] = group.exchange(parts[give], to=(me + 1) % n, source=(me - 1) % n)
    return torch.cat(parts)


def cases() -> Sequence[Case]:
    """Worlds of 1 to 4 ranks; parts of 50 KB and more, so that what is held can be told from a message's scratch."""
    return [
        Case.of(3, rows=300, width=60),
        Case.of(4, torch.float64, rows=90, width=100),
        Case.of(2, torch.int64, rows=110, width=70),
        Case.of(1, rows=200, width=80),
    ]


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """A part for each rank."""
    return [(case.random(case["rows"], case["width"], key=rank),) for rank in range(case.n_ranks)]


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """All parts, joined."""
    return [torch.cat([x for (x,) in given])] * case.n_ranks


def whole(case: Case) -> int:
    """Bytes of the result."""
    return int(case.n_ranks * case["rows"] * case["width"] * case.item_bytes)


def law(case: Case, rank: int) -> float:
    """(n-1)/n N."""
    return sent_bytes("ring", "all_gather", case.n_ranks, whole(case), rank, case.item_bytes)


PROBLEM = Problem(
    key="03.3",
    title="An all-gather on a ring",
    story="""
After a reduce-scatter each rank has one finished part, and in sharded training each rank owns one part of the weights.
Now everybody wants all of it. On a ring nobody talks to a stranger: each hands to the right what came in from the left
one step before, and after n - 1 steps every part has been everywhere, having crossed each link only once.
""",
    objectives=("pass on what came last, not what is yours", "parts end in rank order, whoever gathers"),
    difficulty=2,
    importance=5,
    minutes=15,
    reference=ring_all_gather,
    cases=cases,
    inputs=inputs,
    answer=answer,
    laws=(
        sends(
            law,
            "each rank sends (n-1)/n N bytes, to its right neighbour, in n - 1 messages",
            only=("send",),
            to=lambda case, rank: {(rank + 1) % case.n_ranks},
            messages=lambda case, rank: case.n_ranks - 1,
        ),
        peak(
            lambda case, rank: 3 * whole(case) + SLACK_BYTES,
            "no rank ever holds more than three times the result",
        ),
    ),
    library="comm.ring.all_gather",
    hints=(
        "In step 0 give your own part, in every later step the part that has just come. Whose part is it?",
        "After s steps you take the part of rank (me - s - 1) % n. `group.exchange(part, to=right, source=left)` sends "
        "and receives at once.",
        "parts = [x] * n; for step in range(n - 1): give = (me - step) % n; take = (me - step - 1) % n; exchange into "
        "parts[take]; at the end join",
    ),
    mutants=(
        Mutant(
            "parts are joined in the order in which they came, not by rank",
            "values",
            instead="""
            import torch

            def ring_all_gather(x, group):
                n, me, parts = group.size, group.rank, [x]
                for step in range(n - 1):
                    parts.append(group.exchange(parts[-1], to=(me + 1) % n, source=(me - 1) % n))
                return torch.cat(parts)
        """,
        ),
        Mutant(
            "every rank gives its own part in every step, so nobody sees more than its left neighbour's",
            "values",
            (("group.exchange(parts[give]", "group.exchange(x"),),
        ),
        Mutant(
            "the ring is one step short: a part visits all ranks but the last",
            "values",
            (("range(n - 1)", "range(n - 2)"),),
        ),
        Mutant(
            "what comes is taken for the part of the right neighbour, but it is the left one's",
            "values",
            (("(me - step) % n, (me - step - 1) % n", "(me + step) % n, (me + step + 1) % n"),),
        ),
        Mutant(
            "everything gathered so far is sent on in each step, so the messages grow",
            "wire",
            instead="""
            import torch

            def ring_all_gather(x, group):
                n, me, have = group.size, group.rank, x
                for step in range(n - 1):
                    came = group.exchange(have, to=(me + 1) % n, source=(me - 1) % n)
                    have = torch.cat([came, x])
                return have.roll(-(n - 1 - me) * len(x), 0)
        """,
        ),
        Mutant(
            "each rank sends its part to everybody itself: as many bytes, but over links that a ring does not have",
            "wire",
            instead="""
            import torch

            def ring_all_gather(x, group):
                n, me = group.size, group.rank
                sent = [group.send(x, to) for to in range(n) if to != me]
                parts = [x if source == me else group.recv(source) for source in range(n)]
                for each in sent:
                    each.wait()
                return torch.cat(parts)
        """,
        ),
        Mutant(
            "the group's own collective does the work",
            "wire",
            instead="""
            def ring_all_gather(x, group):
                return group.all_gather(x)
        """,
        ),
        Mutant(
            "everybody first waits for its left neighbour, so nobody sends",
            "liveness",
            (
                (
                    "parts[take] = group.exchange(parts[give], to=(me + 1) % n, source=(me - 1) % n)",
                    "parts[take] = group.recv((me - 1) % n); group.send(parts[give], (me + 1) % n).wait()",
                ),
            ),
        ),
    ),
    star=Star(
        "each part lands where it belongs, so that a rank holds the result once and little else",
        highest_peak,
        lambda case: whole(case) + SLACK_BYTES,
        """
import torch
from torch import Tensor
from labkit import Group

def ring_all_gather(x: Tensor, group: Group) -> Tensor:
    n, me = group.size, group.rank
    out = x.new_empty(n * x.shape[0], x.shape[1])
    parts = out.chunk(n)
    parts[me].copy_(x)
    for step in range(n - 1):
        give, take = (me - step) % n, (me - step - 1) % n
        group.exchange(parts[give], to=(me + 1) % n, source=(me - 1) % n, into=parts[take])
    return out
""",
    ),
)
