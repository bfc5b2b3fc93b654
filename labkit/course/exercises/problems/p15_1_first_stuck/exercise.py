"""15.1: from the calls of every rank, who leaves the others waiting, and where."""

import random
from collections import Counter
from typing import Any

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_each, exercise

VERBS = ("all_reduce gradients", "all_reduce loss", "broadcast weights", "barrier")


def first_stuck(calls: list[list[str]]) -> tuple[int, list[int]]:
    """(place, ranks): the first collective, counted from 0, that not all ranks come to, and who is to blame, sorted.
    (-1, []) if all ranks do all of theirs together.

    calls[rank] lists the collectives of a rank in its order; all are of one group, and each waits for all ranks. To
    blame are those that have no call left; if all have one, but not the same, those that do not call what most do."""
    for place in range(max(map(len, calls))):
        now = [names[place] if place < len(names) else "" for names in calls]
        if len(set(now)) > 1:
            most = max(filter(None, now), key=now.count)
            gone = [rank for rank, call in enumerate(now) if not call]
            return place, gone or [rank for rank, call in enumerate(now) if call != most]
    return -1, []


def cases() -> list[Case]:
    """Jobs of several ranks."""
    return [Case.of(1, n_jobs=60, ranks=(3, 8)), Case.of(1, n_jobs=20, ranks=(1, 3))]


def inputs(case: Case) -> Inputs:
    """Jobs: healthy ones, jobs with fewer batches on some ranks, jobs with a call left out, added or exchanged on some
    ranks, jobs with several of these faults, and extremes."""
    dice = random.Random(case.seed)
    jobs: list[tuple[list[list[str]]]] = []
    while len(jobs) < case["n_jobs"]:
        n, by_hand = dice.randint(*case["ranks"]), max(case["ranks"]) > 3 and len(jobs) % 5 == 0
        n = max(n, 4) if by_hand else n
        loop = [VERBS[0]] * dice.randint(1, 2) + [dice.choice(VERBS)] * dice.randint(0, 2)
        whole = [VERBS[2], *loop * dice.randint(2, 6), VERBS[3]]
        calls = [list(whole) for _ in range(n)]
        few = dice.sample(range(n), dice.randint(1, max(1, (n - 1) // 2)))
        for kind in dice.choice(("", "s", "l", "e", "x", "sl", "lx", "ls", "ex")):
            for rank in few[: dice.randint(1, len(few))]:
                place = dice.randrange(1, max(2, len(calls[rank])))
                if kind == "s":  # its batches run out, and it leaves
                    del calls[rank][place:]
                elif kind == "l":  # it skips a call
                    del calls[rank][place - 1]
                elif kind == "e":  # it has one of its own
                    calls[rank].insert(place, dice.choice(VERBS))
                else:  # another one in its place
                    calls[rank][place - 1] = dice.choice(VERBS)
        if by_hand:  # one has left; another one has left with it, or does something else just then
            place = dice.randrange(1, len(whole))
            one, other = dice.sample(range(n), 2)
            calls = [list(whole) for _ in range(n)]
            calls[one] = whole[:place]
            calls[other][place:] = [] if len(jobs) % 10 else ["all_gather norms", *whole[place + 1 :]]
        if clear(calls):
            jobs.append((calls,))
    return [([*jobs, *extremes(dice, max(case["ranks"]))],)]


def extremes(dice: random.Random, n: int) -> list[tuple[list[list[str]]]]:
    """Jobs of n ranks in which nobody calls anything, one has never come, one alone has a call left, rank 0 alone calls
    something else, and, if there are enough, three of eight call the same and others what only one or two call."""
    whole, one = [VERBS[2], VERBS[0], VERBS[3]], dice.randrange(n)
    absent, longer, odd, torn = ([list(whole) for _ in range(n)] for _ in range(4))
    absent[one] = []
    longer[one].append(VERBS[1])
    odd[0][1] = VERBS[1]
    usual, *others = dice.sample(VERBS, 4)
    for names, name in zip(torn, [others[2], *dice.sample([usual] * 3 + others[:2] * 2, 7)], strict=False):
        names[1] = name
    return [([[] for _ in range(n)],), (absent,), (longer,), (odd,), *([(torn,)] if n == 8 else [])]


def clear(calls: list[list[str]]) -> bool:
    """True if one call is the most frequent where the ranks part, so that it is clear who is to blame."""
    place = together(calls)
    heads = Counter(row[place] for row in calls if len(row) > place).most_common(2)
    return len(heads) < 2 or heads[0][1] > heads[1][1]


def together(calls: list[list[str]]) -> int:
    """The number of calls that all ranks make together, before the first one at which they part."""
    left, n_done = [list(row) for row in calls], 0
    while all(left) and all(row[0] == left[0][0] for row in left):
        left, n_done = [row[1:] for row in left], n_done + 1
    return n_done


def found(calls: list[list[str]]) -> list[Any]:
    """(place, ranks to blame), found by letting the ranks run; (-1, []) if they never part."""
    place = together(calls)
    if all(len(row) == place for row in calls):
        return [-1, []]
    gone = [rank for rank, row in enumerate(calls) if len(row) == place]
    (common, _), *_ = Counter(row[place] for row in calls if len(row) > place).most_common(1)
    return [place, gone or [rank for rank, row in enumerate(calls) if row[place] != common]]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The place and the ranks to blame in each job."""
    return [[found(*job) for job in inputs[0][0]]]


PROBLEM = exercise(__name__, first_stuck, play=call_each)
