"""23.3: which samples a rank reads next, in a job whose number of ranks has changed on its way."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_each, exercise

History = list[tuple[int, int, int, int]]


def next_rows(
    history: list[tuple[int, int, int, int]], n_ranks: int, n_micro: int, rows: int, rank: int, orders: list[list[int]]
) -> list[list[int]]:
    """The samples that `rank` reads in the next step, one list for each of its micro-batches.

    `history` has a tuple (steps, n_ranks, n_micro, rows) for each stretch of the job so far: in each step of it each
    rank read n_micro micro-batches of `rows` samples. The next step has the sizes that are given.
    `orders[epoch]` is the order of the n samples of the data set in that epoch, [n]. The job reads the epochs one after
    the other, each sample once an epoch, none skipped: if an epoch ends within a batch, the batch goes on with the next
    epoch. In a step micro-batch 0 comes first, of all ranks from 0 on, each with consecutive samples, then micro-batch
    1 of all ranks, and so on."""
    seen = sum(steps * ranks * micros * size for steps, ranks, micros, size in history)
    n, samples = len(orders[0]), []
    for micro in range(n_micro):
        first = seen + (micro * n_ranks + rank) * rows
        samples.append([orders[place // n][place % n] for place in range(first, first + rows)])
    return samples


def cases() -> Sequence[Case]:
    """Jobs that were resized some times, in the first epoch and later."""
    return [Case.of(1, n_jobs=4, stretches=(1, 1)), Case.of(1, n_jobs=12, stretches=(0, 3))]


def inputs(case: Case) -> Inputs:
    """Jobs on 1 to 4 ranks; one in three is about to come to the end of an epoch."""
    dice, jobs = case.dice, []
    for number in range(case["n_jobs"]):
        sizes = [(dice.randint(2, 4), dice.randint(2, 3), dice.randint(2, 5)) for _ in range(case["stretches"][1] + 1)]
        if len(sizes) > 1 and sizes[-1][0] == sizes[0][0]:
            sizes[-1] = (sizes[-1][0] % 4 + 1, *sizes[-1][1:])
        n_stretches = max(case["stretches"][0], dice.randint(*case["stretches"]))
        history = [(dice.randint(1, 4), *sizes[place]) for place in range(n_stretches)]
        ranks, micros, rows = sizes[-1]
        seen = sum(steps * a * b * c for steps, a, b, c in history)
        batch = ranks * micros * rows
        n = dice.randint(batch + 1, batch + 40) if seen < batch or number % 3 else seen + batch // 2
        if number % 3 == 0 and seen >= batch:
            n = max(n, batch + 1)
        n_epochs = (seen + batch) // n + 2
        orders = [dice.sample(range(n), n) for _ in range(n_epochs)]
        jobs.append((history, ranks, micros, rows, dice.randrange(ranks) if number % 2 else ranks - 1, orders))
    return [(jobs,)]


def read_on(
    history: History, n_ranks: int, n_micro: int, rows: int, rank: int, orders: list[list[int]]
) -> list[list[int]]:
    """The same by reading all samples one after the other, from the first step of the job on."""
    stream = (sample for order in orders for sample in order)
    for steps, ranks, micros, size in history:
        for _ in range(steps * ranks * micros * size):
            next(stream)
    read = [[[next(stream) for _ in range(rows)] for _ in range(n_ranks)] for _ in range(n_micro)]
    return [micro[rank] for micro in read]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The samples of each job."""
    return [[read_on(*job) for job in inputs[0][0]]]


PROBLEM = exercise(__name__, next_rows, play=call_each)
