"""15.5: the slow rank, and not those that wait for it."""

import random
from collections import Counter

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_each, exercise


def straggler(trace: list[list[tuple[float, float, float]]]) -> int:
    """The rank that all others wait for in more than half of the steps; -1 if there is none.

    trace[rank][step] is (begins to work, arrives at the barrier, may go on), in seconds on the clock of that rank. Zero
    of one clock is not zero of another, so only what is measured on one rank can be compared. A rank may also begin
    a step late, after a log or a checkpoint of its own. In a step all wait for the one that waits least at the
    barrier."""
    waits = [[go - arrives for _, arrives, go in steps] for steps in trace]
    last = [seconds.index(min(seconds)) for seconds in zip(*waits, strict=True)]
    rank, times = Counter(last).most_common(1)[0]
    return rank if times > len(last) / 2 else -1


def cases() -> list[Case]:
    """Jobs of several ranks."""
    return [Case.of(1, n_jobs=40, ranks=(3, 8)), Case.of(1, n_jobs=12, ranks=(2, 4))]


def inputs(case: Case) -> Inputs:
    """Jobs with a rank that computes slowly, a rank that is busy between steps, ranks that take turns in being slow, a
    rank that stops once for long, or a rank that is slow in exactly half of the steps, or in one more."""
    dice, jobs = random.Random(case.seed), []
    for number in range(case["n_jobs"]):
        n, n_steps = dice.randint(*case["ranks"]), dice.randint(9, 15)
        slow, stops, at = dice.randrange(n), dice.randrange(n), dice.randrange(n_steps)
        kind = ("computes", "between", "jitter", "one stop", "half", "one more")[number % 6]
        if kind == "half":  # exactly half of the steps, which is not more than half
            n_steps, stops, at = 2 * dice.randint(5, 7), slow, 0
        elif kind == "one more":
            n_steps, stops, at = 2 * dice.randint(5, 7) + 1, slow, 0
        turn, barrier_s = dice.randrange(n), dice.uniform(0.005, 0.4)
        now, clocks = 0.0, [dice.uniform(0, 1000) for _ in range(n)]
        trace: list[list[tuple[float, float, float]]] = [[] for _ in range(n)]
        for step in range(n_steps):
            begins, arrives = [now] * n, [0.0] * n
            late = slow if kind != "jitter" else (turn + step) % n
            if kind in ("half", "one more") and step % 2:
                late = (slow + 1 + step % (n - 1)) % n
            for rank in range(n):
                work = dice.uniform(0.8, 1.0) + (0.3 if rank == late and kind != "between" else 0)
                work += 20.0 if rank == stops and step == at else 0
                begins[rank] += dice.uniform(0, 0.02) + (0.5 if rank == late and kind == "between" else 0)
                arrives[rank] = begins[rank] + work
            now = max(arrives) + barrier_s
            for rank in range(n):
                shift = clocks[rank]
                trace[rank].append((begins[rank] + shift, arrives[rank] + shift, now + shift))
        jobs.append((trace,))
    return [(jobs,)]


def blamed(trace: list[list[tuple[float, float, float]]]) -> int:
    """The rank that arrives last in more than half of the steps, or -1. All leave a barrier at once, which tells by how
    much their clocks differ."""
    n_ranks, n_steps = len(trace), len(trace[0])
    times_last = [0] * n_ranks
    for step in range(n_steps):
        arrivals = [trace[rank][step][1] - trace[rank][0][2] + trace[0][0][2] for rank in range(n_ranks)]
        times_last[max(range(n_ranks), key=lambda rank: arrivals[rank])] += 1
    return next((rank for rank, times in enumerate(times_last) if 2 * times > n_steps), -1)


def answer(case: Case, inputs: Inputs) -> Answers:
    """The straggler of each job, with all times on one clock."""
    return [[blamed(*job) for job in inputs[0][0]]]


PROBLEM = exercise(__name__, straggler, play=call_each)
