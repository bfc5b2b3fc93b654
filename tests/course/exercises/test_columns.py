"""Programs in few columns: nothing runs off a cell, and nothing but line breaks has changed."""

from __future__ import annotations

import ast

from labkit.course.exercises.catalogue import problem, problems
from labkit.course.exercises.columns import COLUMNS, narrow
from tests.cases import cases

WIDE = '''\
def who(states: list[str], waits_for: dict[str, list[int]], most_of_them_wait: int = 3) -> tuple[list[int], int | None]:
    """The ranks that wait for ever, ascending, and the one of them to end, or None if there is none: [n*k, d] -> [k]

    - A running rank may come to any call; a finished one comes to none any more, whatever it has done.
    - A short one.

    "rank"    which of them this is, and how many lower ranks run on this machine, for a launcher gives GPU 0 to
              local rank 0
    "node"    short

    `states` has a line that is short,
    and one that follows."""
    return states  # a line of code that is too long stays as it is, for only whoever writes it knows where to break it
'''
NARROW = '''\
def who(
    states: list[str],
    waits_for: dict[str, list[int]],
    most_of_them_wait: int = 3,
) -> tuple[list[int], int | None]:
    """The ranks that wait for ever, ascending, and the one of them to end, or
    None if there is none: [n*k, d] -> [k]

    - A running rank may come to any call; a finished one comes to none any
      more, whatever it has done.
    - A short one.

    "rank"    which of them this is, and how many lower ranks run on this
              machine, for a launcher gives GPU 0 to local rank 0
    "node"    short

    `states` has a line that is short,
    and one that follows."""
    return states  # a line of code that is too long stays as it is, for only whoever writes it knows where to break it
'''


def words(program: str) -> list[str]:
    """The program's tokens of text without the commas that a layout adds."""
    return program.replace(",", " ").split()


def test_paragraphs_items_rows_and_signatures_are_laid_out_and_the_rest_stays():
    """Would catch a list that runs into one paragraph, a shape that is torn, a table without its columns."""
    assert narrow(WIDE) == NARROW
    assert narrow(NARROW) == NARROW


@cases("lab", [*(f"{number:02}" for number in range(19)), "21"])
def test_no_line_of_a_stub_runs_off_its_cell(lab):
    """Would catch a docstring that a learner must scroll for, and a layout that changes what a stub says."""
    for exercise in problems(lab):
        long = [line for line in exercise.stub.splitlines() if len(line) > COLUMNS]
        assert not long, (exercise.key, long)
        ast.parse(exercise.stub)


def test_a_reference_says_the_same_in_few_columns():
    """Would catch a word that is lost where a line is broken, and an argument where a signature is."""
    for key in ("00.1", "02.3", "08.4", "12.2"):
        source = problem(key).solution
        assert words(narrow(source, 40).replace("(", " ").replace(")", " ")) == words(
            source.replace("(", " ").replace(")", " ")
        )
