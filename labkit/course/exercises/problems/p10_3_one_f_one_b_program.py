"""10.3: the program of a rank under 1F1B."""

from __future__ import annotations

from labkit.course.exercises.problem import Mutant, Problem
from labkit.course.exercises.problems.p10_2_gpipe_program import (
    answer,
    cases,
    conveyor,
    in_time,
    inputs,
    micros_of,
    most_held,
)
from labkit.course.judge.laws import order
from labkit.plan.schedule import Action


def one_f_one_b_program(rank: int, n_ranks: int, n_micro: int) -> list[Action]:
    """What rank `rank` does under 1F1B, in order: some forwards ahead, a forward and a backward in turn, the rest back.

    Stage r lives on rank r. `Action("F", stage, micro)` is the forward of a micro-batch in a stage, "B" the backward;
    micro-batches are 0 to n_micro - 1, and there may be fewer of them than ranks. Rank r may hold min(p - r, m)
    micro-batches between forward and backward, p = n_ranks and m = n_micro. The step takes no longer than GPipe's."""
    ahead = min(n_ranks - rank - 1, n_micro)
    program = [Action("F", rank, i) for i in range(ahead)]
    for i in range(n_micro - ahead):
        program += [Action("F", rank, ahead + i), Action("B", rank, i)]
    return program + [Action("B", rank, i) for i in range(n_micro - ahead, n_micro)]


PROBLEM = Problem(
    key="10.3",
    title="One forward, one backward",
    story="""
GPipe holds the activations of every micro-batch until the first backward: more micro-batches, less waiting, more
memory. 1F1B waits exactly as long and holds p - r of them on rank r, however many there are. All it takes is another
order. It all hangs on one number, how many forwards go ahead; one too few is slow, one too many costs memory.
""",
    objectives=("how many forwards go ahead", "memory that does not grow with micro-batches"),
    difficulty=3,
    importance=5,
    minutes=25,
    reference=one_f_one_b_program,
    cases=cases,
    inputs=inputs,
    play=conveyor,
    answer=answer,
    given=("Action",),
    laws=(
        most_held(
            lambda case, rank: min(case.n_ranks - rank, micros_of(case)),
            "rank r holds the activations of at most min(p - r, m) micro-batches",
        ),
        order("each action after what it needs, and a step of (m + p - 1)(F + B) seconds", in_time),
    ),
    hints=(
        "The last rank can go backward at once. How many forwards can rank r do until a gradient gets back to it?",
        "p - r - 1 forwards ahead (at most m), then pairs (next F, oldest B) while there are Fs, then the other Bs.",
        "ahead = min(p - r - 1, m);  F 0..ahead-1;  for i in range(m - ahead): F ahead+i, B i;  B m-ahead..m-1",
    ),
    mutants=(
        Mutant("this is GPipe: every micro-batch is held", "memory",
               (("min(n_ranks - rank - 1, n_micro)", "n_micro"),)),
        Mutant("one forward too many goes ahead", "memory",
               (("min(n_ranks - rank - 1, n_micro)", "min(n_ranks - rank, n_micro)"),)),
        Mutant("all ranks send as many forwards ahead as the first", "memory",
               (("min(n_ranks - rank - 1, n_micro)", "min(n_ranks - 1, n_micro)"),)),
        Mutant("one forward too few goes ahead: each gradient is waited for", "order",
               (("min(n_ranks - rank - 1, n_micro)", "min(max(n_ranks - rank - 2, 0), n_micro)"),)),
        Mutant("no forward goes ahead: one rank works at a time", "order",
               (("min(n_ranks - rank - 1, n_micro)", "0"),)),
        Mutant("it is counted from the wrong end: the first rank goes ahead least, the last one most", "liveness",
               (("min(n_ranks - rank - 1, n_micro)", "min(rank, n_micro)"),)),
        Mutant("in each pair the backward comes first, on the last rank before its own forward", "order",
               (('[Action("F", rank, ahead + i), Action("B", rank, i)]',
                 '[Action("B", rank, i), Action("F", rank, ahead + i)]'),)),
        Mutant("the backwards of what went ahead are forgotten", "values",
               ((' + [Action("B", rank, i) for i in range(n_micro - ahead, n_micro)]', ""),)),
        Mutant("with fewer micro-batches than ranks, some go ahead that are not there", "values",
               (("min(n_ranks - rank - 1, n_micro)", "n_ranks - rank - 1"),)),
    ),
)  # fmt: skip
