"""10.2: the program of a rank under GPipe. `conveyor` runs the programs of this exercise and of 10.3."""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Complaint, Inputs, Law, exercise, order, peak
from labkit.course.judge.run_record import RunRecord, aside, mark
from labkit.plan.schedules.schedule import Action, Schedule, Span, simulate

ACTIVATION = 1 << 16
"""Numbers that a stage keeps for one micro-batch. Each rank really holds them, so that the judge can weigh them."""


def gpipe_program(rank: int, n_ranks: int, n_micro: int) -> list[Action]:
    """The actions of rank `rank` under GPipe, in order: all its forwards, then all its backwards.

    Stage r lives on rank r. `Action("F", stage, micro)` is the forward of a micro-batch in a stage, "B" the backward;
    micro-batches are 0 to n_micro - 1. Every rank gets its program from a call of its own, and runs it as it stands:
    an action waits for what it needs of the neighbours. Nobody may wait longer than GPipe's bubble."""
    micros = range(n_micro)
    forwards = [Action("F", rank, i) for i in micros]
    return forwards + [Action("B", rank, i) for i in micros]


def cases() -> Sequence[Case]:
    """Pipelines of 1 to 5 ranks; more and fewer micro-batches than ranks, and a single one."""
    return [
        Case.of(3, micros=(4, 8)),
        Case.of(4, micros=(2, 3)),
        Case.of(2, micros=(2, 6)),
        Case.of(5, micros=(5, 7)),
        Case.of(3, micros=(1, 1)),
        Case.of(1, micros=(1, 5)),
    ]


def micros_of(case: Case) -> int:
    """The number of micro-batches, drawn from the range of the case."""
    return random.Random(case.seed).randint(*case["micros"])


def inputs(case: Case) -> Inputs:
    """The number of micro-batches, the same for every rank."""
    return [(micros_of(case),)] * case.n_ranks


def conveyor(attempt: Any, group: Group, n_micro: int) -> Any:
    """Run this rank's program with real messages: an activation is held from its forward to its backward.

    If any rank's program lacks an action, or has a backward before its forward, no program is run: the other ranks
    would wait for ever."""
    rank, last, belt = group.rank, group.size - 1, aside(group)
    programs = [[str(action) for action in attempt(other, group.size, n_micro)] for other in range(group.size)]
    program = programs[rank]
    reply = {"actions": sorted(program), "program": program}
    if not all(can_be_run(stage, actions, n_micro) for stage, actions in enumerate(programs)):
        return reply
    held: dict[int, Any] = {}
    for action in program:
        _, kind, micro = parsed(action)
        mark(group, action)
        before, after = (rank - 1, rank + 1) if kind == "F" else (rank + 1, rank - 1)
        tag = 2 * micro + (kind == "B")
        if 0 <= before <= last:
            belt.recv(before, tag)
        if kind == "F":
            held[micro] = torch.ones(ACTIVATION)
        else:
            held.pop(micro, None)
        if 0 <= after <= last:
            belt.send(torch.ones(1), after, tag)
    return reply


def can_be_run(stage: int, program: list[str], n_micro: int) -> bool:
    """True if each micro-batch goes forward and backward once, in this order."""
    pairs = [(f"{stage}F{i}", f"{stage}B{i}") for i in range(n_micro)]
    whole = sorted(program) == sorted(action for pair in pairs for action in pair)
    return whole and all(program.index(forward) < program.index(backward) for forward, backward in pairs)


def parsed(action: str) -> tuple[int, str, int]:
    """The parts of an action's name: "1F0" -> (stage 1, "F", micro-batch 0)."""
    stage, kind, micro = re.split("([FB])", action)
    return int(stage), kind, int(micro)


def answer(case: Case, inputs: Inputs) -> Answers:
    """Each rank's actions; their order is for the laws to judge."""
    by_rank = [
        sorted(f"{rank}{kind}{i}" for i in range(micros_of(case)) for kind in "FB") for rank in range(case.n_ranks)
    ]
    return [{"actions": actions, "program": ...} for actions in by_rank]


def most_held(count: Callable[[Case, int], int], words: str) -> Law:
    """The law that a rank holds activations of no more than `count(case, rank)` micro-batches at once."""
    return peak(lambda case, rank: (count(case, rank) + 0.5) * 4 * ACTIVATION, words)


def seconds_of(case: Case) -> tuple[float, float]:
    """Seconds of (a forward, a backward), drawn anew for each check."""
    draw = random.Random(case.seed)
    return draw.uniform(1, 2), draw.uniform(2, 4)


def schedule_of(record: RunRecord) -> Schedule:
    """The programs that all ranks returned, as a Schedule."""
    case = record.case
    programs = tuple(
        tuple(Action(kind, stage, micro) for stage, kind, micro in map(parsed, output["program"]))
        for output in record.outputs
    )
    return Schedule("written", case.n_ranks, case.n_ranks, micros_of(case), programs)


def complete(record: RunRecord) -> bool:
    """True if every rank has all its actions. Where one has not, the values verdict says so, not a law of order."""
    return all(
        output["actions"] == wanted["actions"] for output, wanted in zip(record.outputs, record.expected, strict=True)
    )


def in_time(record: RunRecord) -> Complaint | None:
    """A Complaint if an action stands before one that it needs, or if the step takes longer than (m + p - 1)(F + B)."""
    if not complete(record):
        return None
    forward, backward = seconds_of(record.case)
    try:
        spans: list[Span] = simulate(schedule_of(record), forward, backward)
    except ValueError as error:
        return Complaint("every action after what it needs", str(error).split(":")[1].strip())
    took = max(span.end for span in spans)
    law = (micros_of(record.case) + record.case.n_ranks - 1) * (forward + backward)
    if took > law * (1 + 1e-9):
        return Complaint(f"{law:.2f} s, with F = {forward:.2f} s and B = {backward:.2f} s", f"{took:.2f} s")
    return None


def forwards_first(record: RunRecord) -> Complaint | None:
    """A Complaint if a rank has a backward before its last forward."""
    for rank, output in enumerate(record.outputs if complete(record) else ()):
        kinds = [parsed(action)[1] for action in output["program"]]
        if "B" in kinds[: micros_of(record.case)]:
            return Complaint("all forwards, then all backwards", " ".join(output["program"]), rank)
    return None


PROBLEM = exercise(
    __name__,
    gpipe_program,
    play=conveyor,
    imports=("Action",),
    laws=(
        most_held(lambda case, rank: micros_of(case), "a rank holds the activations of at most m micro-batches"),
        order("all forwards of a rank come before its first backward", forwards_first),
        order("each action after what it needs, and a step of (m + p - 1)(F + B) seconds", in_time),
    ),
)
