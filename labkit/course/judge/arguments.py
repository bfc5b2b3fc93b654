"""In which case, and with which arguments, an attempt was called: `3 ranks, float32; called with x float32 [3, 5]`.

Numbers and short texts are told as they are, tensors by their dtype and shape, and all else by its length or its class.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.course.exercises.problem import Problem, call_each
from labkit.course.judge import compare
from labkit.course.judge.run_record import RunRecord
from labkit.plan.words import dtype_name

MOST_OF_ONE, MOST = 48, 200
"""Letters of one argument's value, and of all arguments together."""


def called_with(problem: Problem, record: RunRecord, rank: int | None = None) -> str:
    """The case of a run, and the arguments of `rank` in it, or of rank 0 if it is None. The rank is named if others got
    others: `3 ranks, float32; rank 0 called with x float32 [3, 5], by=-1`.

    Of an attempt that is called once for each of several jobs, these are the arguments of the first job whose answer is
    wrong. A setting of the case that is also an argument is told once."""
    by_rank = [tuple(arguments) for arguments in problem.inputs(record.case)]
    asked = rank or 0
    if asked >= len(by_rank):
        return str(record.case)
    if problem.play is call_each and (job := _first_wrong(problem, record, asked)) is not None:
        (jobs,) = by_rank[asked]
        names = _names(problem.reference, len(jobs[job]))
        return f"{record.case.without(*names)}; [{job}] of {len(jobs)}: called with {_all(names, jobs[job])}"
    names = _names(problem.play, len(by_rank[asked]) + 2)[2:]
    if len(names) < len(by_rank[asked]):
        names = _names(problem.reference, len(by_rank[asked]))
    if not by_rank[asked]:
        return str(record.case)
    if len(names) < len(by_rank[asked]):
        names = [f"argument {place}" for place in range(1, len(by_rank[asked]) + 1)]
    words = [_all(names, arguments) for arguments in by_rank]
    who = "" if len(set(words)) == 1 else f"rank {asked} "
    return f"{record.case.without(*names)}; {who}called with {words[asked]}"


def _first_wrong(problem: Problem, record: RunRecord, rank: int) -> int | None:
    """The place of the first answer that is not the expected one; None if there is none, or the run gave no answers."""
    seen, expected = record.outputs[rank], record.expected[rank]
    if not isinstance(seen, list | tuple) or not isinstance(expected, list | tuple) or len(seen) != len(expected):
        return None
    wrong = (compare.wrong(a, b, record.case.n_ranks, problem.tolerance) for a, b in zip(seen, expected, strict=True))
    return next((place for place, difference in enumerate(wrong) if difference is not None), None)


def _names(function: Any, count: int) -> list[str]:
    """The names of the first `count` positional arguments of a function, or of as many as it has."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.items()
    return [name for name, parameter in parameters if parameter.kind in kinds][:count]


def _all(names: Sequence[str], arguments: Sequence[Any]) -> str:
    parts = [one(name, value) for name, value in zip(names, arguments, strict=True) if name != "_"]
    while len(", ".join(parts)) > MOST and len(parts) > 1:
        parts = [*parts[: -2 if parts[-1] == "..." else -1], "..."]
    return ", ".join(parts)


def one(name: str, value: Any) -> str:
    """An argument in a few words."""
    if isinstance(value, Tensor):
        shape = ", ".join(map(str, value.shape))
        return f"{name} {dtype_name(value.dtype)} [{shape}]"
    if isinstance(value, torch.dtype):
        return f"{name}={dtype_name(value)}"
    if _plain(value) and len(words := repr(value)) <= MOST_OF_ONE:
        return f"{name}={words}"
    if isinstance(value, float):
        return f"{name}={value:g}"
    if isinstance(value, str | Sequence | Mapping):
        kind = "letters" if isinstance(value, str) else "entries"
        return f"{name} of {len(value)} {kind}"
    return f"{name}: a {type(value).__name__}" if not callable(value) else f"{name}: a function"


def _plain(value: Any) -> bool:
    """True for numbers, texts, None, and lists, tuples and dicts of them."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(map(_plain, value)) and all(map(_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_plain, value))
    return value is None or type(value) in (bool, int, float, str)
