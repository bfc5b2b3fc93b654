"""00.2: some ranks work together, and the others are left alone."""

import random
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, Star, exercise, sends
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
    for work in sending:
        work.wait()
    return total


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks, of which some are chosen."""
    return [Case.of(4, chosen=3, rows=3, width=5), Case.of(3, torch.int64, chosen=2, rows=1, width=4),
            Case.of(4, torch.float64, chosen=4, rows=2, width=3), Case.of(3, chosen=1, rows=2, width=2),
            Case.of(1, chosen=1, rows=2, width=2)]  # fmt: skip


def drawn(case: Case) -> list[int]:
    """The chosen ranks, in random order."""
    return random.Random(case.seed).sample(range(case.n_ranks), case["chosen"])


def inputs(case: Case) -> Inputs:
    """A tensor of its own for each rank, and the chosen ranks."""
    return [(case.random(case["rows"], case["width"], key=rank), drawn(case)) for rank in range(case.n_ranks)]


def play(attempt: Any, group: Group, x: Tensor, chosen: list[int]) -> Any:
    """Run the attempt; a tensor that shares x's memory is no new one."""
    total = attempt(x, chosen, group)
    alias = isinstance(total, Tensor) and total.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    return "x itself, which the caller may change: a new tensor was asked for" if alias else total


def answer(case: Case, inputs: Inputs) -> Answers:
    """The sum over the chosen ranks on each of them, and None on the others."""
    chosen = drawn(case)
    total = torch.stack([inputs[rank][0] for rank in chosen]).sum(0)
    return [total if rank in chosen else None for rank in range(case.n_ranks)]


def size(case: Case) -> int:
    """Bytes of a rank's tensor."""
    return int(case["rows"] * case["width"] * case.item_bytes)


def everything(record: RunRecord) -> float:
    """Bytes that all ranks sent together."""
    return sum(record.sent_bytes(rank) for rank in range(record.case.n_ranks))


PROBLEM = exercise(
    __name__,
    sum_among_chosen,
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
    ),
)
