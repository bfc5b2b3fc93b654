"""All exercises, looked up by their key or by the name of the function or class that the learner writes."""

from __future__ import annotations

import difflib
import importlib
from functools import cache
from importlib.resources import files

from labkit.course.exercises import problems as problem_folder
from labkit.course.exercises.exercise_files import key_of
from labkit.course.exercises.problem import Problem
from labkit.course.numbers import full, natural


@cache
def folders() -> tuple[tuple[str, str], ...]:
    """(key, name) of every exercise's folder, in order. No exercise is imported for this."""
    names = [folder.name for folder in files(problem_folder).iterdir() if folder.name.startswith("p")]
    return tuple(sorted(((key_of(name), name) for name in names), key=lambda folder: natural(folder[0])))


def problems(lab: str = "") -> tuple[Problem, ...]:
    """Every problem, or those of a lab ("03"), in order."""
    return tuple(_load(folder) for key, folder in folders() if not lab or key.startswith(f"{lab}."))


def problem(key: str) -> Problem:
    """The problem of a key, "03.2" or "3.2". ValueError, which names the nearest keys, if there is none."""
    wanted, known = full(str(key)), dict(folders())
    if wanted not in known:
        lab, _, _ = wanted.partition(".")
        labs = dict.fromkeys(key.split(".")[0] for key in known)
        near = [key for key in known if key.startswith(f"{lab}.")] or labs
        raise ValueError(f"there is no exercise {key!r}; there are {', '.join(near)}")
    return _load(known[wanted])


def by_name(name: str) -> Problem:
    """The problem whose attempt has this name. ValueError, which names the nearest names, if there is none."""
    named = {problem.name: problem for problem in problems()}
    if name not in named:
        near = difflib.get_close_matches(name, named, 3) or sorted(named)[:5]
        raise ValueError(
            f"no exercise asks for {name!r}; did you mean {', '.join(near)}? Or say which: check(it, '03.2')"
        )
    return named[name]


def _load(folder: str) -> Problem:
    exercise: Problem = importlib.import_module(f"{problem_folder.__name__}.{folder}.exercise").PROBLEM
    return exercise
