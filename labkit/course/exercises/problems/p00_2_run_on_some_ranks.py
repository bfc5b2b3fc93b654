"""00.2: some ranks work together, and the others are left alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.problem import Mutant, Problem, Star
from labkit.course.judge.case import Case
from labkit.course.judge.laws import sends
from labkit.course.judge.run_record import RunRecord


def sum_among_chosen(x: Tensor, chosen: list[int], group: Group) -> Tensor | None:
    """The sum of x over the ranks in `chosen`, a new tensor on each of them.   [k, d] -> [k, d]

    `chosen` is the same on all ranks, in any order, without doubles; at least one rank is in it. A rank that is not in
    it gives None: it sends nothing, receives nothing and waits for nobody. The chosen talk to the chosen only, with
    messages (`send`, `recv`): a collective of `group` would wait for every rank of it. Each sends x's bytes at most
    once to each of the others."""
    if group.rank not in chosen:
        return None
    others = [rank for rank in chosen if rank != group.rank]
    sending = [group.send(x, to=rank) for rank in others]
    total = x.clone()
    for rank in others:
        total = total + group.recv(rank)
    for each in sending:
        each.wait()
    return total


def cases() -> Sequence[Case]:
    """Worlds of 1 to 4 ranks, of which some are chosen."""
    return [Case.of(4, chosen=3, rows=3, width=5), Case.of(3, torch.int64, chosen=2, rows=1, width=4),
            Case.of(4, torch.float64, chosen=4, rows=2, width=3), Case.of(3, chosen=1, rows=2, width=2),
            Case.of(1, chosen=1, rows=2, width=2)]  # fmt: skip


def drawn(case: Case) -> list[int]:
    """Who is chosen, in no order."""
    return random.Random(case.seed).sample(range(case.n_ranks), case["chosen"])


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """A tensor of its own for each rank, and who is chosen."""
    return [(case.random(case["rows"], case["width"], key=rank), drawn(case)) for rank in range(case.n_ranks)]


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """The sum of some."""
    chosen = drawn(case)
    total = torch.stack([given[rank][0] for rank in chosen]).sum(0)
    return [total if rank in chosen else None for rank in range(case.n_ranks)]


def size(case: Case) -> int:
    """Bytes of a rank's tensor."""
    return int(case["rows"] * case["width"] * case.item_bytes)


def everything(record: RunRecord) -> float:
    """Bytes that all ranks sent together."""
    return sum(record.sent_bytes(rank) for rank in range(record.case.n_ranks))


TO_ONE_AND_BACK = """
from torch import Tensor
from labkit import Group


def sum_among_chosen(x: Tensor, chosen: list[int], group: Group) -> Tensor | None:
    first, *rest = chosen
    if group.rank == first:
        total = x.clone()
        for rank in rest:
            total = total + group.recv(rank)
        for each in [group.send(total, to=rank) for rank in rest]:
            each.wait()
        return total
    if group.rank in rest:
        group.send(x, to=first).wait()
        return group.recv(first)
    return None
"""

PROBLEM = Problem(
    key="00.2",
    title="Run on some ranks",
    story="""
Evaluation runs on two ranks of eight, a log is written by one, a repair involves three. `%%ranks 0,2` does it from a
cell; inside a program it is an `if`. The danger is in what stands behind that `if`: a collective waits for *every* rank
of its group, also for those that have gone past, and then nothing moves any more.
""",
    objectives=("who takes part is settled alike on every rank", "no collective behind a condition on the rank"),
    difficulty=2,
    importance=4,
    minutes=15,
    reference=sum_among_chosen,
    cases=cases,
    inputs=inputs,
    answer=answer,
    laws=(
        sends(
            lambda case, rank: (0, (case["chosen"] - 1) * size(case) if rank in drawn(case) else 0),
            "the chosen send messages to the chosen, each at most (k-1) times its tensor; the others send nothing",
            only=("send",),
            to=lambda case, rank: {peer for peer in drawn(case) if peer != rank} if rank in drawn(case) else set(),
        ),
    ),
    star=Star(
        "bytes that all ranks send together, no more than 2 (k-1) tensors",
        everything,
        lambda case: 2 * (case["chosen"] - 1) * size(case),
        TO_ONE_AND_BACK,
    ),
    hints=(
        "Whoever is not chosen leaves in the first line. The others know from the list whom to talk to.",
        "A chosen rank sends x to each other chosen rank and receives a tensor from each. Start all sends first, wait "
        "for them last.",
        "if not chosen: return None;  sending = [group.send(...) for each other];  total = x + what is received;  wait "
        "for each of sending",
    ),
    mutants=(
        Mutant("a collective is called by the chosen only, and waits for the others for ever", "liveness", instead="""
            def sum_among_chosen(x, chosen, group):
                if group.rank not in chosen:
                    return None
                return group.all_reduce(x)
        """),
        Mutant("all ranks take part: those that are not chosen bring zeros", "wire", instead="""
            def sum_among_chosen(x, chosen, group):
                total = group.all_reduce(x if group.rank in chosen else 0 * x)
                return total if group.rank in chosen else None
        """),
        Mutant("those that are not chosen do not leave, and wait for messages that nobody sends them", "liveness",
               (("    if group.rank not in chosen:\n        return None\n", ""),)),
        Mutant("each waits until its message has been taken before it takes any", "liveness",
               (("group.send(x, to=rank) for", "group.send(x, to=rank).wait() for"),
                ("        each.wait()\n", "        pass\n"))),
        Mutant("a rank forgets its own tensor: only the others' are summed", "values",
               (("total = x.clone()", "total = 0 * x"),)),
        Mutant("the sum is over all ranks, chosen or not", "values", instead="""
            def sum_among_chosen(x, chosen, group):
                total = group.all_reduce(x)
                return total if group.rank in chosen else None
        """),
        Mutant("only the first of the chosen has the sum, and does not hand it back", "values", instead="""
            def sum_among_chosen(x, chosen, group):
                if group.rank not in chosen:
                    return None
                if group.rank == chosen[0]:
                    return x + sum(group.recv(rank) for rank in chosen[1:])
                group.send(x, to=chosen[0]).wait()
                return x.clone()
        """),
        Mutant("the sum is made in the input", "values",
               (("total = x.clone()", "total = x"), ("total = total + group.recv(rank)", "total += group.recv(rank)"))),
    ),
)  # fmt: skip
