"""Many small cases in one item of pytest's: an item takes milliseconds, in each worker, and such a case microseconds.

    @cases("verb", VERBS)
    @cases(("p", "m"), SIZES)
    def test_it(verb, p, m): ...

is `pytest.mark.parametrize` in one item. Every case runs, whatever became of those before it, and one that fails says
which it is. Fixtures are set up once for all cases of a test.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import pytest

LONGEST = 100
"""Characters of a value in the name of a case."""


def word(value: Any) -> str:
    """What a case calls this value: its name if it has one, else how it prints."""
    name = getattr(value, "name", getattr(value, "__name__", None))
    text = name if isinstance(name, str) else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def cases(
    names: str | tuple[str, ...], values: Iterable[Any] | Callable[[], Iterable[Any]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test with each of these values under its name, or with each of these tuples under its names.

    What is dear to load is given as a function, which is asked when the test runs and not when tests are collected.
    Stacked, it is each with each. The test raises ValueError where there are no cases, with which it would pass."""
    keys = (names,) if isinstance(names, str) else names

    def rows() -> list[dict[str, Any]]:
        rows = [
            dict(zip(keys, (value,) if isinstance(names, str) else value, strict=True))
            for value in (values() if callable(values) else values)
        ]
        if not rows:
            raise ValueError(f"a test of each {', '.join(keys)} has no cases")
        return rows

    def folded(test: Callable[..., None]) -> Callable[..., None]:
        once, inner = getattr(test, "once", test), getattr(test, "axes", ())
        axes, taken = (rows, *inner), {*keys, *getattr(test, "taken", ())}
        signature = inspect.signature(once)

        def whole(**fixtures: Any) -> None:
            failures: list[BaseException] = []
            product = [functools.reduce(operator.or_, case) for case in itertools.product(*(axis() for axis in axes))]
            for case in product:
                try:
                    once(**fixtures, **case)
                except (Exception, pytest.fail.Exception) as failure:
                    failure.add_note(f"case: {', '.join(f'{key}={word(value)}' for key, value in case.items())}")
                    failures.append(failure)
            if len(failures) == 1:
                raise failures[0]
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(product)} cases", failures)

        functools.update_wrapper(whole, test)  # with its marks
        free = [parameter for name, parameter in signature.parameters.items() if name not in taken]
        whole.__dict__.update(
            __wrapped__=once, once=once, axes=axes, taken=taken, __signature__=signature.replace(parameters=free)
        )
        return whole

    return folded


def selection(
    kept: Iterable[tuple[Any, ...]], *axes: Iterable[Any], there_is: Callable[..., bool] = lambda *case: True
) -> list[Any]:
    """For `pytest.mark.parametrize`: each value of an axis with each of every other axis, in one case or more. All but
    the kept cases are marked `rest`.

    With two axes these are all cases; with three and more, where most mistakes are of two values that do not get on,
    far fewer. `there_is` tells which cases there are. Raises ValueError if a kept case is none of them, or if a value
    is left that no kept case has."""
    kept, columns = list(kept), [list(axis) for axis in axes]
    product = [case for case in itertools.product(*columns) if there_is(*case)]
    if strange := [case for case in kept if case not in product]:
        raise ValueError(f"no such cases: {strange}")
    for place, column in enumerate(columns):
        if missing := [value for value in column if value not in [case[place] for case in kept]]:
            raise ValueError(f"only in the rest: {missing}")
    chosen = [*kept]
    waiting = set().union(*map(pairs_of, product)).difference(*map(pairs_of, kept))
    while waiting:
        chosen.append(max(product, key=lambda case: len(pairs_of(case) & waiting)))
        waiting -= pairs_of(chosen[-1])
    return [pytest.param(*case, marks=() if case in kept else pytest.mark.rest) for case in product if case in chosen]


def pairs_of(case: tuple[Any, ...]) -> set[Any]:
    """Each two values of a case, with the axes that they are of."""
    return set(itertools.combinations(((axis, repr(value)) for axis, value in enumerate(case)), 2))
