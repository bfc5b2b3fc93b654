"""08.5: shards that n ranks saved are loaded by m ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Complaint, Inputs, Law, exercise, peak
from labkit.course.judge.run_record import RunRecord, mark

ROOM_BYTES = 16 << 10
ITEM = 4


def load_resharded(read: Callable[[int], Tensor], n_saved: int, numel: int, group: Group) -> Tensor:
    """This rank's shard, float32, of a flat row of `numel` elements that `n_saved` ranks have saved.   -> [k]

    read(j) reads the shard that rank j saved, whole: elements j * s up to, but not, (j + 1) * s of the row, where s is
    numel / n_saved rounded up. What lies behind element numel - 1 is padding of that time, and has no meaning.
    The shard that is wanted holds elements rank * k to (rank + 1) * k, where k is numel / n rounded up for the n ranks
    that there are now; what lies behind element numel - 1 is zero.
    Read those shards only that hold something of it, each once. Beside the shard that is wanted, one that is read is in
    memory at a time. Nothing is sent."""
    s, k = -(-numel // n_saved), -(-numel // group.size)
    low, high = group.rank * k, min((group.rank + 1) * k, numel)
    fresh = torch.zeros(k)
    for j in range(n_saved):
        first, last = max(low, j * s), min(high, (j + 1) * s)
        if first < last:
            fresh[first - low : last - low] = read(j)[first - j * s : last - j * s]
    return fresh


def cases() -> list[Case]:
    """From more ranks to fewer, from fewer to more, and to as many; no number of ranks divides the row."""
    return [
        Case.of(3, saved=5, numel=60_004),
        Case.of(2, saved=4, numel=61_001),
        Case.of(4, saved=3, numel=50_006),
        Case.of(4, saved=2, numel=5),
        Case.of(1, saved=3, numel=20_002),
        Case.of(3, saved=3, numel=40_003),
    ]


def inputs(case: Case) -> Inputs:
    """The files of all old ranks, which everybody may read. Their padding is NaN, so that it shows where it is used."""
    s = -(-case["numel"] // case["saved"])
    row = case.random(case["saved"] * s)
    row[case["numel"] :] = torch.nan
    return [([part.clone() for part in row.split(s)], case["numel"]) for _ in range(case.n_ranks)]


def play(attempt: Any, group: Group, files: list[Tensor], numel: int) -> Any:
    """Load, with a mark in the record for each file that is read."""

    def read(j: int) -> Tensor:
        mark(group, f"reads {range(len(files))[j]}")
        return files[j].clone()

    return attempt(read, len(files), numel, group)


def answer(case: Case, inputs: Inputs) -> Answers:
    """The shards of the whole row, padded anew."""
    files, numel = inputs[0]
    row = torch.cat(files)[:numel]
    k = (numel + case.n_ranks - 1) // case.n_ranks
    return torch.cat([row, torch.zeros(case.n_ranks * k - numel)]).split(k)


def needed(case: Case, rank: int) -> list[int]:
    """The files that hold a part of a rank's new shard: those of its first and its last element, and all between."""
    s, k = -(-case["numel"] // case["saved"]), -(-case["numel"] // case.n_ranks)
    first, last = rank * k, min((rank + 1) * k, case["numel"]) - 1
    return list(range(first // s, last // s + 1)) if first <= last else []


def read_once(record: RunRecord) -> Complaint | None:
    """A Complaint unless each rank reads the files that it needs once, no others, and sends nothing."""
    for rank in range(record.case.n_ranks):
        if sent := record.sent(rank):
            return Complaint("nothing is sent", f"{sent[0].words}", rank, (sent[0].number,))
        wanted, read = needed(record.case, rank), sorted(int(event.what.split()[-1]) for event in record.marks(rank))
        if read != wanted:
            at = tuple(event.number for event in record.marks(rank))
            return Complaint(f"reads the files of old ranks {wanted}, once each", f"reads {read}", rank, at)
    return None


def most(case: Case, rank: int) -> float:
    """The most bytes that may be held: a new shard, an old one, and a tenth more."""
    return ITEM * 1.1 * (-(-case["numel"] // case["saved"]) + -(-case["numel"] // case.n_ranks)) + ROOM_BYTES


PROBLEM = exercise(
    __name__,
    load_resharded,
    laws=(
        Law(
            "wire", "each rank reads the old shards that hold something of its own, once, and sends nothing", read_once
        ),
        peak(most, "a rank holds its new shard and one old one"),
    ),
)
