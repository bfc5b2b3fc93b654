"""All exercises, found by key or by the name of what is to be written."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from functools import cache

from labkit.course.exercises import problems as folder
from labkit.course.exercises.problem import Problem


@cache
def files() -> tuple[tuple[str, str], ...]:
    """(key, module) of every problem, in order; none of them is loaded for it."""
    found = sorted(each.name for each in pkgutil.iter_modules(folder.__path__) if each.name.startswith("p"))
    return tuple(
        sorted(((f"{name[1:3]}.{name.split('_')[1]}", f"{folder.__name__}.{name}") for name in found), key=_order)
    )


def _order(file: tuple[str, str]) -> tuple[int, int]:
    lab, place = file[0].split(".")
    return int(lab), int(place)


def problems(lab: str = "") -> tuple[Problem, ...]:
    """Every problem, or those of a lab ("03"), in order."""
    return tuple(_load(module) for key, module in files() if not lab or key.startswith(f"{lab}."))


def problem(key: str) -> Problem:
    """The problem of a key, "03.2" or "3.2". ValueError with the nearest keys."""
    lab, _, place = str(key).partition(".")
    wanted = f"{lab.zfill(2)}.{place}"
    modules = dict(files())
    if wanted not in modules:
        near = [each for each in modules if each.startswith(f"{lab.zfill(2)}.")] or sorted(
            {k.split(".")[0] for k in modules}
        )
        raise ValueError(f"there is no exercise {key!r}; there are {', '.join(near)}")
    return _load(modules[wanted])


def by_name(name: str) -> Problem:
    """The problem whose attempt has this name. ValueError with the nearest names."""
    found = {each.name: each for each in problems()}
    if name not in found:
        near = difflib.get_close_matches(name, found, 3) or sorted(found)[:5]
        raise ValueError(
            f"no exercise asks for {name!r}; did you mean {', '.join(near)}? Or say which: check(it, '03.2')"
        )
    return found[name]


def _load(module: str) -> Problem:
    found: Problem = importlib.import_module(module).PROBLEM
    return found
