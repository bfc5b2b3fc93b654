"""10.4: a check that tells schedules that can be run from those that cannot."""

import random
from dataclasses import replace

from labkit.course.exercises.exercise import Case, exercise
from labkit.course.exercises.learner_tests import told_apart
from labkit.plan.schedules.schedule import (
    Action,
    Schedule,
    gpipe,
    interleaved,
    needs,
    one_f_one_b,
    validate,
    zero_bubble,
)


def schedule_can_run(schedule: Schedule) -> bool:
    """True if ranks that run these programs, each in its order, get through, and have then done the whole step.

    `schedule.programs[rank]` is a list of `Action(kind, stage, micro)`; `schedule.rank_of(stage)` says where a stage
    lives. Every micro-batch goes through every stage once in each kind: "F" and "B", and "W" where `schedule.splits`.
    A rank waits with an action until all of `needs(action, schedule.n_stages)` has been done, on whatever rank. False
    if an action is missing, doubled, not of this step or on the wrong rank, or if ranks wait for ever."""
    kinds, stages, micros = "FBW" if schedule.splits else "FB", range(schedule.n_stages), range(schedule.n_micro)
    placed = sorted((action, rank) for rank, program in enumerate(schedule.programs) for action in program)
    wanted = [Action(kind, stage, micro) for kind in kinds for stage in stages for micro in micros]
    if placed != sorted((action, schedule.rank_of(action.stage)) for action in wanted):
        return False
    done: set[Action] = set()
    left = [list(program) for program in schedule.programs]
    while any(left):
        ready = [queue for queue in left if queue and done.issuperset(needs(queue[0], schedule.n_stages))]
        if not ready:
            return False
        done.update(queue.pop(0) for queue in ready)
    return True


def cases() -> list[Case]:
    """Pipelines of 2 to 4 ranks."""
    return [Case.of(1, ranks=2), Case.of(1, ranks=3), Case.of(1, ranks=4)]


def right(p: int, m: int) -> dict[str, Schedule]:
    """Schedules that can be run."""
    backwards = gpipe(p, m)
    mirrored = tuple((*program[:m], *reversed(program[m:])) for program in backwards.programs)
    alone = tuple(tuple(Action(kind, rank, i) for i in range(m) for kind in "FB") for rank in range(p))
    return {
        "gpipe": gpipe(p, m),
        "gpipe that goes backward in reverse": replace(backwards, programs=mirrored),
        "1f1b": one_f_one_b(p, m),
        "interleaved": interleaved(p, m, 2),
        "zero bubble": zero_bubble(p, m),
        "one micro-batch after the other": replace(backwards, programs=alone),
        "all stages on the last rank": gpipe(p, m, placement=(p - 1,) * p),
    }


def wrong(p: int, m: int, draw: random.Random) -> dict[str, Schedule]:
    """Schedules that each have one thing wrong."""
    plain, cut, thin, together = one_f_one_b(p, m), zero_bubble(p, m), interleaved(p, m, 2), gpipe(p, m, (0,) * p)
    rank, i, last = draw.randrange(p), draw.randrange(m), p - 1
    weights = [[Action("W", stage, micro) for micro in range(m)] for stage in range(p)]
    forwards = tuple(tuple(action for action in program if action.kind == "F") for program in plain.programs)
    early = draw.randrange(last)
    waits = gpipe(p, m).programs[1:], tuple(Action(kind, 0, k) for k in range(m) for kind in "FB")
    return {
        "a backward before its own forward": swapped(plain, last, Action("F", last, i), Action("B", last, i)),
        "a stage before the one in front of it": swapped(together, 0, Action("F", 0, i), Action("F", 1, i)),
        "a stage goes back before the one behind it": swapped(together, 0, Action("B", 0, i), Action("B", 1, i)),
        "two ranks that wait for each other": replace(plain, programs=(waits[1], *waits[0])),
        "a backward is missing": without(plain, 0, Action("B", 0, i)),
        "a forward and its backward are missing": without(
            without(plain, last, Action("F", last, i)), last, Action("B", last, i)
        ),
        "a backward is done twice": with_more(plain, 0, Action("B", 0, i)),
        "a micro-batch too many in the first stage": with_more(
            with_more(plain, 0, Action("F", 0, m)), 0, Action("B", 0, m)
        ),
        "two ranks have each other's programs": replace(plain, programs=plain.programs[::-1]),
        "the gradient of weights before that of the input": swapped(
            cut, rank, Action("B", rank, i), Action("W", rank, i)
        ),
        "a backward on the rank behind its own": with_more(
            without(plain, early, Action("B", early, i)), early + 1, Action("B", early, i)
        ),
        "a gradient of weights on another rank": with_more(
            without(cut, rank, Action("W", rank, i)), (rank + 1) % p, Action("W", rank, i)
        ),
        "nobody goes backward": replace(plain, programs=forwards),
        "nobody does anything": replace(plain, programs=((),) * p),
        "a gradient of weights is missing": without(cut, rank, Action("W", rank, i)),
        "one gradient of weights, where no other backward is split": with_more(plain, rank, weights[rank][i]),
        "only the first rank splits its backwards": with_more(plain, 0, *weights[0]),
        "only the last rank splits its backwards": with_more(plain, last, *weights[last]),
        "a gradient of weights of a micro-batch too many": with_more(cut, rank, Action("W", rank, m)),
        "interleaved, with a rank's stages the wrong way round": swapped(
            thin, rank, Action("F", rank, i), Action("F", rank + p, i)
        ),
    }


def swapped(schedule: Schedule, rank: int, first: Action, second: Action) -> Schedule:
    """The same schedule with two actions of a rank swapped."""
    other = {first: second, second: first}
    return on(schedule, rank, [other.get(action, action) for action in schedule.programs[rank]])


def without(schedule: Schedule, rank: int, action: Action) -> Schedule:
    """The same schedule without an action."""
    return on(schedule, rank, [other for other in schedule.programs[rank] if other != action])


def with_more(schedule: Schedule, rank: int, *actions: Action) -> Schedule:
    """The same schedule with more actions at the end of a rank's program."""
    return on(schedule, rank, [*schedule.programs[rank], *actions])


def on(schedule: Schedule, rank: int, program: list[Action]) -> Schedule:
    """The same schedule with another program on a rank."""
    programs = tuple(tuple(program) if place == rank else kept for place, kept in enumerate(schedule.programs))
    return replace(schedule, programs=programs)


def shown(case: Case) -> dict[str, tuple[bool, Schedule]]:
    """Name -> (True if labkit's own `validate` accepts the schedule, the schedule without its own name, which would
    give the answer away)."""
    draw, p = random.Random(case.seed), case["ranks"]
    m = p + draw.randrange(3)
    every = {**right(p, m), **wrong(p, m, draw)}
    return {name: (accepted(schedule), replace(schedule, name="hidden")) for name, schedule in every.items()}


def accepted(schedule: Schedule) -> bool:
    """True if labkit's own `validate` accepts the schedule."""
    try:
        validate(schedule)
    except ValueError:
        return False
    return True


PROBLEM = exercise(__name__, schedule_can_run, imports=("Action", "Schedule", "needs"), **told_apart(shown))
