"""10.3: the program of a rank under 1F1B."""

from labkit.course.exercises.exercise import exercise, order
from labkit.course.exercises.problems.p10_2_gpipe_program.exercise import (
    answer,
    cases,
    conveyor,
    in_time,
    inputs,
    micros_of,
    most_held,
)
from labkit.plan.schedules.schedule import Action


def one_f_one_b_program(rank: int, n_ranks: int, n_micro: int) -> list[Action]:
    """The actions of rank `rank` under 1F1B, in order: some forwards, then a forward and a backward in turn, then the
    backwards that are left.

    Stage r lives on rank r. `Action("F", stage, micro)` is the forward of a micro-batch in a stage, "B" the backward;
    micro-batches are 0 to n_micro - 1, and there may be fewer of them than ranks. Rank r may hold min(p - r, m)
    micro-batches between forward and backward, p = n_ranks and m = n_micro. The step takes no longer than GPipe's."""
    ahead = min(n_ranks - rank - 1, n_micro)
    program = [Action("F", rank, i) for i in range(ahead)]
    for i in range(n_micro - ahead):
        program += [Action("F", rank, ahead + i), Action("B", rank, i)]
    return program + [Action("B", rank, i) for i in range(n_micro - ahead, n_micro)]


PROBLEM = exercise(
    __name__,
    one_f_one_b_program,
    cases=cases,
    inputs=inputs,
    play=conveyor,
    answer=answer,
    imports=("Action",),
    laws=(
        most_held(
            lambda case, rank: min(case.n_ranks - rank, micros_of(case)),
            "rank r holds the activations of at most min(p - r, m) micro-batches",
        ),
        order("each action after what it needs, and a step of (m + p - 1)(F + B) seconds", in_time),
    ),
)
