"""08.4: the next unit travels while this one computes, and no more than the next."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Complaint, Inputs, exercise, order, peak, sends
from labkit.course.exercises.problems.p08_2_gather_and_free.exercise import (
    cases as cases_of_units,
    inputs,
    law,
    unit_bytes,
)
from labkit.course.judge.run_record import Event, RunRecord, mark, weigh

ROOM_BYTES = 24 << 10


def forward_with_prefetch(x: Tensor, shards: list[Tensor], layer: Callable[..., Tensor], group: Group) -> Tensor:
    """x after all units, each gathered while the one before it computes.   [rows, d] -> [rows, d]

    shards[i] is this rank's run of unit i; all runs joined are its whole weights: x = layer(x, whole).   [k] -> [n*k]
    The gather of unit i + 1 is started before unit i computes, and waited for only after unit i has computed; that of
    unit i + 2 is started after unit i has computed. So at most two units are held at a time: drop one when it is done.
    Autograd is off here: a tensor that no name points to is gone."""
    coming = group.all_gather_start(shards[0])
    for i in range(len(shards)):
        whole = coming.wait()
        if i + 1 < len(shards):
            coming = group.all_gather_start(shards[i + 1])
        x = layer(x, whole)
    return x


class Awaited:
    """A gather under way that puts a mark in the record when the attempt waits for it."""

    def __init__(self, group: Group, work: Any, words: str):
        self.group, self.work, self.words = group, work, words

    def wait(self) -> Any:
        """Put the mark, then wait."""
        mark(self.group, self.words)
        return self.work.wait()

    @property
    def done(self) -> bool:
        """As in Work. To ask counts as waiting."""
        mark(self.group, self.words)
        return bool(self.work.done)


class Told(Group):
    """A group that puts marks in the record where a gather is started and waited for, which messages do not show."""

    gathers = 0

    def all_gather_start(self, x: Tensor, into: Tensor | None = None) -> Any:
        """As in Group."""
        number = self.gathers
        mark(self, f"gather {number} is started")
        work = super().all_gather_start(x, into)
        self.gathers = number + 1  # in a world of one `all_gather` below has counted it, too
        return Awaited(self, work, f"gather {number} is waited for")

    def all_gather(self, x: Tensor) -> Tensor:
        """As in Group, without marks: nothing can come between its start and its end."""
        self.gathers += 1
        return super().all_gather(x)


def play(attempt: Any, group: Group, x: Tensor, shards: list[Tensor]) -> Any:
    """Run forward, with a mark before and after each unit computes."""
    calls = [0]

    def layer(x: Tensor, whole: Tensor) -> Tensor:
        if not calls[0]:
            weigh(group)  # an attempt that gathers everything first shows here, one that never lets go only in the peak
        mark(group, f"unit {calls[0]} computes")
        y = torch.tanh(x @ whole.view(x.shape[1], -1))
        mark(group, f"unit {calls[0]} has computed")
        calls[0] += 1
        return y

    marking_group = Told(group.axis, group.ranks, group.rank, group.wire, group.algorithms, group.ledger)
    with torch.no_grad():
        return attempt(x, shards, layer, marking_group)


def answer(case: Case, inputs: Inputs) -> Answers:
    """The result of forward with all units whole, in float64."""
    results = []
    for x, _ in inputs:
        y = x.double()
        for i in range(case["units"]):
            y = (y @ torch.cat([shards[i] for _, shards in inputs]).double().reshape(y.shape[1], -1)).tanh()
        results.append(y.to(case.dtype))
    return results


def in_turn(record: RunRecord) -> Complaint | None:
    """A Complaint unless each gather is one unit ahead: it is started before the unit before it computes and waited for
    after, and no gather is started further ahead."""
    for rank in range(record.case.n_ranks):
        at: dict[str, Event] = {}
        for event in record.marks(rank):
            at.setdefault(event.what, event)
        for i in range(record.case["units"] - 1):
            wanted = [f"gather {i + 1} is started", f"unit {i} computes", f"unit {i} has computed",
                      f"gather {i + 1} is waited for"]  # fmt: skip
            if i:
                wanted = [f"unit {i - 1} has computed", *wanted]
            for first, then in zip(wanted, wanted[1:], strict=False):
                if first not in at or then not in at:
                    return Complaint(f"{first}, then {then}", "they do not both happen", rank)
                if at[first].number > at[then].number:
                    return Complaint(f"{first}, then {then}", f"{then} comes first", rank, (at[then].number,))
    return None


def cases() -> list[Case]:
    """Those of 08.2, and a model of a single unit, behind which nothing is left to be gathered."""
    return [*cases_of_units(), Case.of(2, width=800, units=1)]


PROBLEM = exercise(
    __name__,
    forward_with_prefetch,
    inputs=inputs,
    laws=(
        sends(law, "each rank sends (n-1)/n S bytes: every unit is gathered once", only=("all_gather",)),
        peak(
            lambda case, rank: 2.3 * unit_bytes(case) + ROOM_BYTES,
            "a rank holds two whole units at the peak: the one that computes and the next",
        ),
        order(
            "the gather of unit i + 1 is started before unit i computes and waited for after; that of i + 2 later",
            in_turn,
        ),
    ),
)
