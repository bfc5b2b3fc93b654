"""Stubs: what is left of a reference when its bodies are taken out."""

from __future__ import annotations

import ast

from labkit.course.exercises.catalogue import problem
from labkit.course.exercises.stub import n_lines, stub_of

SOLVED = '''from functools import cache


def best_cut(costs: list[int]) -> int:
    """The cut.   [n] -> int

    More of it."""
    @cache
    def best(i: int) -> int:
        return i

    return best(len(costs))
'''


def test_a_stub_keeps_signature_and_docstring_and_nothing_of_the_body() -> None:
    """A decorator of the first inner function that stays behind; a line of the answer."""
    stub = stub_of(SOLVED)
    ast.parse(stub)
    assert "More of it." in stub
    assert "best(" not in stub.replace("best_cut(", "")
    assert "...  # about 5 lines" in stub
    assert n_lines(SOLVED) == 5


def test_each_method_of_a_class_is_a_stub_of_its_own() -> None:
    """A class whose __init__ is given away."""
    stub = stub_of("class A:\n    def __init__(self):\n        self.x = 1\n\n    def f(self):\n        return 2\n")
    assert stub.count("...  # one line") == 2
    assert "self.x" not in stub


def test_names_for_types_come_with_a_reference() -> None:
    """A stub that a notebook cannot run: NameError in its first line."""
    for key, name in (("01.4", "Batch"), ("02.3", "Place"), ("02.4", "Call")):
        space: dict[str, object] = {}
        exec(problem(key).stub, space)
        assert name in space
