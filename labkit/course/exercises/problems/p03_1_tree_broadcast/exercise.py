"""03.1: a broadcast in few rounds: whoever has the tensor passes it on."""

import math
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Complaint, Inputs, Law, exercise
from labkit.course.judge.run_record import RunRecord


def tree_broadcast(x: Tensor, group: Group, source: int) -> Tensor:
    """The x of rank `source`, on every rank.   same shape; the x of other ranks has it too, but other numbers

    `send` and `recv` only, whole tensors only. Every rank but the source receives exactly one message, the source none.
    In a round a rank sends at most one message, and only what it had before the round. End after ceil(log2 n) rounds,
    for any n and any source."""
    n, distance = group.size, 1
    place = (group.rank - source) % n
    while distance < n:
        if place < distance and place + distance < n:
            group.send(x, (place + distance + source) % n).wait()
        elif distance <= place < 2 * distance:
            x = group.recv((place - distance + source) % n)
        distance *= 2
    return x


def cases() -> list[Case]:
    """Worlds of 1 to 7 ranks, and sources that are not rank 0: a star and a tree differ from 4 ranks on."""
    return [
        Case.of(4, source=1, rows=3, width=5),
        Case.of(3, source=2, rows=7, width=2).among(
            Case.of(5, torch.bfloat16, source=3, rows=2, width=4), Case.of(7, torch.int32, source=6, rows=4, width=3)
        ),
        Case.of(4, torch.float16, source=0, rows=1, width=6),
        Case.of(2, source=1, rows=5, width=3),
        Case.of(1, source=0, rows=4, width=2),
    ]


def inputs(case: Case) -> Inputs:
    """A tensor of its own for each rank: only the source's is wanted."""
    return [(case.random(case["rows"], case["width"], key=rank), case["source"]) for rank in range(case.n_ranks)]


def play(attempt: Any, group: Group, x: Tensor, source: int) -> Any:
    """Call the attempt as labkit's own broadcast is called: the source comes after the group."""
    return attempt(x, group, source)


def answer(case: Case, inputs: Inputs) -> Answers:
    """The source's tensor on every rank."""
    return [inputs[case["source"]][0]] * case.n_ranks


def rounds(record: RunRecord) -> list[int]:
    """The round of each message, counted from 1: a rank sends one message in a round, and only in rounds after the one
    in which it received the tensor."""
    free = [0] * record.case.n_ranks
    numbers = []
    for event in record.events:
        if event.kind == "message" and event.to is not None:
            free[event.rank] += 1
            numbers.append(free[event.rank])
            free[event.to] = max(free[event.to], free[event.rank])
    return numbers


def few_rounds(record: RunRecord) -> Complaint | None:
    """A Complaint unless every rank but the source receives one whole tensor, the last in round ceil(log2 n)."""
    n, source = record.case.n_ranks, record.case["source"]
    whole = record.case["rows"] * record.case["width"] * record.case.item_bytes
    sent = [event for event in record.events if event.kind in ("message", "collective")]
    for event in sorted(sent, key=lambda event: event.rank):  # which rank comes first in time is chance
        if event.what != "send":
            return Complaint("only send and recv", f"{event.what} was called", event.rank, (event.number,))
        if event.n_bytes != whole:
            return Complaint(f"messages of {whole} bytes", f"one of {event.n_bytes} bytes", event.rank, (event.number,))
    for rank in range(n):
        reached = [event for event in sent if event.to == rank]
        if len(reached) != (rank != source):
            wanted = "no message to the source" if rank == source else f"one message to rank {rank}"
            return Complaint(wanted, f"{len(reached)} sent to it", rank, tuple(event.number for event in reached))
    limit, took = math.ceil(math.log2(n)), rounds(record)
    late = tuple(event.number for event, at in zip(sent, took, strict=False) if at > limit)
    if late:
        busy = max(sum(event.rank == rank for event in sent) for rank in range(n))
        seen = f"{max(took)} rounds; one rank sends {busy} messages"
        return Complaint(f"the last rank is reached in round {limit}", seen, None, late)
    return None


PROBLEM = exercise(
    __name__,
    tree_broadcast,
    laws=(
        Law(
            "wire",
            "every rank but the source receives one message, the whole tensor, and the last in round ceil(log2 n)",
            few_rounds,
        ),
    ),
    library="comm.tree.broadcast",
)
