"""02.5: a barrier from messages alone, in as many rounds as the number of ranks has bits."""

from collections.abc import Iterator
from typing import Any

import torch

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Complaint, Inputs, Law, Star, exercise, order, sends
from labkit.course.judge.run_record import TAKEN, Event, RunRecord, aside, mark, marking_receives

BARRIERS, ITEM = 3, 8
EVERYBODY = "nobody is through before it has heard of everybody"
HERE, THROUGH = "is here", "is through"


def barrier_of_messages(group: Group) -> None:
    """Return when every rank of the group has called this, and not before.

    A rank has to hear of each other one: from itself, or from somebody who has heard of it since it came. What it
    receives counts; that a send is over tells nothing. With `send` and `recv` only (`exchange` is both). A message may
    be empty, and holds at most 8 bytes; each rank sends at most ceil(log2 n). No chain of messages, each sent after
    the one before was received, is longer than 2 ceil(log2 n)."""
    n, me, step = group.size, group.rank, 1
    while step < n:
        group.exchange(torch.empty(0, device=group.device), to=(me + step) % n, source=(me - step) % n)
        step *= 2


def cases() -> list[Case]:
    """Worlds of 1 to 7 ranks."""
    return [Case.of(4), Case.of(5), Case.of(3).among(Case.of(6), Case.of(7)), Case.of(2), Case.of(1)]


def play(attempt: Any, group: Group) -> Any:
    """Run several barriers, with marks in the record where a rank arrives, has received a message, and is through."""
    heard = marking_receives(group)
    ours = aside(group)
    for _ in range(BARRIERS):
        mark(group, HERE)
        attempt(heard)
        mark(group, THROUGH)
        ours.barrier()
    return "through"


def answer(case: Case, inputs: Inputs) -> Answers:
    """A barrier returns nothing; the laws of order judge whether it waited for everybody."""
    return ["through"] * case.n_ranks


def rounds(case: Case) -> int:
    """ceil(log2 n)."""
    return (case.n_ranks - 1).bit_length()


def followed(record: RunRecord) -> Iterator[tuple[Event, set[int], int]]:
    """For each mark (the mark, the ranks that its rank has heard of in this barrier, itself included, the length of the
    longest chain of messages behind that). A message carries what its sender knew when it was sent."""
    n = record.case.n_ranks
    knows, deep = [{rank} for rank in range(n)], [0] * n
    carried: dict[tuple[int, int], list[tuple[set[int], int]]] = {}
    for event in record.events:
        rank = event.rank
        if event.kind == "message" and event.to is not None:
            carried.setdefault((rank, event.to), []).append((set(knows[rank]), deep[rank] + 1))
        elif event.kind == "mark":
            if event.what == HERE:
                knows[rank], deep[rank] = {rank}, 0
            elif event.what.startswith(TAKEN):
                news, length = carried[int(event.what.split()[-1]), rank].pop(0)
                knows[rank], deep[rank] = knows[rank] | news, max(deep[rank], length)
            yield event, knows[rank], deep[rank]


def too_early(record: RunRecord) -> Complaint | None:
    """The lowest rank that was through without having heard of all."""
    n = record.case.n_ranks
    early = [(event.rank, event.number, sorted({*range(n)} - knows)) for event, knows, _ in followed(record)
             if event.what == THROUGH and len(knows) < n]  # fmt: skip
    if not early:
        return None
    rank, number, missing = min(early)
    seen = f"it was through without having heard of rank {', '.join(map(str, missing))}"
    return Complaint(EVERYBODY, seen, rank, (number,))


def too_long(record: RunRecord) -> Complaint | None:
    """A Complaint if a chain of messages is longer than the way up a tree and down again."""
    longest, rank, number = max((deep, -event.rank, event.number) for event, _, deep in followed(record))
    if longest <= 2 * rounds(record.case):
        return None
    return Complaint(f"chains of at most {2 * rounds(record.case)} messages", f"a chain of {longest}", -rank, (number,))


def too_many(record: RunRecord) -> Complaint | None:
    """A Complaint about the rank that sends the most messages, if they are more than the rounds."""
    sent = [len(record.sent(rank)) for rank in range(record.case.n_ranks)]
    most = BARRIERS * rounds(record.case)
    if max(sent) <= most:
        return None
    seen = f"rank by rank {', '.join(map(str, sent))} messages in {BARRIERS} barriers"
    return Complaint(f"at most {most} of each rank", seen, sent.index(max(sent)))


PROBLEM = exercise(
    __name__,
    barrier_of_messages,
    laws=(
        sends(
            lambda case, rank: (0, BARRIERS * rounds(case) * ITEM),
            "messages of 8 bytes at most, and no collective",
            only=("send",),
        ),
        Law("wire", "each rank sends at most ceil(log2 n) messages a barrier", too_many),
        order(EVERYBODY, too_early),
        order("no chain of messages is longer than 2 ceil(log2 n)", too_long),
    ),
    star=Star(
        "messages of a barrier over all ranks, no more than 2 (n-1)",
        lambda record: sum(event.kind == "message" for event in record.events) / BARRIERS,
        lambda case: 2 * (case.n_ranks - 1),
        unit="messages",
    ),
)
