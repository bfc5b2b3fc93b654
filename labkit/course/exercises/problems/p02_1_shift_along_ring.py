"""02.1: every rank gets the tensor of a rank some places away."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.problem import Mutant, Problem
from labkit.course.judge.case import Case
from labkit.course.judge.laws import sends


def shift_along_ring(x: Tensor, by: int, group: Group) -> Tensor:
    """Everybody's x moves `by` places to the right on the ring 0, 1, ..., n-1, 0: rank r ends with a new tensor, a copy
    of the x of the rank `by` places to its left.   [k of this rank, d] -> [k of that rank, d]

    `by` is the same on all ranks, and any whole number: negative is to the left, more than n goes round. Every x goes
    straight to where it belongs, in one message; if it belongs where it is, nothing is sent. Ranks may hold different
    numbers of rows: a message carries its shape."""
    n, me = group.size, group.rank
    if by % n == 0:
        return x.clone()
    return group.exchange(x, to=(me + by) % n, source=(me - by) % n)


def cases() -> Sequence[Case]:
    """Worlds of 1 to 4 ranks; `places` is what `by` comes to on the ring."""
    return [Case.of(3, places=2, rows=(3, 1, 2)), Case.of(4, torch.float64, places=1, rows=(2, 2, 5, 1)),
            Case.of(4, torch.int64, places=0, rows=(1, 2, 1, 3)), Case.of(2, torch.bfloat16, places=1, rows=(4, 2)),
            Case.of(1, places=0, rows=(3,))]  # fmt: skip


def distance(case: Case) -> int:
    """`by`: some number of places, and some times round."""
    return int(case["places"] + case.n_ranks * random.Random(case.seed).choice((-2, -1, 1, 2)))


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """A tensor of its own for each rank."""
    return [(case.random(rows, 5, key=rank), distance(case)) for rank, rows in enumerate(case["rows"])]


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """Python's own lists, turned."""
    order = [x for x, _ in given]
    return [order[index - case["places"]] for index in range(case.n_ranks)]


PROBLEM = Problem(
    key="02.1",
    title="A ring shift",
    story="""
Nearly everything in this course turns on a ring: reduce-scatter, all-gather, attention over long sequences, pipelines
that close. The element is always the same. Everybody hands a tensor on and takes one, at once. Nobody is first, so
nobody may wait for somebody else to begin.
""",
    objectives=("send and receive at the same time", "neighbours by arithmetic modulo n"),
    difficulty=1,
    importance=5,
    minutes=10,
    reference=shift_along_ring,
    cases=cases,
    inputs=inputs,
    answer=answer,
    laws=(
        sends(
            lambda case, rank: case["rows"][rank] * 5 * case.item_bytes if case["places"] else 0,
            "each rank sends its own tensor once, straight to the rank that wants it; nothing if that is itself",
            only=("send",),
            to=lambda case, rank: {(rank + case["places"]) % case.n_ranks},
            messages=lambda case, rank: 1,
        ),
    ),
    hints=(
        "Rank r gives to r + by and takes from r - by, both modulo n. Both at once, or the ring stands still.",
        "`group.exchange(x, to=..., source=...)` is a send and a recv that do not wait for each other. A rank cannot "
        "send to itself.",
        "if by % n == 0: return a copy;  return group.exchange(x, to=(me + ...) % n, source=(me - ...) % n)",
    ),
    mutants=(
        Mutant("it turns the wrong way: x goes to the left", "values",
               (("to=(me + by) % n, source=(me - by) % n", "to=(me - by) % n, source=(me + by) % n"),)),
        Mutant("everybody waits for a message before sending one", "liveness",
               (("return group.exchange(x, to=(me + by) % n, source=(me - by) % n)",
                 "y = group.recv((me - by) % n)\n    group.send(x, (me + by) % n).wait()\n    return y"),)),
        Mutant("everybody waits until its message is taken before taking one", "liveness",
               (("return group.exchange(x, to=(me + by) % n, source=(me - by) % n)",
                 "group.send(x, (me + by) % n).wait()\n    return group.recv((me - by) % n)"),)),
        Mutant("the tensors go round from neighbour to neighbour: as many messages as places", "wire",
               (("return group.exchange(x, to=(me + by) % n, source=(me - by) % n)",
                 "for _ in range(by % n):\n        x = group.exchange(x, to=(me + 1) % n, source=(me - 1) % n)\n"
                 "    return x"),)),
        Mutant("a rank that is its own target sends to itself", "values",
               (("    if by % n == 0:\n        return x.clone()\n", ""),)),
        Mutant("ranks are not taken modulo n", "values", (("to=(me + by) % n", "to=me + by"),)),
        Mutant("by is taken for a number of places to the right, without going round", "values",
               (("    n, me = group.size, group.rank\n", "    n, me = group.size, group.rank\n"
                 "    by = max(0, min(by, n))\n"),)),
        Mutant("everybody sends to everybody, and keeps one", "wire", instead="""
            def shift_along_ring(x, by, group):
                others = [rank for rank in range(group.size) if rank != group.rank]
                sending = [group.send(x, rank) for rank in others]
                found = {rank: group.recv(rank) for rank in others}
                for each in sending:
                    each.wait()
                return found.get((group.rank - by) % group.size, x).clone()
        """),
    ),
)  # fmt: skip
