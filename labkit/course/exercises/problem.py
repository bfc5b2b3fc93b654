"""A Problem: one exercise, with everything that is needed to teach it, to judge it, and to test the judge.

An exercise is a folder in problems/, named after its lab, its place in the lab and the function, "p06_4_overlap":

    exercise.md     what the learner reads: title, objectives, story, hints        (exercise_files.py reads it)
    mutants.yaml    mistakes that people make, and the verdict that rejects each   (exercise_files.py reads it)
    star.txt        a program that earns the star, if the exercise has one
    exercise.py     the reference, a function or class, and `PROBLEM = exercise(__name__, reference, ...)`:
                        reference                              the stub is its signature and docstring
                        cases -> inputs -> play on every rank -> answer    random, from a seed drawn for each check
                        laws                                   bytes sent, bytes held, what must precede what

`labkit build 06.8_my_title` makes such a folder. Inputs are made by the judge and handed out by rank; the answer is
worked out by the judge in one process, where no rank can see it. So a rank must be sent whatever it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from labkit.course.exercises.exercise_files import Mutant
from labkit.course.exercises.stub import n_lines, solution_of, stub_of
from labkit.course.judge.case import Case
from labkit.course.judge.run_record import RunRecord

Inputs = Sequence[tuple[Any, ...]]
"""The arguments of an attempt: one tuple for each rank."""
Answers = Sequence[Any]
"""The right answers, one for each rank."""


class Complaint(NamedTuple):
    """A complaint about a broken law: in words what it expected and what was seen, and the rank (None: no single one).

    `at` are the numbers of the events that the picture marks; `line` is the line of the attempt, if it is not that of
    one of these events."""

    expected: str
    seen: str
    rank: int | None = None
    at: tuple[int, ...] = ()
    line: int = 0


class Law(NamedTuple):
    """A rule that every right attempt keeps: the verdict that it belongs to, the rule in words, and a function that
    returns a Complaint if a recorded run breaks it."""

    verdict: str
    words: str
    broken: Callable[[RunRecord], Complaint | None]


class Star(NamedTuple):
    """A challenge: an attempt that costs less than the reference earns a star.

    words           what is counted
    cost(record)    the cost of a recorded run, in `unit`
    target(case)    the cost that earns the star, which is below that of the reference
    best            a program that earns it: `exercise` reads it from star.txt
    """

    words: str
    cost: Callable[[RunRecord], float]
    target: Callable[[Case], float]
    unit: str = "bytes"
    best: str = ""


def nobody_knows(_: Case) -> Inputs:
    """The inputs of a problem that has none: an empty tuple of arguments for each rank."""
    return [()] * _.n_ranks


def call(attempt: Any, group: Any, *args: Any) -> Any:
    """Run an attempt on a rank as most are run: with the inputs, then the group."""
    return attempt(*args, group)


def call_alone(attempt: Any, group: Any, *args: Any) -> Any:
    """Run an attempt that knows no ranks: with the inputs only."""
    return attempt(*args)


def call_each(attempt: Any, group: Any, jobs: Sequence[tuple[Any, ...]]) -> Any:
    """Run an attempt that knows no ranks on several jobs, and return one answer for each."""
    return [attempt(*job) for job in jobs]


@dataclass(frozen=True)
class Problem:
    """One exercise.

    key                "03.2": the lab and the place in it
    title, story       markdown in the project's own words
    reference          the function or class that solves it; its name and signature are the attempt's
    cases()            what is tried, smallest first; a seed is drawn for each
    inputs(case)       arguments by rank
    play(attempt, group, *args)   runs an attempt on a rank and gives what is to be judged: tensors, numbers, words,
                       lists and dicts of them
    answer(case, inputs)   by rank, in one process; `Ellipsis` where anything will do
    tolerance          (relative, absolute as a share of the largest number); None: from dtype and number of ranks
    laws               see labkit/course/judge/laws.py; where a verdict has no law, a default one is judged
    imports            names of labkit that an attempt may import, "Work", "LossScale"
    may                names that attempts otherwise must not touch, "untyped_storage"
    changes            positions of inputs that may be changed in place
    library            labkit's own function that solves it, "comm.ring.reduce_scatter": it must pass as well
    writes_test        True if the attempt is itself a test: `play` gives {name of an object: True if accepted}
    """

    key: str
    title: str
    story: str
    objectives: tuple[str, ...]
    difficulty: int
    importance: int
    minutes: int
    reference: Any
    cases: Callable[[], Sequence[Case]]
    answer: Callable[[Case, Inputs], Answers]
    hints: tuple[str, str, str]
    mutants: tuple[Mutant, ...]
    inputs: Callable[[Case], Inputs] = nobody_knows
    play: Callable[..., Any] = call
    laws: tuple[Law, ...] = ()
    tolerance: tuple[float, float] | None = None
    imports: tuple[str, ...] = ()
    may: tuple[str, ...] = ()
    changes: tuple[int, ...] = ()
    library: str = ""
    star: Star | None = None
    writes_test: bool = False
    timeout_s: float = 8.0

    @property
    def name(self) -> str:
        """The name that the attempt must have."""
        return str(self.reference.__name__)

    @property
    def lab(self) -> str:
        """The lab it belongs to, "03"."""
        return self.key.split(".")[0]

    @property
    def solution(self) -> str:
        """The reference as a text that can be run by itself, with the imports that it needs."""
        return solution_of(self.reference)

    @property
    def library_source(self) -> str:
        """An attempt that calls labkit's own function; "" if there is none."""
        module, _, name = self.library.rpartition(".")
        call = f"import labkit.{module}\n\ndef {self.name}(*args):\n    return labkit.{module}.{name}(*args)\n"
        return call if self.library else ""

    @property
    def n_lines(self) -> int:
        """The number of lines in the bodies of the reference, without docstrings."""
        return n_lines(self.solution)

    @property
    def stub(self) -> str:
        """The program that the learner begins with: the reference without the bodies of its functions."""
        return stub_of(self.solution)
