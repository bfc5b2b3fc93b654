"""10.6: a schedule of one's own, which is to be shorter than 1f1b and to hold no more."""

from typing import Any

from labkit.course.exercises.exercise import Answers, Case, Complaint, Inputs, Law, Star, exercise, order
from labkit.course.judge.run_record import RunRecord
from labkit.plan.schedules.schedule import Action, Schedule, in_flight, one_f_one_b, simulate
from labkit.plan.schedules.schedule_text import from_text


def better_than_1f1b(n_ranks: int, n_micro: int) -> list[list[Action]]:
    """The programs of all ranks, shorter than 1f1b's and with no more memory. -> for each rank, its actions in order

    Rank r has stage r alone. It does `Action("F", r, i)`, `Action("B", r, i)` and `Action("W", r, i)` once for each
    micro-batch i; each takes one unit. F of stage s needs F of s - 1, B of s needs F of s and B of s + 1, W needs B of
    its stage. A rank runs its program in order and waits for what an action needs. A micro-batch is held from its F to
    its W; no rank may hold more than n_ranks at once, as many as rank 0 of 1f1b. On 4 ranks with 8 micro-batches 1f1b
    takes 33 units: yours must take fewer. There are at least as many micro-batches as ranks."""
    programs = []
    for rank in range(n_ranks):
        ahead = n_ranks - 1 - rank
        forwards = [Action("F", rank, i) for i in range(n_micro)]
        halves = [[Action("B", rank, i), Action("W", rank, i)] for i in range(n_micro)]
        program = forwards[:ahead]
        for i in range(n_micro - ahead):
            program += [forwards[ahead + i], *halves[i]]
        programs.append(program + sum(halves[n_micro - ahead :], []))
    return programs


def cases() -> list[Case]:
    """Four ranks and eight micro-batches, pipelines of other sizes, and one with as many micro-batches as ranks."""
    return [
        Case.of(1, p=4, m=8),
        Case.of(1, p=3, m=5).among(Case.of(1, p=5, m=7), Case.of(1, p=6, m=11)),
        Case.of(1, p=3, m=3).among(Case.of(1, p=2, m=2), Case.of(1, p=5, m=5)),
    ]


def inputs(case: Case) -> Inputs:
    """The numbers of ranks and of micro-batches."""
    return [(case["p"], case["m"])]


def usual(case: Case) -> int:
    """Units of 1f1b, of which F takes one and a whole backward two."""
    return int(max(span.end for span in simulate(one_f_one_b(case["p"], case["m"]))))


def least(case: Case) -> int:
    """A bound: the last rank waits for the first activation, and then has all its work to do. ZB-H1 takes no more."""
    return int(case["p"] - 1 + 3 * case["m"])


def play(attempt: Any, group: Any, n_ranks: int, n_micro: int) -> Any:
    """The programs of all ranks, as words."""
    programs = [[str(action) for action in program] for program in attempt(n_ranks, n_micro)]
    return {"actions": [sorted(program) for program in programs], "programs": programs}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The actions of every rank; their order is for the laws to judge."""
    micros = range(case["m"])
    actions = [sorted(f"{rank}{kind}{i}" for kind in "FBW" for i in micros) for rank in range(case["p"])]
    return [{"actions": actions, "programs": ...}]


def written(record: RunRecord) -> Schedule | None:
    """The attempt's schedule, None if actions are missing. ValueError for one that can never be run."""
    output = record.outputs[0]
    if output["actions"] != record.expected[0]["actions"]:
        return None
    return from_text("\n".join(map(" ".join, output["programs"])), "yours")


def units(schedule: Schedule) -> float:
    """Units from the first action to the last, with F = B = W = 1."""
    return max(span.end for span in simulate(schedule, forward=1.0, backward=2.0))


def runs(record: RunRecord) -> Complaint | None:
    """A Complaint if ranks wait for each other for ever."""
    try:
        written(record)
    except ValueError as error:
        return Complaint("an order that gets through", str(error).split(": ", 2)[-1])
    return None


def held(record: RunRecord) -> Complaint | None:
    """A Complaint if a rank holds more than the cap."""
    cap, schedule = record.case["p"], written(record) if runs(record) is None else None
    for rank, most in enumerate(in_flight(schedule) if schedule else ()):
        if most > cap:
            return Complaint(f"at most {cap} micro-batches between F and W", f"{most} at once", rank)
    return None


def shorter(record: RunRecord) -> Complaint | None:
    """A Complaint if the schedule takes as long as 1f1b; it says how long the shortest takes."""
    case, schedule = record.case, written(record) if runs(record) is None else None
    if schedule and units(schedule) >= usual(case):
        expected = f"fewer than the {usual(case)} units of 1f1b (the least is {least(case)})"
        return Complaint(expected, f"{units(schedule):g} units")
    return None


def cost(record: RunRecord) -> float:
    """Units of the schedule."""
    schedule = written(record)
    return units(schedule) if schedule else float(usual(record.case))


PROBLEM = exercise(
    __name__,
    better_than_1f1b,
    imports=("Action",),
    laws=(
        order("no two ranks wait for each other", runs),
        Law("memory", "a rank holds at most as many micro-batches between F and W as there are ranks", held),
        order("shorter than 1f1b", shorter),
    ),
    star=Star(
        "units of the step; p - 1 + 3 m, 27 here, are the least that any order of one stage a rank can take",
        cost,
        lambda case: float(least(case)),
        unit="units",
    ),
)
