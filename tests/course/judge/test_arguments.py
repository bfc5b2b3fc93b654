"""What a report says of the case in which an attempt failed: the arguments themselves."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from labkit.course.exercises.catalogue import problem, problems
from labkit.course.exercises.problem import call_each
from labkit.course.judge.arguments import called_with, one
from labkit.course.judge.case import Case
from labkit.course.judge.judge import judge
from labkit.course.judge.run_record import RunRecord

FORWARD_ONLY = """
def shift_along_ring(x, by, group):
    n = group.size
    if by < 0:
        return x
    return group.exchange(x, to=(group.rank + by) % n, source=(group.rank - by) % n)
"""


def untried(case: Case) -> RunRecord:
    """A run of which only the case is known."""
    nothing = (None,) * case.n_ranks
    return RunRecord(case, outputs=nothing, expected=nothing)


def test_a_report_tells_the_argument_on_which_an_attempt_fails_and_the_next_check_tells_the_same() -> None:
    """Would catch "3 ranks, places 2" for a negative `by`, and another complaint about the same program later."""
    first, second = (judge(problem("02.1"), FORWARD_ONLY) for _ in range(2))
    words = "3 ranks, float32, rows (1, 3, 2); rank 0 called with x float32 [1, 5], by=-1"
    assert first.broken
    assert second.broken
    assert first.broken.where == second.broken.where == words
    assert (first.broken.name, first.n_cases) == (second.broken.name, second.n_cases)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (-1, "by=-1"),
        (0.5, "by=0.5"),
        ("mean", "by='mean'"),
        (None, "by=None"),
        ((2, 3), "by=(2, 3)"),
        (torch.bfloat16, "by=bfloat16"),
        (torch.ones(2, 3), "by float32 [2, 3]"),
        (list(range(100)), "by of 100 entries"),
        ([torch.ones(1)] * 3, "by of 3 entries"),
        (len, "by: a function"),
        (Case.of(2), "by: a Case"),
    ],
)
def test_an_argument_is_told_in_a_few_words(value: object, words: str) -> None:
    """Would catch a tensor with all its numbers, and an address of memory."""
    assert one("by", value) == words


def test_every_exercise_tells_its_arguments_by_the_names_of_its_stub_or_its_run() -> None:
    """Would catch an exercise whose arguments have no names, or a line that is as long as a tensor."""
    wrong = []
    for asked in problems():
        case = min(asked.cases(), key=lambda case: case.n_ranks).thrown(1)
        words = called_with(asked, untried(case)).partition("called with ")[2]
        if (
            bool(words) != bool(asked.inputs(case)[0])
            or len(words) > 200
            or re.search(r"0x[0-9a-f]{6}|tensor\(", words)
        ):
            wrong.append((asked.key, words))
    assert wrong == []


def test_of_many_jobs_the_one_with_the_wrong_answer_is_told() -> None:
    """Would catch "jobs of 24 entries", of which one is wrong."""
    asked = next(each for each in problems() if each.play is call_each)
    case = asked.cases()[0].thrown(1)
    right = list(asked.answer(case, asked.inputs(case)))
    wrong = [*right[0][:2], Ellipsis, *right[0][3:]]
    record = dataclasses.replace(untried(case), outputs=(wrong, *right[1:]), expected=tuple(right))
    assert f"[2] of {len(wrong)}: called with " in called_with(asked, record)
