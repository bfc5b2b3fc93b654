"""00.4: which ranks are stuck for ever, and which one to end."""

import random
from collections.abc import Iterator
from typing import Any

import torch

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise

RUNNING, WAITING, FINISHED = "running", "waiting", "finished"
Situation = tuple[list[str], list[list[int]]]


def whom_to_end(states: list[str], waits_for: list[list[int]]) -> tuple[list[int], int | None]:
    """The ranks that wait for ever, ascending, and the one of them to end (None if there is none).

    `states[r]` is "running", "waiting" or "finished". `waits_for[r]` are the ranks that have not come yet to the call
    in which rank r waits; it needs all of them. If all have come, or if r does not wait, the list is empty.

    - A running rank may come to any call; a finished one comes to none any more.
    - A waiting rank goes on, and may then come to any call, once all it waits for can come.
    - Whoever cannot go on in this way is stuck.

    End one stuck rank, and every stuck rank that waits for it gets an error, so it waits no more; then those that wait
    for that one, and so on. End the rank that sets the most stuck ranks free; of several, the lowest."""
    stuck = {rank for rank, state in enumerate(states) if state == "waiting"}
    gone = {rank for rank, state in enumerate(states) if state == "finished"}
    while able := {rank for rank in stuck if not (stuck | gone) & set(waits_for[rank])}:
        stuck -= able

    def set_free(rank: int) -> int:
        ended = {rank}
        while freed := {other for other in stuck - ended if ended & set(waits_for[other])}:
            ended |= freed
        return len(ended)

    return sorted(stuck), min(stuck, key=lambda rank: (-set_free(rank), rank), default=None)


def situation(drawn: random.Random, n: int) -> Situation:
    """Some ranks run, few have finished, the others wait for one or two."""
    states = drawn.choices((RUNNING, WAITING, FINISHED), (2, 8, 1), k=n)
    waits_for: list[list[int]] = [[] for _ in states]
    for rank, state in enumerate(states):
        others = [other for other in range(n) if other != rank]
        if state == WAITING:
            waits_for[rank] = sorted(drawn.sample(others, min(len(others), drawn.choice((0, 1, 1, 1, 1, 2, 2)))))
    return states, waits_for


def behind(drawn: random.Random, n: int) -> Situation:
    """Two ranks wait for each other, and the others wait in a line behind one of them, each for the one before."""
    line = drawn.sample(range(n), n)
    waits_for: list[list[int]] = [[] for _ in line]
    waits_for[line[0]] = [line[1]]
    for before, rank in zip(line, line[1:], strict=False):
        waits_for[rank] = [before]
    return [WAITING] * n, waits_for


def cases() -> list[Case]:
    """Many situations, of few and of many ranks."""
    return [Case.of(1, among=5, situations=40), Case.of(1, among=9, situations=40),
            Case.of(1, among=1, situations=3)]  # fmt: skip


def drawn_situations(case: Case) -> Iterator[Situation]:
    """The situations of a case."""
    drawn = random.Random(case.seed)
    for number in range(case["situations"]):
        yield behind(drawn, case["among"]) if number % 4 == 0 and case["among"] > 2 else situation(drawn, case["among"])


def inputs(case: Case) -> Inputs:
    """All situations."""
    return [(list(drawn_situations(case)),)]


def told(states: list[str], waits_for: list[list[int]]) -> str:
    """A situation in words."""
    words = (f"{rank} waits for {' and '.join(map(str, waits_for[rank])) or 'nobody'}" if state == WAITING
             else f"{rank} {state}" for rank, state in enumerate(states))  # fmt: skip
    return "; ".join(words)


def play(attempt: Any, group: Group, situations: list[Situation]) -> Any:
    """The attempt's reply to each situation."""
    return {
        told(*situation): attempt(list(situation[0]), [list(line) for line in situation[1]]) for situation in situations
    }


def judged(states: list[str], waits_for: list[list[int]]) -> tuple[list[int], int | None]:
    """The same reply from matrices: the ranks that can go on are grown from those that run, and powers of the matrix of
    who waits for whom tell which ranks are freed by which."""
    n = len(states)
    arrows = torch.zeros(n, n)
    for rank, others in enumerate(waits_for):
        arrows[rank, others] = 1
    waiting = torch.tensor([state == WAITING for state in states])
    able = torch.tensor([state == RUNNING for state in states])
    for _ in range(n):
        able = able | (waiting & (arrows @ (~able).float() == 0))
    stuck = waiting & ~able
    arrows *= torch.outer(stuck, stuck)
    freed = torch.linalg.matrix_power(torch.eye(n, dtype=torch.float64) + arrows, n).gt(0).sum(0) * stuck
    return [rank for rank in range(n) if stuck[rank]], int(freed.argmax()) if stuck.any() else None


def answer(case: Case, inputs: Inputs) -> Answers:
    """The right reply to each situation."""
    return [{told(*situation): judged(*situation) for situation in inputs[0][0]}]


PROBLEM = exercise(__name__, whom_to_end)
