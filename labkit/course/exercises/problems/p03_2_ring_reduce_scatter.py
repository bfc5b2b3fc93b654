"""03.2: a reduce-scatter from send and recv alone, on a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.problem import Mutant, Problem
from labkit.course.judge.case import Case
from labkit.course.judge.laws import sends
from labkit.plan.collectives import sent_bytes


def ring_reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """The sum of x over all ranks, cut along dim 0; this rank keeps part `group.rank`.   [n*k, d] -> [k, d]

    Talk to your neighbours on the ring only, and send n - 1 parts, not whole tensors."""
    n, me = group.size, group.rank
    parts = list(x.clone().chunk(n))
    for step in range(n - 1):
        give, take = (me - step - 1) % n, (me - step - 2) % n
        parts[take] = parts[take] + group.exchange(parts[give], to=(me + 1) % n, source=(me - 1) % n)
    return parts[me]


def cases() -> Sequence[Case]:
    """Worlds of 1 to 4 ranks."""
    return [
        Case.of(2, rows=3, width=5),
        Case.of(3, torch.float64, rows=2, width=7),
        Case.of(4, torch.int64, rows=1, width=3),
        Case.of(1, rows=4, width=2),
    ]


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """A tensor of its own for each rank."""
    return [(case.random(case.n_ranks * case["rows"], case["width"], key=rank),) for rank in range(case.n_ranks)]


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """The sum, cut."""
    return torch.stack([x for (x,) in given]).sum(0).chunk(case.n_ranks)


def law(case: Case, rank: int) -> float:
    """(n-1)/n N."""
    whole = case.n_ranks * case["rows"] * case["width"] * case.item_bytes
    return sent_bytes("ring", "reduce_scatter", case.n_ranks, whole, rank, case.item_bytes)


PROBLEM = Problem(
    key="03.2",
    title="A reduce-scatter on a ring",
    story="""
Each of n ranks holds a tensor. Rank r wants the sum of everybody's part r, and nothing else. On a ring a part starts
at its owner's right neighbour, is passed on n - 1 times, and everybody who holds it adds its own.
""",
    objectives=("send a part while another comes in", "which part is whose at each step"),
    difficulty=3,
    importance=5,
    minutes=20,
    reference=ring_reduce_scatter,
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
    ),
    library="comm.ring.reduce_scatter",
    hints=(
        "At step s everybody gives one part to the right and takes another from the left: part c must end at rank c.",
        "`group.exchange(part, to=right, source=left)` sends and receives at once. Begin with part `(me - 1) % n`.",
        "for step in range(n - 1): give = (me - step - 1) % n; take = (me - step - 2) % n; exchange; add",
    ),
    mutants=(
        Mutant(
            "the parts are passed on, but nothing is added to what comes",
            "values",
            (("parts[take] + group.exchange", "group.exchange"),),
        ),
        Mutant(
            "the ring is one step short: a part visits n - 1 ranks and not all n",
            "values",
            (("range(n - 1)", "range(n - 2)"),),
        ),
        Mutant(
            "the parts begin at their owner, so that each ends one rank too early",
            "values",
            (("(me - step - 1) % n, (me - step - 2) % n", "(me - step) % n, (me - step - 1) % n"),),
        ),
        Mutant(
            "whole tensors travel, not parts",
            "wire",
            instead="""
            def ring_reduce_scatter(x, group):
                n, me = group.size, group.rank
                total, passing = x.clone(), x.clone()
                for step in range(n - 1):
                    passing = group.exchange(passing, to=(me + 1) % n, source=(me - 1) % n)
                    total = total + passing
                return total.chunk(n)[me]
        """,
        ),
        Mutant(
            "the group's own collective does the work",
            "wire",
            instead="""
            def ring_reduce_scatter(x, group):
                return group.reduce_scatter(x)
        """,
        ),
        Mutant(
            "everybody sends to the left and waits, so nobody receives",
            "liveness",
            (
                (
                    "parts[take] + group.exchange(parts[give], to=(me + 1) % n, source=(me - 1) % n)",
                    "parts[take] + (group.send(parts[give], (me + 1) % n).wait() or group.recv((me - 1) % n))",
                ),
            ),
        ),
        Mutant(
            "the input is summed into in place",
            "values",
            (
                ("list(x.clone().chunk(n))", "list(x.chunk(n))"),
                ("parts[take] = parts[take] + group", "parts[take] += group"),
            ),
        ),
    ),
)
