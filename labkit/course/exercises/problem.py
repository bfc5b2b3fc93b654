"""A Problem: one exercise, with everything that is needed to teach it, to judge it, and to judge the judge.

An exercise is a folder in problems/, named after the lab, the place in it and what is written, "p06_4_overlap":

    exercise.md     what the learner reads: title, objectives, story, hints        (exercise_files.py reads it)
    mutants.yaml    mistakes that people make, and the verdict that rejects each   (exercise_files.py reads it)
    exercise.py     the reference, a function or class, and `PROBLEM = Problem(**beside(__file__), reference=..., ...)`:
                        reference                              the stub is its signature and docstring
                        cases -> inputs -> play on every rank -> answer    random, from a seed drawn for each check
                        laws                                   bytes sent, bytes held, what must precede what

`labkit build 06.8_my_title` makes such a folder. Inputs are made by the judge and handed out by rank; the answer is
worked out by the judge in one process, where no rank can see it. So what a rank does not have, it must be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from labkit.course.exercises.exercise_files import Mutant
from labkit.course.exercises.stub import n_lines, solution_of, stub_of
from labkit.course.judge.case import Case
from labkit.course.judge.run_record import RunRecord


class Complaint(NamedTuple):
    """What is wrong, on which rank (None: on no one of them), and what to look at; `at` marks events in the picture."""

    expected: str
    seen: str
    rank: int | None = None
    at: tuple[int, ...] = ()


class Law(NamedTuple):
    """Something that holds for every right answer: which verdict it is of, in words, and who looks whether it holds."""

    verdict: str
    words: str
    broken: Callable[[RunRecord], Complaint | None]


class Star(NamedTuple):
    """A cost that can be beaten: what is counted, the cost of a run, how low it must be, and a program that is there.

    `target(case)` is below what the reference costs."""

    words: str
    cost: Callable[[RunRecord], float]
    target: Callable[[Case], float]
    best: str
    unit: str = "bytes"


def nobody_knows(_: Case) -> Sequence[tuple[Any, ...]]:
    """Inputs of a problem that has none."""
    return [()] * _.n_ranks


def call(attempt: Any, group: Any, *args: Any) -> Any:
    """How most attempts are run on a rank: the inputs, then the group."""
    return attempt(*args, group)


def call_alone(attempt: Any, group: Any, *args: Any) -> Any:
    """How an attempt without ranks is run: only the inputs."""
    return attempt(*args)


def call_each(attempt: Any, group: Any, jobs: Sequence[tuple[Any, ...]]) -> Any:
    """How an attempt without ranks is run on several jobs: one answer for each."""
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
    given              what of labkit an attempt may import, "Work", "LossScale"
    may                names that attempts otherwise must not touch, "untyped_storage"
    changes            positions of inputs that may be changed in place
    library            labkit's own function for it, "comm.ring.reduce_scatter": it must pass as well
    writes_test        the attempt is a check itself: `play` gives {what it was shown: whether it accepts it}
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
    answer: Callable[[Case, Sequence[tuple[Any, ...]]], Sequence[Any]]
    hints: tuple[str, str, str]
    mutants: tuple[Mutant, ...]
    inputs: Callable[[Case], Sequence[tuple[Any, ...]]] = nobody_knows
    play: Callable[..., Any] = call
    laws: tuple[Law, ...] = ()
    tolerance: tuple[float, float] | None = None
    given: tuple[str, ...] = ()
    may: tuple[str, ...] = ()
    changes: tuple[int, ...] = ()
    library: str = ""
    star: Star | None = None
    writes_test: bool = False
    timeout_s: float = 8.0

    @property
    def name(self) -> str:
        """What the attempt must be called."""
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
        """labkit's own function for it as an attempt; "" if there is none."""
        module, _, name = self.library.rpartition(".")
        call = f"import labkit.{module}\n\ndef {self.name}(*args):\n    return labkit.{module}.{name}(*args)\n"
        return call if self.library else ""

    @property
    def n_lines(self) -> int:
        """How many lines the reference takes, without signature and docstring."""
        return n_lines(self.solution)

    @property
    def stub(self) -> str:
        """The reference with its bodies taken out: what the learner begins with."""
        return stub_of(self.solution)
