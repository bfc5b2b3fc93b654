"""The functions that the learner calls: the card of an exercise, the check, hints, and in the end the solution.

exercise("03.2")          the card: what is asked, how hard, how long, which laws
check(my_function)        five verdicts, in a second
hint("03.2")              the next hint, three in all; they are counted
solution("03.2")          the reference, after an attempt
progress()                how far you are with all of them, for ProgressPanel(progress)
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.course.exercises.catalogue import by_name, problem, problems
from labkit.course.exercises.exercise_card import Card, Hint, Solution
from labkit.course.exercises.problem import Problem
from labkit.course.judge.attempt import Attempt, attempt_in, attempt_of, blocks_of
from labkit.course.judge.prefork import prefork_server
from labkit.course.judge.report import Report
from labkit.course.learner.progress import Progress, Standing


def exercise(key: str) -> Card:
    """The card of an exercise. ValueError if no exercise has this key.

    It also starts the process that judges, so that the first check need not wait for it."""
    exercise = problem(key)
    prefork_server()
    return Card(exercise, len(Progress().attempts(exercise.key)))


def check(attempt: Any, key: str = "") -> Report:
    """Judge what you wrote: a function (or class) of a cell, for the exercise of its name or of `key`.

    It runs in fresh processes, on random inputs, over every number of ranks that the exercise asks for. The report is
    kept with your progress. ValueError, which says why, for what cannot be judged."""
    if isinstance(attempt, str):
        raise ValueError(f"check takes the function that you wrote, not its name or text: check({attempt[:30]})")
    candidate = attempt_of(attempt)
    report = judged(problem(key) if key else by_name(candidate.name), candidate)
    changed = list(tampered())
    if not changed:
        return report
    names = ", ".join(changed[:3])
    note = f"in this notebook {names} of labkit has been replaced; the check has used labkit as it was installed"
    return Report(**{**vars(report), "notes": (*report.notes, note)})


def check_file(key: str, path: Path) -> Report:
    """Judge the attempt in a notebook or a Python file, which is read and not run."""
    exercise = problem(key)
    return judged(exercise, attempt_in(blocks_of(path), exercise.name))


def judged(it: Problem, attempt: Attempt) -> Report:
    """The report on an attempt, kept with the learner's progress."""
    if attempt.name != it.name:
        raise ValueError(f"exercise {it.key} asks for {it.name}, this is {attempt.name}: rename it")
    report, kept = prefork_server().judge(it.key, attempt), Progress()
    kept.add(report, attempt.before + attempt.source)
    return Report(**{**vars(report), "notes": (*report.notes, kept.note)}) if kept.note else report


def hint(key: str, level: int = 0) -> Hint:
    """The next hint (idea, shapes, skeleton), or the one of `level` 1 to 3. Your progress counts the hints you took."""
    exercise, kept = problem(key), Progress()
    known = kept.hints(exercise.key)
    wanted = level or min(3, known + 1)
    if not 1 <= wanted <= 3:
        raise ValueError(f"there are hints 1, 2 and 3, got {level}")
    if wanted > known + 1:
        raise ValueError(f"hint {wanted} comes after hint {known + 1}: hint({exercise.key!r})")
    kept.hint(exercise.key, wanted)
    return Hint(wanted, exercise.hints[wanted - 1])


def solution(key: str) -> Solution:
    """The reference. ValueError before the first attempt: try it once, however far you get."""
    exercise = problem(key)
    Progress().solution(exercise.key)
    return Solution(exercise.key, exercise.solution)


def progress() -> tuple[Standing, ...]:
    """A row for each exercise: tries, hints, whether it has passed, with a star or not."""
    return Progress().rows(problems())


def tampered() -> Iterator[str]:
    """Names of labkit that code in this notebook has replaced. The check does not use them, but the notebook does."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("labkit.") or not isinstance(module, types.ModuleType):
            continue
        for own, value in list(vars(module).items()):
            if getattr(value, "__module__", None) == "__main__" and isinstance(value, types.FunctionType | type):
                yield f"{name}.{own}"
            elif isinstance(value, type) and value.__module__ == name:
                for part, inner in list(vars(value).items()):
                    if isinstance(inner, types.FunctionType) and inner.__module__ == "__main__":
                        yield f"{name}.{own}.{part}"
